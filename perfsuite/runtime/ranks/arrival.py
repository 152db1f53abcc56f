"""Watch iterations that are not timed: find the rank that comes late, and work that an iteration leaves unfinished.

Ranks that wait for each other show the same step time, which hides the slowest one. But the slowest rank enters the
communication last. torch sends every collective through its dispatcher, also those of DDP and of functional
collectives, so a dispatch mode sees them without changes of the workload.

The same mode keeps the works that an iteration starts, until they are waited for or found finished: a work holds its
buffers.  A work that is not finished after the iteration was not waited for, and its time is in no sample.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfsuite.base.errors import InvalidParameter
from perfsuite.platforms.base import DeviceCode
from perfsuite.runtime.ranks.started import Noted, replaced

_FEWEST, _MOST = 3, 5  # Number of watched iterations: a median needs three, and more than five show nothing more.
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_LEAST_BUSY_S, _LEAST_BUSY = 1e-4, 0.05
"""Least wait for all streams, in seconds and as share of the iteration, that shows work after the iteration's end. A
wait for an idle device takes some microseconds."""


class _Communication(TorchDispatchMode):
    """Notes the time of the first communication operation, and keeps the works that are not finished."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap this mode for its compiler, whose import takes over a second in every fresh worker."""
        return False

    def __init__(self, now_s: Callable[[], float], open_: dict[int, tuple[str, dist.Work]], queues: bool) -> None:
        """``open_`` keeps name and work by id, until the work is finished or Python code waits for it."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._now_s = now_s
        self._open, self._queues = open_, queues
        self.entered_s: float | None = None
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        if self.entered_s is None:
            self.entered_s = self._now_s()
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.sizes.append(sum(each.numel() * each.element_size() for each in tensors))
        self.unfinished()
        made = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and hasattr(dist.Work, "unbox"):  # some vendors' builds are older
            several = made if isinstance(made, (tuple, list)) else (made,)
            name = func.overloadpacket.__name__.strip("_")
            # As long as it is kept, the unboxed object is the same one for which the program waits.
            works = [dist.Work.unbox(each) for each in several if isinstance(each, torch.ScriptObject)]
            self._open.update({id(work): (name, work) for work in works})
        return made

    def unfinished(self) -> set[str]:
        """Return the names of the works that are not finished; let go of the others."""
        for key, (_, work) in list(self._open.items()):
            if _is_finished(work, self._queues):
                del self._open[key]
        return {name for name, _ in self._open.values()}


class Watch:
    """Runs iterations that are not timed, on all ranks together, and keeps its observations."""

    def __init__(self, code: DeviceCode, name: str) -> None:
        """``name`` names the workload in errors."""
        self._code = code
        self._name = name
        self.unfinished: set[str] = set()  # Operations that the last iteration started and left unfinished.
        self._busy_s: list[float] = []  # Seconds that the device worked after the end of each iteration; 0 if short.
        self.message_bytes: float | None = 0.0
        """Median bytes of the communication calls of the last iteration: 0 without calls, infinite for counted calls,
        None if unknown."""

    def once(self, run: Callable[[], Any]) -> float | None:
        """Return the seconds to the first communication; raise InvalidParameter if the iteration did not wait."""
        clock, registered = self._code.clock, _registered()
        start, start_s = clock.stamp(), clock.now_s()
        open_: dict[int, tuple[str, dist.Work]] = {}
        wait = Noted(vars(dist.Work)["wait"], lambda work: open_.pop(id(work), None))
        with replaced(dist.Work, "wait", wait), _Communication(clock.now_s, open_, clock.queues) as seen:
            try:
                run()
            except BaseException:
                self.unfinished = seen.unfinished()
                raise
        end = clock.stamp()
        clock.wait(end)
        ended_s = clock.now_s()
        self.message_bytes = max(1.0, statistics.median(seen.sizes)) if seen.sizes else 0.0
        self.unfinished = seen.unfinished()
        if _registered() > registered:
            self.unfinished.add("a functional collective")
        if self.unfinished:
            raise InvalidParameter(
                f"an iteration of {self._name} started {', '.join(sorted(self.unfinished))} and did not wait for it: "
                "its samples would not include that work; return the handle from the iteration, or call its wait()"
            )
        self._code.synchronize()
        busy_s = clock.now_s() - ended_s
        least_s = max(_LEAST_BUSY_S, _LEAST_BUSY * clock.elapsed_s(start, end))
        self._busy_s.append(busy_s if busy_s > least_s else 0.0)
        return None if seen.entered_s is None else seen.entered_s - start_s

    def count(self, run: Callable[[], Any]) -> None:
        """Run an iteration that a mode must not inspect, and find out whether it communicates."""
        before = _calls()
        try:
            run()
        except BaseException:
            self.unfinished |= {"communication"} if _calls() != before else set()
            raise
        now = _calls()
        self.message_bytes = None if before is None or now is None else math.inf if now > before else 0.0

    def require_idle(self) -> None:
        """Raise InvalidParameter if the device worked after the end of every iteration."""
        if self._code.clock.queues and min(self._busy_s) > 0:
            raise InvalidParameter(
                f"an iteration of {self._name} left {1e3 * min(self._busy_s):.3g} ms of work in a stream that the "
                "current stream does not wait for: its samples do not include that work; let the current stream wait "
                "for that stream at the end of the iteration (wait_stream)"
            )


def _is_finished(work: dist.Work, queues: bool) -> bool:
    """Return whether a work for which C++ code may have waited is finished."""
    if work.is_completed() or queues:
        return work.is_completed()
    try:  # host backends set the future first
        return bool(work.get_future().done())
    except RuntimeError:  # sends and receives have no future
        return False


def _registered() -> int:
    """Return how many functional collectives of this process lack a wait; 0 if this torch does not count them."""
    size = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
    return int(size()) if size else 0


def _calls() -> int | None:
    """Return how many calls this process has made in all its groups; None if a backend does not count them."""
    try:
        groups: list[Any] = list(distributed_c10d._world.pg_map)  # torch does not type them
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except (AttributeError, RuntimeError):
        return None


def iterations_within(time_s: float, times_s: Sequence[float]) -> int:
    """Return how many iterations to watch: as many as fit into ``time_s``, 3 to 5; the same on all ranks."""
    median_s = statistics.median(times_s)
    return int(min(_MOST, max(_FEWEST, time_s / median_s))) if median_s > 0 else _MOST
