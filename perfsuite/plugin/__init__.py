"""The pytest plugin, one module per concern; those that have hooks or fixtures are registered as plugins of their own.

What several concerns do at one hook stands, in order, in :mod:`perfsuite.plugin.order`.

Importing this package loads none of them: test modules import the decorators from here on the ranks too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MODULES = ("order", "launch", "collect", "fixtures", "benchmark", "outcome")
"""Those with hooks or fixtures; ``hooks`` has the hooks that this plugin calls."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare our hooks and register the modules, before anything else happens.

    Not by ``pytest_plugins``: they import each other, and of a module that is there already pytest warns that it could
    not rewrite its assertions, which ends a run whose warnings are errors.
    """
    pluginmanager.add_hookspecs(importlib.import_module("perfsuite.plugin.hooks"))
    for name in MODULES:
        module = f"perfsuite.plugin.{name}"
        pluginmanager.register(importlib.import_module(module), module)
