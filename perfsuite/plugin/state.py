"""Find the plugin's state of a run from pytest's config.

This plugin is loaded in every pytest run, and most runs have no perf cases.  So modules that measure and judge are
imported when the first perf test is collected: here, and in :mod:`perfsuite.plugin.order`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from perfsuite.plugin.suite import Suite

suite_key: pytest.StashKey[Suite] = pytest.StashKey()  # Absent until a perf test was collected.


def suite_of(config: pytest.Config) -> Suite:
    """Return the state of this pytest run; the first call creates it."""
    if suite_key not in config.stash:
        from perfsuite.plugin.suite import Suite

        config.stash[suite_key] = Suite(config)
        config.stash[suite_key].signals.install()
        config.pluginmanager.register(import_module("perfsuite.plugin.order").WithCases(), "perfsuite.with_cases")
    return config.stash[suite_key]
