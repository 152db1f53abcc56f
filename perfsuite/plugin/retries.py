"""Perf cases that a plugin such as pytest-rerunfailures or pytest-retry runs again: one case, whose last try counts.

The tries before are told at the end and in the journal.  Runs that count as evidence (--perf-gate, --perf-update,
--perf-runs) take the first try of every case, whatever such plugins want: a case that is measured until it passes is no
evidence.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from perfsuite.base.errors import first_line
from perfsuite.plugin.tables import state_key

_tries_key = pytest.StashKey[list[str]]()
_passed_key = pytest.StashKey[dict[str, list[str]]]()


def failed(item: pytest.Item, error: BaseException) -> None:
    """Keep why a try failed; pytest-benchmark must not keep what it measured."""
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if benchmark is not None:
        benchmark.has_error = True
    if not isinstance(error, pytest.skip.Exception):
        item.stash.setdefault(_tries_key, []).append(first_line(error) or type(error).__name__)


def passed(item: pytest.Item) -> None:
    """The case is well now: earlier tries are no reason for a missing result."""
    tries = item.stash.get(_tries_key, [])
    if tries:
        item.config.stash[state_key].missing.pop(item.nodeid, None)
        item.config.stash.setdefault(_passed_key, {})[item.nodeid] = tries


def lines(config: pytest.Config) -> Iterable[str]:
    """A warning per case that passed only when it was run again."""
    for node, tries in config.stash.get(_passed_key, {}).items():
        yield f"{node}: passed only at try {len(tries) + 1}; the one before failed: {tries[-1]}"


def keep_first_tries(config: pytest.Config, cases: Iterable[pytest.Item]) -> None:
    """In a run that counts as evidence: keep pytest-retry, which acts inside a report, from running a case again."""
    if config.pluginmanager.has_plugin("pytest-retry"):
        for item in cases:
            item.add_marker(pytest.mark.flaky(condition=False), append=False)
