"""Measure whether a machine is as fast as it should be, and as fast as it was yesterday.

A pytest plugin and a suite.  A test module needs a few names, all of them importable from here::

    from perfsuite import Workload, Step, Work, sizes, world_sizes, dtypes

Nothing here imports torch or pytest before it is used: rank processes import this package too.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036  run from a checkout nothing else keeps an older one from failing later
    raise SystemExit(
        "perfsuite needs Python 3.10 or newer, this is {}.{}: use an image or an environment that has it".format(
            *sys.version_info[:2]
        )
    )

if TYPE_CHECKING:
    from perfsuite.base.errors import InvalidParameter, PerfsuiteError, UnsupportedCase, VerdictFailed, WrongResult
    from perfsuite.base.mesh import MeshShape
    from perfsuite.plugin.decorators import acceptance, dtypes, sizes, world_sizes
    from perfsuite.record.own_metrics import OwnMetric
    from perfsuite.record.result import Measurement, Metric, Result, Work
    from perfsuite.record.workload import CallableStep, Process, Rank, Step, Workload

__version__ = "0.1.0"
pytest_plugins = ("perfsuite.plugin",)  # for ``pytest -p perfsuite``

__all__ = [
    "CallableStep",
    "InvalidParameter",
    "Measurement",
    "MeshShape",
    "Metric",
    "OwnMetric",
    "PerfsuiteError",
    "Process",
    "Rank",
    "Result",
    "Step",
    "UnsupportedCase",
    "VerdictFailed",
    "Work",
    "Workload",
    "WrongResult",
    "__version__",
    "acceptance",
    "dtypes",
    "sizes",
    "world_sizes",
]

_HOMES = {
    "perfsuite.base.errors": ("InvalidParameter", "PerfsuiteError", "UnsupportedCase", "VerdictFailed", "WrongResult"),
    "perfsuite.base.mesh": ("MeshShape",),
    "perfsuite.record.own_metrics": ("OwnMetric",),
    "perfsuite.plugin.decorators": ("acceptance", "dtypes", "sizes", "world_sizes"),
    "perfsuite.record.result": ("Measurement", "Metric", "Result", "Work"),
    "perfsuite.record.workload": ("CallableStep", "Process", "Rank", "Step", "Workload"),
}
"""Module -> names it holds; they are imported when first asked for."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'perfsuite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
