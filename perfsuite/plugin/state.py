"""The way from pytest's config to what the plugin knows of the run.

This plugin is loaded in every pytest run, and most have no perf cases.  What measures and judges is imported when the
first perf test is collected: here, and in :mod:`perfsuite.plugin.order` for what comes after the cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from perfsuite.plugin.suite import Suite

suite_key: pytest.StashKey[Suite] = pytest.StashKey()
"""Absent until a perf test was collected."""


def suite_of(config: pytest.Config) -> Suite:
    """The state of this pytest run, made when first asked for."""
    if suite_key not in config.stash:
        from perfsuite.plugin.suite import Suite

        config.stash[suite_key] = Suite(config)
        config.stash[suite_key].signals.install()
    return config.stash[suite_key]
