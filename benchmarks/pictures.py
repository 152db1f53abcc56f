"""Draw the pictures of the documents from a stored run: the screen as an SVG and the HTML page as a PNG.

    python benchmarks/pictures.py JOURNAL --screen docs/how-to/screen.svg --page docs/how-to/page.png

The PNG needs Chromium, Pillow and the extra ``report``.  The run of the stored pictures, with device 3 6 % slower:

    export PERFSUITE_FAMILIES=simmusa=simmusa.family:SimMusa
    export SIMMUSA_COSTS='{"jitter": 0.002, "seed": 1, "slow": {"device 3": 1.06}}'
    pytest test_perf --perf-platform=simmusa --perf-journal=run.jsonl -k "s4000 and (memory_bandwidth or
        (test_matmul and 512x512x512 and (bf16 or fp32)) or (test_pairs and ws8) or (every_device and ws8) or
        ((all_reduce or all_gather) and ws8 and fp32))"
"""

from __future__ import annotations

import argparse
import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLUMNS, LINE, CHARACTER, MARGIN = 108, 18, 8.4, 14
"""Characters of a line; height of a line, width of a character and margin in pixels."""
WINDOW, COLOURS = (1280, 1060), 160


def perfsuite(folder: Path, *words: str) -> str:
    """Return the output of a command of perfsuite that runs in this folder."""
    environ = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "perfsuite.cli", *words]
    return subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, text=True).stdout


def screen_svg(text: str) -> str:
    """Return the lines of a terminal as an SVG of text."""
    lines = text.rstrip("\n").split("\n")
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), len(lines) * LINE + 2 * MARGIN
    rows = (
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number - 4}" xml:space="preserve">{html.escape(line)}</text>'
        for number, line in enumerate(lines, 1)
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
            "<style>text { font: 14px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #d8dee9 }</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1f2430"/>',
            *rows,
            "</svg>\n",
        )
    )


def draw_page(page: Path, target: Path) -> None:
    """Write the top of an HTML page as Chromium shows it, with few colours."""
    from PIL import Image

    chromium = shutil.which("chromium") or sys.exit("error: no chromium on the PATH; install it")
    size = f"--window-size={WINDOW[0]},{WINDOW[1]}"
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size)
    subprocess.run([chromium, *flags, f"--screenshot={target}", page.as_uri()], check=True, capture_output=True)
    Image.open(target).convert("RGB").quantize(COLOURS).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", metavar="JOURNAL", type=Path, help="draw this run")
    parser.add_argument("--screen", type=Path, metavar="FILE", help="write the screen to this SVG (default: not drawn)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page to this PNG (default: not drawn)")
    options = parser.parse_args()
    folder, name = options.journal.resolve().parent, options.journal.name
    if options.screen:
        options.screen.write_text(screen_svg(perfsuite(folder, "show", name)), encoding="utf-8")
    if options.page:
        with tempfile.TemporaryDirectory() as drafts:
            page = Path(drafts) / "page.html"
            perfsuite(folder, "report", name, "--html", str(page))
            draw_page(page, options.page.resolve())


if __name__ == "__main__":
    main()
