"""The pytest plugin, one module per concern; modules with hooks or fixtures are registered as separate plugins.

:mod:`perfsuite.plugin.order` calls several concerns at one hook, in order.

Importing this package loads none of these modules: the ranks import the decorators of test modules from it too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MODULES = ("order", "launch", "collect", "fixtures", "benchmark", "outcome")
"""Modules with hooks or fixtures; ``hooks`` declares the hooks that this plugin calls."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare perfsuite's hooks and register the modules.

    ``pytest_plugins`` would not work: the modules import each other, and pytest warns of a module that is imported
    before its assertions are rewritten, which ends a run whose warnings are errors.  ``-p no:perfsuite`` registers
    nothing; the name in pytest's list of plugins is ``perfsuite.plugin``.
    """
    if pluginmanager.is_blocked("perfsuite"):
        return
    pluginmanager.add_hookspecs(importlib.import_module("perfsuite.plugin.hooks"))
    for name in MODULES:
        module = f"perfsuite.plugin.{name}"
        pluginmanager.register(importlib.import_module(module), module)
