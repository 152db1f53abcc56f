"""What a page of many cases costs: CPU seconds, memory and bytes of ``perfsuite report --html``.

    python benchmarks/page_size.py --journals FILE... [--cases 10000]

The journals' results are repeated under ids of their own until there are so many; every child does one page.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

REPORT = "import sys; from perfsuite.cli.main import main; sys.exit(main(sys.argv[1:]))"


def grow(journals: list[Path], cases: int, path: Path) -> None:
    """A journal of ``cases`` results made of those of ``journals``, the header of the first."""
    lines = [line for journal in journals for line in journal.read_text(encoding="utf-8").splitlines()]
    header, results = lines[0], [line for line in lines if line.startswith('{"result"')]
    around = [line for line in lines[1:] if line.startswith(('{"environment"', '{"peaks"'))]
    with path.open("w", encoding="utf-8") as file:
        print(header, *around, sep="\n", file=file)
        for number in range(cases):
            plain = json.loads(results[number % len(results)])
            case = plain["result"]["case"]
            round_ = number // len(results)
            plain["result"]["case"] = case.replace("]", f"-n{round_}]") if round_ else case
            print(json.dumps(plain, separators=(",", ":")), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journals", nargs="+", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="folder that keeps journal and page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        journal, page = folder / "grown.jsonl", folder / "grown.html"
        grow(options.journals, options.cases, journal)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", REPORT, "report", journal, "--html", page], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        text = page.read_bytes()
        print(
            f"{options.cases} cases, journal {journal.stat().st_size / 1e6:.1f} MB: {cpu_s:.2f} s CPU, "
            f"{after.ru_maxrss / 1024:.0f} MiB, page {len(text) / 1e6:.2f} MB, {text.count(b'<figure>')} charts"
        )


if __name__ == "__main__":
    main()
