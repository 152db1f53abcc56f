"""The page in a real browser: nothing is fetched, nothing overflows, nothing needs script or style to be read.

Skipped where there is no Chromium with its driver (Debian: chromium, chromium-driver) or no selenium.
``PERFSUITE_SCREENSHOTS=DIR`` keeps pictures of it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path

import pytest

from perfsuite.cli.main import main
from perfsuite.reports.page.page import renderer, write_page
from test_correctness.helpers.fleets import MATMUL, fleet, slower
from test_correctness.helpers.pages import everything, many, material

pytestmark = pytest.mark.slow
JENKINS = "default-src 'none'; style-src 'self'"
"""The policy under which some services show what a build made: no script, no style of the page's own."""
CLIPPED = """
return [...document.querySelectorAll('figure svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const at = text.getBoundingClientRect();
    return at.width && (at.left < box.left - 1 || at.right > box.right + 1 || at.bottom > box.bottom + 1);
  }).map(text => svg.getAttribute('aria-label') + ': ' + text.textContent);
})"""
OVERLAPPING = """
return [...document.querySelectorAll('figure svg')].flatMap(svg => [...svg.querySelectorAll('.role-axis-label')]
  .flatMap(axis => {
    const boxes = [...axis.querySelectorAll('text')].filter(text => text.getAttribute('opacity') !== '0')
      .map(text => [text.getBoundingClientRect(), text.textContent]).filter(pair => pair[0].width);
    return boxes.flatMap(([a, first], at) => boxes.slice(at + 1).filter(([b]) =>
      a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
      .map(([, second]) => svg.getAttribute('aria-label') + ': ' + first + ' and ' + second));
  }))"""


UNFOLD = "document.querySelectorAll('details.part').forEach(part => { part.open = true })"
SHOWN = (
    "return [...document.querySelectorAll('details.part > :not(summary)')].filter(one => one.checkVisibility()).length"
)


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver here: apt-get install chromium chromium-driver")
    if renderer() is None:
        pytest.skip("vl-convert-python is not installed: pip install 'perfsuite[report]'")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(material(*everything(), skips={"t.py::test_no": "no native fp8"}), path)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "large.html"
    write_page(material(*many(1000)), path)
    return path


def look(browser, path, width=1280, scheme="light", media="", *, unfolded=True):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get(f"file://{path}")
    if unfolded:
        browser.execute_script(UNFOLD)
    folder = os.environ.get("PERFSUITE_SCREENSHOTS")
    if folder:
        height = browser.execute_script("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 12000), "scale": 1}
        taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        name = f"{path.stem}-{width}-{media or scheme}.png"
        (Path(folder) / name).write_bytes(base64.b64decode(taken["data"]))


@pytest.mark.parametrize(
    ("width", "scheme", "media"), [(1280, "light", ""), (1280, "dark", ""), (400, "light", ""), (1280, "dark", "print")]
)
def test_nothing_is_clipped_overlaps_or_scrolls_sideways(browser, shown, width, scheme, media):
    look(browser, shown, width, scheme, media)
    assert width >= browser.execute_script("return document.documentElement.scrollWidth")
    assert [] == browser.execute_script(CLIPPED)
    assert [] == browser.execute_script(OVERLAPPING)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_of_64_nodes_has_a_map_and_no_overflow(browser, tmp_path, width):
    fleet(tmp_path, 64, wrong={3: slower(MATMUL, 0.2), 17: slower(MATMUL, 0.15, 5)})
    assert main(["fleet", str(tmp_path), "--html", str(tmp_path / "fleet.html")]) == 1
    look(browser, tmp_path / "fleet.html", width)
    assert width >= browser.execute_script("return document.documentElement.scrollWidth")
    assert [] == browser.execute_script(CLIPPED)
    sizes = "return [...document.querySelectorAll('figure svg text')].map(text => text.getBoundingClientRect().height)"
    assert min(filter(None, browser.execute_script(sizes))) >= 10


def test_sections_are_folded_on_a_phone_without_a_script(browser, shown, tmp_path):
    plain = tmp_path / "plain.html"
    plain.write_text(shown.read_text().replace("<script>", "<!--").replace("</script>", "-->"))
    look(browser, plain, 1280, unfolded=False)
    assert browser.execute_script(SHOWN) > 20
    look(browser, plain, 400, unfolded=False)
    assert browser.execute_script(SHOWN) == 0
    browser.find_element("css selector", "#s-device summary").click()
    assert browser.execute_script(SHOWN) > 0


def test_nothing_is_fetched_and_nothing_fails(browser, shown):
    browser.get_log("performance")
    look(browser, shown)
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    assert {f"file://{shown}"} == {url for url in urls if url != "about:blank"}
    assert [] == browser.get_log("browser")


def test_paper_is_light_for_readers_of_the_dark(browser, shown):
    look(browser, shown, scheme="dark")
    colour = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(colour) == "rgb(20, 23, 28)"
    ink = "return getComputedStyle(document.querySelector('figure svg text')).fill"
    dark = browser.execute_script(ink)
    look(browser, shown, scheme="dark", media="print")
    assert browser.execute_script(colour) == "rgb(255, 255, 255)"
    assert browser.execute_script(ink) != dark


def test_without_script_and_style_charts_and_tables_are_there(browser, shown, tmp_path):
    strict = tmp_path / "strict.html"
    text = shown.read_text()
    start = text.index('content="default-src')
    strict.write_text(f'{text[:start]}content="{JENKINS}"{text[text.index(">", start) :]}')
    look(browser, strict)
    drawn = "return [...document.querySelectorAll('figure svg')].map(svg => svg.getBoundingClientRect().width)"
    widths = browser.execute_script(drawn)
    assert len(widths) > 8
    assert min(widths) > 100
    assert browser.execute_script("return document.querySelectorAll('#cases tbody tr').length") == len(everything())
    assert browser.execute_script("return document.getElementById('filterbar').hidden")


def test_the_filter_hides_rows_and_can_be_shared(browser, shown):
    look(browser, shown)
    visible = "return [...document.querySelectorAll('#cases tbody tr')].filter(row => !row.hidden).length"
    everyone = browser.execute_script(visible)
    field = browser.find_element("id", "filter")
    field.send_keys("all_reduce ws8")
    assert browser.execute_script(visible) == 3 < everyone
    assert browser.current_url.endswith("#filter=all_reduce%20ws8")
    browser.get("about:blank")
    browser.get(f"file://{shown}#filter=test_matmul")
    assert browser.execute_script(visible) == 4


def test_columns_sort_by_their_numbers_with_the_keyboard(browser, shown):
    look(browser, shown)
    (head,) = [one for one in browser.find_elements("css selector", "#cases th button") if one.text == "median"]
    numbers = "return [...document.querySelectorAll('#cases tbody tr')].map(row => +row.cells[2].dataset.v)"
    head.send_keys("\n")
    found = browser.execute_script(numbers)
    assert found == sorted(found)
    head.send_keys("\n")
    assert browser.execute_script(numbers) == sorted(found, reverse=True)


ROWS = "return [...document.querySelectorAll('#cases tbody tr')].map(row => row.querySelector('code').textContent)"
FOLDED = "return document.getElementById('folds').hidden"


def test_of_many_cases_as_many_are_listed_as_a_browser_lays_out_at_once(browser, large):
    look(browser, large)
    assert (300, False) == (len(browser.execute_script(ROWS)), browser.execute_script(FOLDED))
    field, more = browser.find_element("id", "filter"), browser.find_element("id", "more")
    assert not more.is_displayed()
    field.send_keys("a100-77")
    fitting = {"test_matmul[a100-77]", *(f"test_matmul[a100-77{digit}]" for digit in range(10))}
    assert fitting == set(browser.execute_script(ROWS))
    assert (True, "11 of 1000") == (browser.execute_script(FOLDED), browser.find_element("id", "count").text)
    field.send_keys("\b" * 7)
    assert 300 == len(browser.execute_script(ROWS))
    assert ("show 300 more of 700", "1000 of 1000, 300 here") == (more.text, browser.find_element("id", "count").text)
    for left in (600, 900, 1000):
        more.send_keys("\n")
        assert left == len(set(browser.execute_script(ROWS)))
    assert not more.is_displayed()


@pytest.mark.parametrize("filtered", [False, True])
def test_a_link_leads_to_a_case_wherever_it_is(browser, large, filtered):
    look(browser, large)
    anchor = browser.execute_script("return document.querySelector('.fold:last-child tbody tr:last-child').id")
    if filtered:
        browser.find_element("id", "filter").send_keys("nothing of the kind")
        assert [] == browser.execute_script(ROWS)
    browser.execute_script(f"location.hash = '#{anchor}'")
    top = f"return document.getElementById('{anchor}').getBoundingClientRect().top"
    assert 0 <= browser.execute_script(top) < 900
    assert browser.execute_script(FOLDED) == filtered


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, shown, scheme):
    axe = pytest.importorskip("axe_selenium_python", reason="axe-selenium-python is not installed")
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})  # axe is a script that the page does not allow
    look(browser, shown, scheme=scheme)
    browser.set_script_timeout(200)
    judge = axe.Axe(browser)
    judge.inject()
    found = [one for one in judge.run()["violations"] if one["impact"] in ("serious", "critical")]
    assert [] == [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found]
