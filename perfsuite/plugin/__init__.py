"""The pytest plugin, one module per concern; pytest loads those that have hooks or fixtures as plugins of their own.

What several concerns do at one hook stands, in order, in :mod:`perfsuite.plugin.order`.

Importing this package loads none of them: test modules import the decorators from here on the ranks too.
"""

from __future__ import annotations

pytest_plugins = (
    "perfsuite.plugin.order",
    "perfsuite.plugin.launch",
    "perfsuite.plugin.collect",
    "perfsuite.plugin.fixtures",
    "perfsuite.plugin.benchmark",
    "perfsuite.plugin.outcome",
    "perfsuite.plugin.gating",
)
