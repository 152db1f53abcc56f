"""Softmax over the rows of a matrix, as a workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from perfsuite import InvalidParameter, Step, Work, Workload, WrongResult


@dataclass(frozen=True, kw_only=True)
class Softmax(Workload):
    """Softmax over the rows of a matrix."""

    rows: int
    """Rows of the matrix."""
    columns: int
    """Columns: elements of one softmax."""

    metrics: ClassVar[tuple[str, ...]] = ("gb_per_s", "latency_us")
    yardstick: ClassVar = "memory"

    def __post_init__(self):
        if self.rows < 1 or self.columns < 1:
            raise InvalidParameter(f"rows={self.rows}, columns={self.columns}: a matrix has at least 1 of each")

    def work(self, shape):
        moved = 2 * 4 * self.rows * self.columns  # fp32, read once and written once
        return Work(bytes_moved=moved, memory_path="device", footprint_bytes=moved)

    def build(self, rank):
        return SoftmaxStep(self, rank)

    def check(self, rank, step):
        expected = torch.softmax(step.x.cpu().double(), dim=1)
        error = float((step.out.cpu().double() - expected).abs().max())
        if not error <= 1e-6:  # written so that a NaN fails
            raise WrongResult(f"{self}: largest error of a probability", expected="at most 1e-6", got=error)


class SoftmaxStep(Step):
    def __init__(self, workload, rank):
        self.x = torch.randn(workload.rows, workload.columns, device=rank.device, generator=rank.generator(1))
        self.out = torch.empty_like(self.x)

    def run(self):
        torch.softmax(self.x, dim=1, out=self.out)

    def refill(self):
        self.out.fill_(float("nan"))

    def close(self):
        del self.x, self.out
