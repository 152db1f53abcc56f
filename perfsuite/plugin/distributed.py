"""Beside pytest-xdist: perf cases never share a machine with other tests, so its workers leave measured ones out."""

from __future__ import annotations

from typing import Any

import pytest

from perfsuite.base.units import plural
from perfsuite.plugin.collect import cases_of, is_case
from perfsuite.plugin.gate_options import gate_options_key
from perfsuite.plugin.options import settings_key

_LEFT_OUT = "perfsuite_left_out"
_left_out_key = pytest.StashKey[int]()


def configure(config: pytest.Config) -> None:
    """Refuse what measures for the record where tests are about to be dealt out; before any worker starts."""
    option = config.option
    dealt_out = getattr(option, "tx", None) and getattr(option, "dist", "no") != "no"
    if dealt_out and config.stash[gate_options_key].fresh:
        raise pytest.UsageError(
            "--perf-gate, --perf-update and --perf-runs measure, which nobody does beside other tests; "
            "leave -n out, or add -n0"
        )
    if dealt_out:
        config.pluginmanager.register(_Controller(config), "perfsuite.distributed")


def leave_out_measured(session: pytest.Session) -> None:
    """In a worker: deselect perf cases, unless each only runs once, and tell the controller how many there were."""
    config = session.config
    if not hasattr(config, "workerinput") or config.stash[settings_key].budget.smoke:
        return
    cases = cases_of(session)
    if cases:
        session.items[:] = [item for item in session.items if not is_case(item)]
        config.hook.pytest_deselected(items=cases)
        worker: Any = config  # pytest-xdist adds what a worker says to its controller
        worker.workeroutput[_LEFT_OUT] = len(cases)


class _Controller:
    """Registered where pytest-xdist deals tests out, which has the hook that it implements."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects the same tests: one count is all."""
        count = getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0)
        self._config.stash[_left_out_key] = max(count, self._config.stash.get(_left_out_key, 0))


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """One line and the command that runs what was left out."""
    count = config.stash.get(_left_out_key, 0)
    if count:
        from perfsuite.base.masking import masked_words

        command = " ".join(["pytest", *masked_words(map(str, config.invocation_params.args)), "-n0"])
        told = f"{plural(count, 'perf case')} left out, measured alone or not at all"
        terminalreporter.write_line(f"perfsuite: {told}: {command}", yellow=True)
