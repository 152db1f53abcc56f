"""simmusa as real accelerators are: a yardstick of their size, and graphs, whose replay is one launch."""

from __future__ import annotations

import contextlib

import torch

from perfsuite.platforms.accelerator import Accelerator
from simmusa.device_code import SimMusaDevice
from simmusa.family import SimMusa

FAMILY = "simmusa=test_correctness.helpers.large_yardstick:SimMusaLarge"
GRAPHS = "simmusa=test_correctness.helpers.large_yardstick:SimMusaGraphs"


class LargeYardstick(SimMusaDevice):
    """Rank side."""

    yardstick_bytes = Accelerator.yardstick_bytes
    yardstick_side = Accelerator.yardstick_side


class Graph:
    """Replays one kernel, whatever was captured."""

    def replay(self):
        torch.ones(1, device="musa")


class WithGraphs(SimMusaDevice):
    """Rank side."""

    def __init__(self):
        super().__init__()
        self._module.MUSAGraph, self._module.graph = Graph, contextlib.nullcontext


class SimMusaGraphs(SimMusa):
    """Driver side."""

    device_code = "test_correctness.helpers.large_yardstick:WithGraphs"


class SimMusaLarge(SimMusa):
    """Driver side."""

    device_code = "test_correctness.helpers.large_yardstick:LargeYardstick"
