"""Exposed communication: the share of a step that collectives cost, in an untimed build.

Where a device reports the times of its kernels, this is the share in which only communication ran, on any mesh.
Elsewhere, or if torch's profiler sees no communication, the same step is built twice in the same ranks on a mesh of one
axis, once with groups that send nothing.  Without either (several axes, a pipeline, a strategy with its own groups)
there is no number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Rank
from perfsuite.statistics.robust import ratio_interval
from perfsuite.strategies import Strategy
from perfsuite.strategies.traffic_count import Counting
from perfsuite.workloads.checks import raise_alike, texts_of_all
from perfsuite.workloads.training.memory import Observed
from perfsuite.workloads.training.on_rank import TrainingStep

_PAIRS = 12  # Number of step pairs, one with and one without communication, whose difference is taken
_WARM_STEPS = 2
_SILENT_AXES = ("dp", "tp", "cp")  # Axes along which communication can be switched off
_SILENT_NAME, _ALONE_NAME = "silent", "silent_alone"
"""Axes of the silent mesh; other names than in the real mesh, as DTensor caches groups by equal meshes."""


class ExposedStep(Observed):
    """The share of a training step in which only communication kernels ran; else 1 - T_silent / T.  T_silent is the
    time of the same step in the same ranks with collectives that do nothing, alternating with real ones. With overlap,
    communication costs the time that disappears with it, not the time spent in it. The interval is Student's for the
    mean of the logarithms of the paired ratios; on a busy machine it reaches below zero. Silent steps gather arbitrary
    memory, and a device multiplies zeros faster than numbers (by 13 %, seen on a Hopper), so kernel times are
    preferred. For one rank the share is 0.
    """

    def run(self) -> None:
        """Measure by kernels, or by comparing silent and real steps, and record the share."""
        on_device = self.rank.device.type != "cpu"
        if self.rank.world_size == 1:
            self._record(0.0, 0.0, 0.0)
            if on_device:
                self.rank.record("exposed_kernel_share", 0.0, reduce="mean")
        elif on_device and self._measure_by_kernels():
            return
        elif can_be_silent(self.workload.find_strategy(), self.rank.shape):
            self._measure()
        else:
            self.rank.record("exposed_without_silent", 1.0, reduce="equal")

    def _record(self, share: float, low: float, high: float) -> None:
        for name, value in (("exposed_share", share), ("exposed_share_low", low), ("exposed_share_high", high)):
            self.rank.record(name, value, reduce="equal")

    def _measure(self) -> None:
        with _silent(self.rank) as silent, self.training() as real, self.training(silent) as quiet:
            for _ in range(_WARM_STEPS):
                real.run()
                quiet.run()
            self._require_silence(quiet)
            pairs = []
            for index in range(_PAIRS):
                in_turn = (real, quiet) if index % 2 == 0 else (quiet, real)
                took_s = {step: self._seconds(step.run) for step in in_turn}
                pairs.append((took_s[real], took_s[quiet]))
        worst = torch.tensor(pairs, dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.rank.group())
        self._record(*exposed_share([(float(a), float(b)) for a, b in worst.tolist()]))

    def _require_silence(self, quiet: TrainingStep) -> None:
        """Raise WrongResult on all ranks if a silent step posts on a real group; runs one more step."""
        with Counting(self.rank.shape, self.rank.rank) as counting:
            quiet.run()
        sent = sum(posted.message_bytes for posted in counting.posted)
        kinds = sorted({f"{posted.collective} along {posted.axis}" for posted in counting.posted})
        problem = f"a silent step posts {len(counting.posted)} calls of {sent} bytes on real groups: {', '.join(kinds)}"
        raise_alike(self.rank, problem if counting.posted else "")

    def _measure_by_kernels(self) -> bool:
        """Record the share from kernel times; return False on all ranks if one lost kernels or saw no message."""
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

    def _seconds(self, run: Callable[[], None]) -> float:
        dist.barrier(group=self.rank.group())
        clock = self.clock
        clock.wait(clock.stamp())
        start = clock.stamp()
        run()
        end = clock.stamp()
        clock.wait(end)
        return clock.elapsed_s(start, end)


def can_be_silent(strategy: Strategy, shape: MeshShape) -> bool:
    """Return whether a step on this mesh can also be built with groups that send nothing.

    >>> from perfsuite.strategies import find
    >>> [can_be_silent(find("fsdp"), MeshShape.parse(mesh)) for mesh in ("dp4", "dp_replicate2-dp_shard2")]
    [True, False]
    """
    axes = [name for name, size in shape.axes if size > 1]
    return strategy.ignorable and "pp" not in shape.names and len(axes) == 1 and axes[0] in _SILENT_AXES


def exposed_share(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the share of the first time that the second lacks, with its 95 % interval, from at least two pairs.

    >>> [round(value, 6) for value in exposed_share([(2.0, 1.5), (4.0, 3.0), (1.0, 0.75)])]
    [0.25, 0.25, 0.25]
    """
    mean, low, high = ratio_interval([without / with_it for with_it, without in pairs])
    return 1 - mean, 1 - high, 1 - low


class _SilentRank:
    """A rank whose collectives return at once and send nothing; all else is delegated to the real rank."""

    def __init__(self, rank: Rank, everyone: dist.ProcessGroup, alone: dist.ProcessGroup) -> None:
        self._rank = rank
        self._group = everyone
        self._axes = {name for name, size in rank.shape.axes if size > 1}
        # One mesh with a dimension of this rank alone: FSDP2 needs slices of the mesh of tp.
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
        """The only axis with several ranks."""
        return self._root[_SILENT_NAME]

    def submesh(self, *axes: str) -> Any:
        """Return the mesh along the axis, or of this rank alone."""
        return self._root[_SILENT_NAME if self._axes & set(axes) else _ALONE_NAME]

    def group(self, *axes: str) -> dist.ProcessGroup:
        return self._group

    def record(self, name: str, value: Any, **meaning: Any) -> None:
        """Record nothing: losses of a silent step have no meaning."""


@contextmanager
def _silent(rank: Rank) -> Iterator[Any]:
    import torch.testing._internal.distributed.fake_pg  # importing it registers the backend "fake"

    # With the device's name: torch knows the fake backend only for its own devices.
    backend = f"{rank.device.type}:fake"
    everyone = dist.new_group(backend=backend)
    makes_groups: Any = dist.new_subgroups_by_enumeration
    alone, _ = makes_groups([[member] for member in range(rank.world_size)], backend=backend)
    assert isinstance(everyone, dist.ProcessGroup)
    # A gather repeats this rank's own part (torch's FakeProcessGroup.hpp): products have real numbers, never zeros,
    # which would be faster. A reduce-scatter returns arbitrary memory, and denormal numbers would make a CPU slow.
    torch.set_flush_denormal(True)
    try:
        yield _SilentRank(rank, everyone, alone)
    finally:
        torch.set_flush_denormal(False)
        for group in (everyone, alone):
            dist.destroy_process_group(group)


_STEPS = 3  # Steps under the profiler


Kernel = tuple[int, int, int, str]  # A kernel of the device: stream, start and end in nanoseconds, and name.


def uncovered_share(kernels: Sequence[Kernel], backend: str) -> float | None:
    """Return the share of the time from the first start to the last end in which only communication ran.

    A communication kernel that waits for a late rank counts too.  None, for unknown, if no kernel communicates.

    >>> ran = [("gemm", 0, 60), ("lib_DevKernel_AllReduce", 40, 80), ("adam", 80, 100)]
    >>> uncovered_share([(0, start, end, name) for name, start, end in ran], "lib")
    0.2
    """
    # The name of the communication library is in the names of its kernels.
    computation = union((start, end) for _, start, end, name in kernels if backend.lower() not in name.lower())
    if all(backend.lower() not in name.lower() for *_, name in kernels):
        return None
    everything = union((start, end) for _, start, end, _ in kernels)
    return (length(everything) - length(computation)) / (everything[-1][1] - everything[0][0])


def steps_agree(kernels: Sequence[Kernel]) -> bool:
    """Return whether each stream ran the same kernels in the same order in every step.

    CUPTI of CUDA 12.6u2 to 13.0 silently drops kernels at the start of a session (pytorch/pytorch#192021).

    >>> ran = [(0, at, at + 1, name) for at, name in enumerate(["gemm", "adam"] * _STEPS)]
    >>> steps_agree(ran), steps_agree(ran[1:])
    (True, False)
    """
    streams: dict[int, list[str]] = {}
    for stream, _, _, name in sorted(kernels, key=operator.itemgetter(1)):
        streams.setdefault(stream, []).append(name)
    return all(names == names[: len(names) // _STEPS] * _STEPS for names in streams.values())


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals as intervals that do not touch, in order.

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
    """Return the sum of the lengths of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def record_kernels(run: Callable[[], None], wait: Callable[[], None]) -> list[Kernel]:
    """Return the kernels of a few steps, up to ``wait``, from torch's profiler; empty if it sees no device."""
    profiler: Any = torch.profiler  # these two have no types
    autograd: Any = torch.autograd
    with profiler.profile(activities=list(profiler.supported_activities())) as profile:
        for _ in range(_STEPS):
            run()
        wait()
    return kernels_of(profile.profiler.kineto_results.events(), autograd.DeviceType.CPU)


def kernels_of(events: Iterable[Any], cpu: object) -> list[Kernel]:
    """Return the kernels among the profiler's events, without events of the host and user annotations."""
    return [
        (event.device_resource_id(), event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.device_type() != cpu and not _is_mark(event)
    ]


def _is_mark(event: Any) -> bool:
    # The profiler shows ranges of the host, such as nccl:all_reduce, over the kernels started in them.
    marked = getattr(event, "is_user_annotation", None)
    return bool(marked is not None and marked()) or ":" in event.name().replace("::", "")
