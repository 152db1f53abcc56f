"""What the screen of many cases costs: CPU seconds of ``perfsuite show``, and of the screen alone, its results known.

    python benchmarks/screen_speed.py --journals FILE... [--cases 10000]

The journals' results are repeated under ids of their own until there are so many.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import TypeVar

from page_size import grow

from perfsuite.metrics import read_run
from perfsuite.record.run import RunRecord
from perfsuite.reports.notable import notable
from perfsuite.reports.screen import screen

T = TypeVar("T")


def timed(what: str, do: Callable[[], T]) -> T:
    """Do it and print what CPU time it took."""
    start_s = process_time()
    made = do()
    print(f"{what:50} {process_time() - start_s:5.2f} s CPU")
    return made


def lines(record: RunRecord) -> int:
    """Lines of the screen."""
    return len(screen(record, notable(record), width=119))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journals", nargs="+", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "grown.jsonl"
        grow(options.journals, options.cases, path)
        record = timed("journal read", lambda: read_run(path))
    count = timed("screen", lambda: lines(record))
    print(f"{len(record.results)} cases, {count} lines")


if __name__ == "__main__":
    main()
