"""A recipe: what a case must set up to be a published run, as data, and what of it no report says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfsuite.platforms import Catalog, MachineModel

TEST = "test_perf/test_published.py::test_published"
"""The test that runs every recipe which no other test runs."""
DEVICES_PER_NODE = 8
"""Of every machine in the reports."""
MACHINES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"002": ("mccx-d800",), "003": ("oneflow-4x8-v100",), "004": ("004-1x8-a100", "004-4x8-a100", "004-8x8-h100")}
)
"""Report -> its machines in platforms.toml, small ones first; reports 000 and 001 describe no hosts."""
OURS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "no report names a kernel beside report 004's ring attention: torch chooses",
        "compiled": "no report compiles its model",
        "data": "no report's data set comes with it: samples of its shapes instead",
        "dataset_samples": "of the data set that is generated",
        "ema_on_host": "no report has an EMA in host memory",
        "learning_rate": "no time depends on it, and no report says it",
        "logs": "no report says that its steps read the loss",
        "nodes": "hosts of eight devices, as in the reports' hardware",
        "num_workers": "samples are in memory",
        "saves": "a time of many steps, of which none or few write a checkpoint",
        "seed": "of the initial values, which no report says",
    }
)
"""Settings that the reports leave unsaid -> why they are what they are; a recipe has more (:attr:`Recipe.own`)."""
UNSAID: Mapping[str, str] = MappingProxyType(
    {
        "clip": "gradient clipping",
        "ema": "EMA of the weights",
        "encoders": "frozen encoders",
        "loss_scale": "loss scale",
    }
)
"""Settings of a training program -> their words; a recipe gives a reason for one (:attr:`Recipe.own`), or nobody knows
it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published run, or several that are set up alike on several platforms or stand in several tables."""

    name: str
    """Report, model, what tells it from its siblings, nodes x devices: ``002-llama2_7b-bf16-1x8``."""
    rows: tuple[tuple[str, int], ...]
    """(table, line of the report) of every row that is this run: ``("002/performance", 50)``; none where a report has a
    heading and no figures."""
    parameters: Mapping[str, Any]
    """Keyword arguments of the workload."""
    world_size: int
    workload: str = "train_step"
    """In snake case: train_step, tensor_linear, moe_layer."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Settings of this recipe that a row of it leaves unsaid, by name -> why they are what they are."""
    beside: str = ""
    """Name of the recipe of the same rows that this one is another reading of; then it has no rows itself."""
    test: str = TEST
    """The test function that runs it."""
    words: str = ""
    """The id of its case behind the platform; empty: the name."""
    small: str = ""
    """Id of the case that runs the same way at the small scale on a CPU."""

    @property
    def nodes(self) -> int:
        """Hosts."""
        return max(1, self.world_size // DEVICES_PER_NODE)

    @property
    def unknown(self) -> Mapping[str, str]:
        """Settings of the training program that nobody knows of these rows, by name -> their words."""
        if self.workload != "train_step":
            return {}
        return {name: words for name, words in UNSAID.items() if name not in self.own}

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of its report's machines; empty where the report describes none."""
        return MACHINES.get(self.name.partition("-")[0], ())

    def machine(self, catalog: Catalog, platform: str) -> MachineModel | None:
        """Return the report's machine with this platform: the smallest that has the devices, else the largest.

        None where the report has no machine of that platform.  The nodes of the largest are then too few, which
        :meth:`MachineModel.describe` says.
        """
        known = [catalog.machines[name] for name in self.machines if catalog.machines[name].platform == platform]
        return next((machine for machine in known if machine.devices >= self.world_size), known[-1] if known else None)

    @property
    def ours(self) -> Mapping[str, str]:
        """Settings that the report leaves unsaid, by name -> why they are what they are; of all recipes and its own."""
        return {**OURS, **dict.fromkeys(self.unknown, "nobody knows it"), **self.own}

    def case(self, platform: str) -> str:
        """Node id of its case on a platform."""
        return f"{self.test}[{platform}-{self.words or self.name}]"


def layout(world_size: int) -> str:
    """Nodes x devices of each, as names of recipes end.

    >>> layout(4), layout(24)
    ('1x4', '3x8')
    """
    nodes = max(1, world_size // DEVICES_PER_NODE)
    return f"{nodes}x{world_size // nodes}"


def lines(table: str, *numbers: int) -> tuple[tuple[str, int], ...]:
    """Rows of one table.

    >>> lines("000/time", 26, 27)
    (('000/time', 26), ('000/time', 27))
    """
    return tuple((table, number) for number in numbers)
