"""A recipe: the settings of a case that reproduces a published run, and the reasons for those that no report states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfsuite.platforms import Catalog, MachineModel

TEST = "test_perf/test_published.py::test_published"  # The test of every recipe without another test
DEVICES_PER_NODE = 8  # Devices per node of every machine in the reports
MACHINES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"002": ("mccx-d800",), "003": ("oneflow-4x8-v100",), "004": ("004-1x8-a100", "004-4x8-a100", "004-8x8-h100")}
)
"""Report -> its machines in platforms.toml, small ones first; reports 000 and 001 describe no hosts."""
OURS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "no report names a kernel, except report 004's ring attention: torch chooses",
        "compiled": "no report compiles its model",
        "data": "no report's data set comes with it: samples of its shapes instead",
        "dataset_samples": "samples of the generated data set",
        "ema_on_host": "no report has an EMA in host memory",
        "learning_rate": "no time depends on it, and no report states it",
        "logs": "no report states that its steps read the loss",
        "nodes": "hosts of eight devices, as in the reports' hardware",
        "num_workers": "samples are in memory",
        "saves": "a time of many steps, of which none or few write a checkpoint",
        "seed": "seed of the initial values, which no report states",
    }
)
"""Settings that the reports do not state -> reasons for the chosen ones; a recipe has more (:attr:`Recipe.own`)."""
UNSAID: Mapping[str, str] = MappingProxyType(
    {
        "clip": "gradient clipping",
        "ema": "EMA of the weights",
        "encoders": "frozen encoders",
        "loss_scale": "loss scale",
    }
)
"""Settings of a training program -> their words; unknown unless a recipe has a reason (:attr:`Recipe.own`)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published run, or several with the same settings on several platforms or in several tables."""

    name: str  # Report, model, distinguishing settings, nodes x devices: ``002-llama2_7b-bf16-1x8``.
    rows: tuple[tuple[str, int], ...]
    """(table, line of the report) of every row of this run: ``("002/performance", 50)``; empty if a report has a
    heading without figures."""
    parameters: Mapping[str, Any]  # Keyword arguments of the workload.
    world_size: int
    workload: str = "train_step"  # Workload in snake case: train_step, tensor_linear, moe_layer.
    own: Mapping[str, str] = field(default_factory=dict)
    """Settings of this recipe that its rows do not state, by name -> reason."""
    beside: str = ""  # Name of the recipe of the same rows of which this one is a variant without rows.
    test: str = TEST  # Test function that runs it.
    words: str = ""  # Id of its case after the platform; empty: the name.
    small: str = ""  # Id of the same case at the small scale on a CPU.

    @property
    def nodes(self) -> int:
        """Hosts."""
        return max(1, self.world_size // DEVICES_PER_NODE)

    @property
    def unknown(self) -> Mapping[str, str]:
        """Settings of the training program that are unknown for these rows, by name -> their words."""
        if self.workload != "train_step":
            return {}
        return {name: words for name, words in UNSAID.items() if name not in self.own}

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of its report's machines; empty if the report describes none."""
        return MACHINES.get(self.name.partition("-")[0], ())

    def machine(self, catalog: Catalog, platform: str) -> MachineModel | None:
        """Return the report's machine with this platform: the smallest with enough devices, else the largest.  None if
        the report has no machine of that platform.  :meth:`MachineModel.describe` says if the nodes are too few.
        """
        fitting = [catalog.machines[name] for name in self.machines if catalog.machines[name].platform == platform]
        enough = (machine for machine in fitting if machine.devices >= self.world_size)
        return next(enough, fitting[-1] if fitting else None)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Settings that the report does not state, by name -> reason; those of all recipes and its own."""
        return {**OURS, **dict.fromkeys(self.unknown, "unknown"), **self.own}

    def case(self, platform: str) -> str:
        """Return the node id of its case on a platform."""
        return f"{self.test}[{platform}-{self.words or self.name}]"


def layout(world_size: int) -> str:
    """Return nodes x devices of each, the end of a recipe's name.

    >>> layout(4), layout(24)
    ('1x4', '3x8')
    """
    nodes = max(1, world_size // DEVICES_PER_NODE)
    return f"{nodes}x{world_size // nodes}"


def lines(table: str, *numbers: int) -> tuple[tuple[str, int], ...]:
    """Return rows of one table.

    >>> lines("000/time", 26, 27)
    (('000/time', 26), ('000/time', 27))
    """
    return tuple((table, number) for number in numbers)
