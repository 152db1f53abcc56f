"""What every pipeline case has: a mesh with an axis pp, a schedule, micro-batches; all of it checked before a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfsuite.errors import InvalidParameter, WrongResult
from perfsuite.mesh import MeshShape
from perfsuite.schedules import Schedule, make_schedule
from perfsuite.workload import Rank, Workload

TIMELINE_METRICS = (
    "bubble_ratio",
    "bubble_to_ideal_ratio",
    "median_bubble_ratio",
    "simulated_bubble_ratio",
    "balanced_bubble_ratio",
    "in_flight_micro_batches",
    "warm_up_percent",
    "steady_percent",
    "cool_down_percent",
)
"""What is read off the timeline."""


@dataclass(frozen=True, kw_only=True)
class PipelineCase(Workload):
    """One step of a pipeline."""

    mesh: str
    """Shape of the mesh: pp4, or pp2-dp2 with two pipelines side by side."""
    schedule: str = "1f1b"
    """naive, gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipev."""
    num_micro_batches: int = 8
    """m: parts that each pipeline's batch is cut into."""
    stages_per_rank: int | None = None
    """v, the interleaving; None: the fewest that the schedule can have."""

    preload: ClassVar[tuple[str, ...]] = ("torch._dynamo", "torch.distributed.pipelining")
    aligned: ClassVar[bool] = False
    arrivals: ClassVar[bool] = False

    def __post_init__(self) -> None:
        shape = MeshShape.parse(self.mesh)
        others = [axis for axis in shape.names if axis not in self.axes]
        if others or "pp" not in shape.names:
            raise InvalidParameter(
                f"mesh {self.mesh} is none of a pipeline: it has {', '.join(shape.names) or 'no axis'}; "
                f"give it pp{' and ' + ' and '.join(self.axes[1:]) if self.axes[1:] else ''} alone, such as pp4"
            )
        if not isinstance(self.num_micro_batches, int) or self.num_micro_batches < 1:
            raise InvalidParameter(
                f"num_micro_batches={self.num_micro_batches!r} is not a count; choose a whole number from 1"
            )
        self.find_schedule()

    axes: ClassVar[tuple[str, ...]] = ("pp", "dp")
    """Axes that the mesh may have, pp first."""

    def layout(self) -> str:
        """The mesh."""
        return self.mesh

    def find_schedule(self) -> Schedule:
        """The orders of all ranks; InvalidParameter names the legal counts."""
        return make_schedule(
            self.schedule,
            ranks=MeshShape.parse(self.mesh).size("pp"),
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.stages_per_rank,
        )


def texts_of_all(rank: Rank, text: str) -> list[str]:
    """The ``text`` of every rank, in rank order; a collective.

    As bytes: torch's own exchange of objects would unpickle what comes by the network.
    """
    import torch
    import torch.distributed as dist

    def exchange(mine: torch.Tensor) -> list[list[int]]:
        everyone = [torch.empty_like(mine) for _ in range(rank.world_size)]
        dist.all_gather(everyone, mine, group=rank.group())
        return [each.tolist() for each in everyone]

    data = text.encode(errors="replace")
    lengths = [length for (length,) in exchange(torch.tensor([len(data)], device=rank.device))]
    padded = list(data.ljust(max(lengths), b"\0"))
    parts = exchange(torch.tensor(padded, dtype=torch.uint8, device=rank.device)) if padded else [[]] * rank.world_size
    return [bytes(part[:length]).decode() for part, length in zip(parts, lengths, strict=True)]


def raise_alike(rank: Rank, problem: str) -> None:
    """Raise WrongResult on every rank when any of them found a ``problem``, so that none waits for one that left."""
    for who, text in enumerate(texts_of_all(rank, problem)):
        if text:
            raise WrongResult(f"{text} (found by rank {who})")
