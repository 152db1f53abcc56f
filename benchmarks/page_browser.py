"""What a page of many cases costs in Chromium: opening it, a filter, a sorting; beside what the clock says, what the
page's own thread computed, which other programs do not lengthen.

    python benchmarks/page_browser.py --page PAGE.html  # a page of 10,000 rows: benchmarks/page_size.py --keep DIR

Needs selenium, Chromium and its driver (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

_TYPED = """const field = document.getElementById("filter");
field.value = arguments[0]; field.dispatchEvent(new Event("input")); document.body.offsetHeight;
return document.getElementById("count").textContent"""
_SORTED = (
    """document.querySelectorAll("#cases th button")[2].click(); document.body.offsetHeight; return "by median" """
)


def browser() -> Any:
    """Chromium without a window, its clock of tasks set to what they compute."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.timeouts = {"pageLoad": 600_000, "script": 600_000}
    driver = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    return driver


def told(driver: Any, what: str, do: Callable[[], Any]) -> None:
    """Do it and print what it took."""
    before, start_s = computed_s(driver), perf_counter()
    said = do()
    took_s = perf_counter() - start_s
    print(f"{what:24} {took_s:6.2f} s by the clock, {computed_s(driver) - before:6.2f} s computed   {said or ''}")


def computed_s(driver: Any) -> float:
    """CPU seconds of all tasks of the page's thread."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", required=True, type=Path)
    options = parser.parse_args()
    driver = browser()
    try:
        told(driver, "opening", lambda: driver.get(options.page.resolve().as_uri()))
        rows = driver.execute_script("return document.querySelectorAll('#cases tbody tr').length")
        print(f"{rows} rows, {options.page.stat().st_size / 1e6:.2f} MB")
        for text in ("ddp ws4", "matmul", ""):
            told(driver, f"filter {text!r}", lambda text=text: driver.execute_script(_TYPED, text))
        told(driver, "sorting", lambda: driver.execute_script(_SORTED))
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
