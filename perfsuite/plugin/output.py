"""How much of a run the terminal shows: ``--perf-show``, -v and -q; and lines that fit it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, cast

import pytest

from perfsuite.plugin import collisions
from perfsuite.plugin.options import SHOWN

Level = Literal["quiet", "summary", "tables", "cases"]
level_key = pytest.StashKey[Level]()
_DISPLAY = (
    "--benchmark-columns",
    "--benchmark-sort",
    "--benchmark-group-by",
    "--benchmark-name",
    "--benchmark-histogram",
    "--benchmark-verbose",
    "--benchmark-compare",
    "--benchmark-cprofile",
)
"""Options of pytest-benchmark that ask for its table."""


def configure(config: pytest.Config) -> None:
    """Check the option before anything is measured."""
    asked, written = collisions.option(config, "perf_show"), collisions.ini(config, "perf_show")
    for where, value in (("--perf-show", asked), ("ini perf_show", written)):
        if value and value not in SHOWN:
            raise pytest.UsageError(f"{where}: {value!r} is nothing to show; choose {', '.join(SHOWN)}")
    verbose = config.getoption("verbose", 0)
    spoken = "tables" if verbose > 0 else "quiet" if verbose < 0 else ""
    config.stash[level_key] = cast("Level", asked or spoken or written or "summary")


def leave_out_perf_rows(config: pytest.Config, perf: Collection[str]) -> None:
    """Leave perf cases out of pytest-benchmark's table, whose unit and ratios mix memory copies and training steps.

    They stay where ``--perf-show=cases`` or an option of its own asks for the table, and in its files and comparisons.
    """
    benchmarks = getattr(config, "_benchmarksession", None)  # it has no public way to say what it shows
    words = [*config.getini("addopts"), *map(str, config.invocation_params.args)]
    asked = any(word.partition("=")[0] in _DISPLAY for word in words) or config.stash[level_key] == "cases"
    if asked or benchmarks is None or not benchmarks.groups:
        return
    kept = [
        (name, [bench for bench in members if bench["fullname"] not in perf]) for name, members in benchmarks.groups
    ]
    benchmarks.groups = [(name, members) for name, members in kept if members]


class Out:
    """The terminal: its width, and lines folded to it."""

    def __init__(self, terminalreporter: Any) -> None:
        self._reporter = terminalreporter
        self.width: int = terminalreporter._tw.fullwidth - 1  # a line of full width wraps on some terminals
        file = getattr(terminalreporter._tw, "_file", None)
        self._encoding: str | None = getattr(file, "encoding", None) or "utf-8"

    def section(self, title: str) -> None:
        """A heading; one that is wider than the terminal goes on below."""
        from perfsuite.base.text import encodable, folded

        first, *rest = folded(encodable(title, self._encoding), self.width - 4)
        self._reporter.ensure_newline()  # else the first line below would begin with an empty one
        self._reporter.section(first)
        for line in rest:
            self.line(line)

    def line(self, text: str, **colour: bool) -> None:
        """A line of text as it is: a terminal wraps it, and a log can be searched for it."""
        from perfsuite.base.text import encodable, escaped, screen_text

        self._reporter.write_line(encodable(screen_text(escaped(text)), self._encoding), **colour)

    def fold(self, text: str, **colour: bool) -> None:
        """A line of text in lines of the terminal's width; an id or a path that is longer stands alone."""
        from perfsuite.base.text import folded, printable

        for part in folded(printable(text, 4 * self.width), self.width):
            self.line(part, **colour)
