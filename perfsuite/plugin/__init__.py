"""The pytest plugin, one module per concern; pytest loads each of them as a plugin of its own.

Importing this package loads none of them: test modules import the decorators from here on the ranks too.
"""

from __future__ import annotations

pytest_plugins = (
    "perfsuite.plugin.options",
    "perfsuite.plugin.gate_options",
    "perfsuite.plugin.launch",
    "perfsuite.plugin.collect",
    "perfsuite.plugin.fixtures",
    "perfsuite.plugin.benchmark",
    "perfsuite.plugin.compare",
    "perfsuite.plugin.outcome",
    "perfsuite.plugin.progress",
    "perfsuite.plugin.gating",
    "perfsuite.plugin.trace",
    "perfsuite.plugin.summary",
    "perfsuite.plugin.tables",
)
