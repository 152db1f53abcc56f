"""Exposed communication: what a step loses to its collectives, in a build that is never timed.

A device tells when its kernels ran: the share in which it did nothing but communicate, on any mesh, from one model.
Elsewhere, or where torch's profiler sees no communication of the device, the same step is built twice in the same ranks
on a mesh of one axis, once with groups that send nothing.  Where that cannot be either (several axes, a pipeline, a
strategy with groups of its own) there is no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Rank
from perfsuite.statistics.student import ratio_interval
from perfsuite.strategies import Strategy
from perfsuite.strategies.traffic import OTHER
from perfsuite.workloads.training.agreement import raise_alike, texts_of_all
from perfsuite.workloads.training.memory import Observed
from perfsuite.workloads.training.on_rank import TrainingStep

if TYPE_CHECKING:
    import torch.distributed as dist


_PAIRS = 12
"""Steps with communication, and as many without, between which the difference is taken."""
_WARM_STEPS = 2
_SILENT_AXES = ("dp", "tp", "cp")
"""Axes along which communication can be made to do nothing."""
_SILENT_NAME, _ALONE_NAME = "silent", "silent_alone"
"""Axes of the silent mesh: DTensor keeps what it found out by meshes that compare equal, a real one's groups too."""


class ExposedStep(Observed):
    """The share of a training step in which kernels did nothing but communicate; else 1 - T_silent / T.

    T_silent is the time of the same step in the same ranks with collectives that do nothing, in turn with real ones.
    With overlap the cost of communication is not the time spent in it; it is the time that goes when it goes.  The
    interval is Student's for the mean of the logarithms of the paired ratios; on a busy machine it reaches below zero.
    What a silent step gathers is whatever memory held, and a device multiplies zeros faster than numbers (by 13 %, seen
    on a Hopper): its kernels are asked first.  One rank has nobody to communicate with: there it is 0.
    """

    def run(self) -> None:
        """Ask the kernels, or build what there is to compare and step it in turn; record the share."""
        on_device = self.rank.device.type != "cpu"
        if self.rank.world_size == 1:
            self._record(0.0, 0.0, 0.0)
            if on_device:
                self.rank.record("exposed_kernel_share", 0.0, reduce="mean")
        elif on_device and self._tell_by_kernels():
            return
        elif can_be_silent(self.workload.find_strategy(), self.rank.shape):
            self._measure()
        else:
            self.rank.record("exposed_without_silent", 1.0, reduce="equal")

    def _record(self, share: float, low: float, high: float) -> None:
        for name, value in (("exposed_share", share), ("exposed_share_low", low), ("exposed_share_high", high)):
            self.rank.record(name, value, reduce="equal")

    def _measure(self) -> None:
        import torch
        import torch.distributed as dist

        with _silent(self.rank) as silent, self.training() as real, self.training(silent) as quiet:
            for _ in range(_WARM_STEPS):
                real.run()
                quiet.run()
            self._require_silence(quiet)
            pairs = [self._pair(real, quiet, real_first=index % 2 == 0) for index in range(_PAIRS)]
        worst = torch.tensor(pairs, dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.rank.group())
        self._record(*exposed_share([(float(a), float(b)) for a, b in worst.tolist()]))

    def _require_silence(self, quiet: TrainingStep) -> None:
        """Raise WrongResult on all ranks where a step that should be silent posts on a real group; one more step."""
        from perfsuite.strategies.traffic_count import Counting

        with Counting(self.rank.shape, self.rank.rank, _Unmarked()) as counting:
            quiet.run()
        sent = sum(posted.message_bytes for posted in counting.posted)
        said = sorted({f"{posted.collective} along {posted.axis}" for posted in counting.posted})
        problem = f"a silent step posts {len(counting.posted)} calls of {sent} bytes on real groups: {', '.join(said)}"
        raise_alike(self.rank, problem if counting.posted else "")

    def _tell_by_kernels(self) -> bool:
        """Record the share by the times of kernels; False on all ranks where one lost kernels or saw no message."""
        import torch.distributed as dist

        clock = self.clock
        with self.training() as real:
            for _ in range(_WARM_STEPS):
                real.run()
            kernels = record_kernels(real.run, lambda: clock.wait(clock.stamp()))
        share = uncovered_share(kernels, dist.get_backend(self.rank.group()))
        answers = texts_of_all(self.rank, "lost" if not steps_agree(kernels) else "" if share is None else "seen")
        if "lost" in answers:
            self.rank.record("exposed_kernels_lost", 1.0, reduce="equal")
        if set(answers) != {"seen"}:
            return False
        self.rank.record("exposed_kernel_share", share, reduce="mean")
        return True

    def _pair(self, real: TrainingStep, quiet: TrainingStep, *, real_first: bool) -> tuple[float, float]:
        if real_first:
            first, second = self._seconds(real.run), self._seconds(quiet.run)
            return first, second
        second, first = self._seconds(quiet.run), self._seconds(real.run)
        return first, second

    def _seconds(self, run: Callable[[], None]) -> float:
        import torch.distributed as dist

        dist.barrier(group=self.rank.group())
        clock = self.clock
        clock.wait(clock.stamp())
        start = clock.stamp()
        run()
        end = clock.stamp()
        clock.wait(end)
        return clock.elapsed_s(start, end)


class _Unmarked:
    part = OTHER


def can_be_silent(strategy: Strategy, shape: MeshShape) -> bool:
    """Whether a step on this mesh can be built a second time with groups that send nothing.

    >>> from perfsuite.strategies import find
    >>> [can_be_silent(find("fsdp"), MeshShape.parse(mesh)) for mesh in ("dp4", "dp_replicate2-dp_shard2")]
    [True, False]
    """
    axes = [name for name, size in shape.axes if size > 1]
    return strategy.ignorable and "pp" not in shape.names and len(axes) == 1 and axes[0] in _SILENT_AXES


def exposed_share(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Share of the first time that the second lacks, with its 95 % interval, from at least two pairs.

    >>> [round(value, 6) for value in exposed_share([(2.0, 1.5), (4.0, 3.0), (1.0, 0.75)])]
    [0.25, 0.25, 0.25]
    """
    mean, low, high = ratio_interval([without / with_it for with_it, without in pairs])
    return 1 - mean, 1 - high, 1 - low


class _SilentRank:
    """A rank whose collectives return at once and move nothing; everything else is the real rank's."""

    def __init__(self, rank: Rank, everyone: dist.ProcessGroup, alone: dist.ProcessGroup) -> None:
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        self._rank = rank
        self._group = everyone
        self._axes = {name for name, size in rank.shape.axes if size > 1}
        # One mesh with a dimension of this rank alone beside: FSDP2 takes nothing but slices of the mesh that tp has.
        self._root: Any = DeviceMesh.from_group(
            [alone, everyone],
            rank.device.type,
            mesh=torch.arange(rank.world_size)[None],
            mesh_dim_names=(_ALONE_NAME, _SILENT_NAME),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    @property
    def mesh(self) -> Any:
        """The only axis of several ranks."""
        return self._root[_SILENT_NAME]

    def submesh(self, *axes: str) -> Any:
        """The mesh along the axis, or of this rank alone."""
        return self._root[_SILENT_NAME if self._axes & set(axes) else _ALONE_NAME]

    def group(self, *axes: str) -> dist.ProcessGroup:
        return self._group

    def record(self, name: str, value: Any, **meaning: Any) -> None:
        """Nothing: its losses mean nothing."""


@contextmanager
def _silent(rank: Rank) -> Iterator[Any]:
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # importing it registers the backend "fake"

    # Named by device: torch knows the fake backend for its own devices only.
    backend = f"{rank.device.type}:fake"
    everyone = dist.new_group(backend=backend)
    makes_groups: Any = dist.new_subgroups_by_enumeration
    alone, _ = makes_groups([[member] for member in range(rank.world_size)], backend=backend)
    assert isinstance(everyone, dist.ProcessGroup)
    # What is gathered is this rank's own part over and over (torch's FakeProcessGroup.hpp): products are of numbers
    # as in the real step, never of zeros, which run faster.  What is reduced and scattered is whatever memory held, and
    # denormal numbers would make a CPU slow.
    torch.set_flush_denormal(True)
    try:
        yield _SilentRank(rank, everyone, alone)
    finally:
        torch.set_flush_denormal(False)
        for group in (everyone, alone):
            dist.destroy_process_group(group)


_STEPS = 3
"""Steps under the profiler."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One thing that the device did."""

    name: str
    start_ns: int
    end_ns: int
    stream: int = 0

    def communicates(self, backend: str) -> bool:
        """Libraries of collectives have their name in those of their kernels."""
        return backend.lower() in self.name.lower()


def uncovered_share(kernels: Sequence[Kernel], backend: str) -> float | None:
    """Share of the time from the first kernel's start to the last one's end in which only communication ran.

    A communication kernel that waits for a late rank counts too.  None where no kernel communicates: then nothing is
    known, not that nothing is exposed.

    >>> ran = [("gemm", 0, 60), ("lib_DevKernel_AllReduce", 40, 80), ("adam", 80, 100)]
    >>> uncovered_share([Kernel(name=name, start_ns=start, end_ns=end) for name, start, end in ran], "lib")
    0.2
    """
    communication = union((kernel.start_ns, kernel.end_ns) for kernel in kernels if kernel.communicates(backend))
    if not communication:
        return None
    everything = union((kernel.start_ns, kernel.end_ns) for kernel in kernels)
    computation = union((kernel.start_ns, kernel.end_ns) for kernel in kernels if not kernel.communicates(backend))
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    return (length(everything) - length(computation)) / whole


def steps_agree(kernels: Sequence[Kernel]) -> bool:
    """Whether each stream ran the same kernels in the same order in every step.

    CUPTI of CUDA 12.6u2 to 13.0 drops kernels at the start of a session without a word (pytorch/pytorch#192021).

    >>> ran = [Kernel(name=name, start_ns=at, end_ns=at + 1) for at, name in enumerate(["gemm", "adam"] * _STEPS)]
    >>> steps_agree(ran), steps_agree(ran[1:])
    (True, False)
    """
    streams: dict[int, list[str]] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        streams.setdefault(kernel.stream, []).append(kernel.name)
    return all(names == names[: len(names) // _STEPS] * _STEPS for names in streams.values())


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same points in intervals that do not touch, in order.

    >>> union([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Sum of the lengths of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def record_kernels(run: Callable[[], None], wait: Callable[[], None]) -> list[Kernel]:
    """What the device did in a few steps, up to ``wait``, by torch's profiler; empty where it sees no device."""
    import torch

    profiler: Any = torch.profiler  # what is used of these two has no types
    autograd: Any = torch.autograd
    with profiler.profile(activities=list(profiler.supported_activities())) as profile:
        for _ in range(_STEPS):
            run()
        wait()
    return kernels_of(profile.profiler.kineto_results.events(), autograd.DeviceType.CPU)


def kernels_of(events: Iterable[Any], cpu: object) -> list[Kernel]:
    """The kernels among the profiler's events: not what ran on the host, nor ranges that somebody marked."""
    return [
        Kernel(
            name=event.name(),
            start_ns=event.start_ns(),
            end_ns=event.start_ns() + event.duration_ns(),
            stream=event.device_resource_id(),
        )
        for event in events
        if event.device_type() != cpu and not _is_mark(event)
    ]


def _is_mark(event: Any) -> bool:
    # The profiler draws a range of the host's, such as nccl:all_reduce, over the kernels that were started in it.
    marked = getattr(event, "is_user_annotation", None)
    return bool(marked is not None and marked()) or ":" in event.name().replace("::", "")
