"""How samples are taken on the ranks of a case.

A sample is the mean of k back-to-back iterations between two stamps of the device's clock. A barrier comes before it,
outside the sample; training steps run without one. A sample lasts at least 100 times the clock's resolution. On a
device, to which the host queues, it also lasts 20 times a barrier: this limits the error from ranks that leave the
barrier at different times.  If iterations give work to a thread, as loggers do, it lasts 20 ms and 16 iterations: most
of them return at once, and a few wait for the thread, so that single iterations would not have the time of the loop.

On a CPU a call returns when its message has arrived, so each call is timed by itself, between barriers. Several calls
in a row would measure the scheduler: gloo's threads share cores with the ranks. Medians of 1 KiB in a row scatter by a
factor of 1.8 from start to start, medians of single calls by 1.1 (docs truth). With a cache flush before every
iteration k is 1. Else k is a power of two, from medians over the last third of the warm-up, so that slightly different
warm-ups give the same k. One all-reduce gives every rank the maximum over ranks of a sample, and rank 0's elapsed time.
So all ranks stop together: they decide after each training step, else after ten milliseconds of samples.
"""

from __future__ import annotations

import gc
import math
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from perfsuite.record.workload import Budget, Yardstick
from perfsuite.runtime.ranks.rank import Membership
from perfsuite.runtime.ranks.returned import LOOKED_AT, Iteration
from perfsuite.runtime.ranks.spans import SpanRecorder
from perfsuite.runtime.ranks.yardstick import ControlWork, Doing, Effort, longest_wait_s, make_control, waits_for_cores

_CLOCK_MARGIN = 100
_BARRIER_MARGIN = 20
_LONGEST_FLOOR_S = 1e-3  # Longest sample that the time of a launch demands.
_FEEDING_S, _FEEDING = 0.02, 16  # Four turns of Python's lock, and more items than the usual queue of a logger has.
_STEADY = 0.1  # Largest relative difference of two successive warm-up batches that count as steady.
_SUSTAINED_SAMPLES = 1000  # Approximate number of samples of a sustained run.
_LEAST_WARM_S, _SHORT_S = 0.5, 0.01
"""Ranks that wait for each other in iterations shorter than the second are warm after the first. Until then sleeping
cores, and threads that the scheduler moves, make the messages of a program that waited slower."""
_BATCH_S = 0.005  # Length to which warm-up batches grow.
_AGREE_EVERY_S = 0.01  # Samples of about this length share one all-reduce, which costs as much as a small message.
_MOST_BESIDE = 3.0  # Sampling lasts at most so many times its budget, if yardsticks, which do not count, take the rest.
_DECIMALS = 12  # Of seconds: no clock shows a picosecond, and a journal is read sooner.
_BARRIERS = 5  # Least number of timed barriers, without the first of a warm-up, to which ranks come from their checks.


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Result of the samples of one rank."""

    times_s: tuple[float, ...]  # Largest value of any rank, by sample; so are the next two.
    involuntary_switches: tuple[int, ...] = ()
    yardsticks_s: tuple[float, ...] = ()
    own_s: tuple[float, ...]  # This rank's seconds per iteration, by sample.
    iterations: int
    warmup_iterations: int
    warmup_steady: bool
    warmup_s: float
    cpu_share: float
    waited: float | None = None
    """Share of the time of the samples in which a thread waited for a core; None: unknown, or of work on a device."""
    launch_s: float  # Median seconds in which this process started one iteration.
    control: str = ""  # Kind of the control that was timed between the samples; empty without a control.


@dataclass(frozen=True, kw_only=True)
class _WarmUp:
    """Result of a warm-up: each time is the longest of any rank, and so the same on all ranks."""

    iterations: int
    steady: bool  # Whether the last two batches agreed.
    iteration_s: float
    clock_s: float  # Resolution of the clock, or the time to read it if that is longer.
    barrier_s: float  # Usual seconds of a barrier.
    launch_s: float = 0.0  # Seconds in which a host started an iteration.


@dataclass(frozen=True, kw_only=True)
class _OwnSample:
    time_s: float  # Seconds per iteration on this rank's device.
    launch_s: float  # Seconds to start one.
    switches: int
    yardstick_s: float  # 0 without a yardstick.
    cpu_s: float
    wall_s: float


class Timer:
    """Takes the samples of one case on one rank; all ranks call its methods in the same order."""

    def __init__(self, member: Membership, budget: Budget, spans: SpanRecorder, *, aligned: bool) -> None:
        self._member = member
        self._budget = budget
        self._spans = spans
        self._aligned = aligned
        self._clock = member.code.clock
        self._declared: Yardstick = "compute"
        self._prepared: ControlWork | None = None
        self._unused: ControlWork | None = None
        self._flush: Callable[[], None] | None = None

    def prepare(self, yardstick: Yardstick, *, always: bool = False) -> None:
        """Make the code that runs between the samples, before the workload is built and may use all memory.

        On a CPU, and for a message, the control is made after the warm-up, because it has to resemble the iterations.
        ``always``: a control takes its memory even if no sample uses it.
        """
        member, budget = self._member, self._budget
        self._declared = yardstick
        wanted = budget.yardstick and not budget.smoke
        if (wanted or always) and self._clock.queues and yardstick != "message":
            control = make_control(Doing(declared=yardstick, queues=True), member.device, member.code)
            self._prepared, self._unused = (control, None) if wanted else (None, control)
        self._flush = self._make_flush() if budget.cache_flush else None

    def align(self) -> None:
        """Let all ranks start together; the device is idle afterwards."""
        if self._member.world_size > 1:
            dist.barrier()
        self._member.code.synchronize()

    def on_any_rank(self, *flags: bool) -> list[bool]:
        """Return which flags are set on one rank or more."""
        return [bool(flag) for flag in self._maximum([float(flag) for flag in flags])]

    def take(self, iteration: Iteration, message_bytes: float | None = 0.0) -> Samples:
        """Warm up, choose k, and sample until the budget is used.

        ``message_bytes`` is the usual size of the messages of an iteration: 0 without messages, infinite for an unknown
        size, None if messages are unknown.
        """
        warmup_started_s = time.perf_counter()
        self._sends = message_bytes != 0
        warm = self._warm_up(iteration, iteration.settled)
        run = iteration.settled()
        warmup_s = time.perf_counter() - warmup_started_s
        iterations = self._choose_iterations(warm, feeds=self.on_any_rank(iteration.feeds)[0])
        control, flush = self._prepared, self._flush
        if control is None and self._budget.yardstick:
            control = self._make_control(message_bytes, warm.iterations)
        worst: list[float] = []  # three by sample
        own: list[_OwnSample] = []
        started_s = time.perf_counter()
        gc.collect()
        waits = None if self._clock.queues else waits_for_cores()
        sampling_s = time.perf_counter()
        with ExitStack() as garbage:
            if self._budget.disable_gc and gc.isenabled():
                gc.disable()
                garbage.callback(gc.enable)
            while not self._enough(len(own)):
                batch = [self._sample(run, iterations, control, flush) for _ in range(self._at_once(len(own)))]
                own += batch
                worst += self._agree(batch, started_s)
        sampled_s, waited_s = time.perf_counter() - sampling_s, longest_wait_s(waits, waits_for_cores())
        cpu_s, wall_s = sum(sample.cpu_s for sample in own), sum(sample.wall_s for sample in own)
        return Samples(
            times_s=tuple(worst[::3]),
            involuntary_switches=tuple(map(int, worst[1::3])) if any(worst[1::3]) else (),
            yardsticks_s=tuple(worst[2::3]) if control is not None and control.parts else (),
            own_s=tuple(sample.time_s for sample in own),
            iterations=iterations,
            warmup_iterations=warm.iterations,
            warmup_steady=warm.steady,
            warmup_s=warmup_s,
            cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
            waited=None if waited_s is None or sampled_s <= 0 else min(1.0, waited_s / sampled_s),
            launch_s=statistics.median(sample.launch_s for sample in own),
            control=control.kind if control is not None else "",
        )

    _shared_elapsed_s = 0.0
    _effort = Effort()  # Effort of the iterations of the warm-up, if a control has to resemble them.
    _sends = False
    _yardsticks_s = 0.0  # Seconds of the controls so far.

    def _make_control(self, message_bytes: float | None, iterations: int) -> ControlWork:
        """Return the control that resembles the iterations of the warm-up, the same on all ranks."""
        member, effort = self._member, self._effort
        numbers = [effort.own_share, effort.share, effort.wait_s, effort.blocks / iterations, message_bytes or 0.0]
        own_share, share, wait_s, blocks, sent, unwatched = self._maximum([*numbers, float(message_bytes is None)])
        doing = Doing(
            declared=self._declared, own_share=own_share, share=share, wait_s=wait_s, blocks=blocks,
            message_bytes=None if unwatched else sent, ranks=member.world_size, queues=self._clock.queues,
        )  # fmt: skip
        return make_control(doing, member.device, member.code)

    def _elapsed(self, started_s: float) -> float:
        """Return rank 0's elapsed seconds, and 0 on the other ranks: they add nothing to the maximum.

        Yardsticks do not count, within _MOST_BESIDE, so that a gated run has as many samples as a plain one. A
        sustained run counts all its time.
        """
        if self._member.rank != 0:
            return 0.0
        whole_s = time.perf_counter() - started_s
        if self._budget.sustain_s is not None:
            return whole_s
        return max(whole_s - self._yardsticks_s, whole_s / _MOST_BESIDE)

    def _enough(self, taken: int) -> bool:
        if taken < self._budget.min_rounds:
            return False
        if self._budget.sustain_s is not None:
            return self._shared_elapsed_s >= self._budget.sustain_s
        return taken >= self._budget.max_rounds or self._shared_elapsed_s >= self._budget.max_time_s

    def _at_once(self, taken: int) -> int:
        """Return how many samples to take before the ranks agree; it follows from shared numbers."""
        if taken == 0 or not self._aligned:  # without barriers the ranks would drift apart in longer batches
            return 1
        budget = self._budget
        left_s = (budget.sustain_s or budget.max_time_s) - self._shared_elapsed_s
        fitting = math.ceil(min(_AGREE_EVERY_S, left_s) * taken / max(self._shared_elapsed_s, 1e-9))
        if budget.sustain_s is None:
            fitting = min(fitting, budget.max_rounds - taken)
        return max(1, fitting)

    def _sample(
        self, run: Callable[[], Any], iterations: int, control: ControlWork | None, flush: Callable[[], None] | None
    ) -> _OwnSample:
        if flush is not None and not self._clock.queues:
            flush()
        if self._aligned:
            self.align()
        if flush is not None and self._clock.queues:  # the device is busy until the iteration is queued
            flush()
        self._spans.discard()
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        switches = _involuntary_switches()
        began_s = self._clock.now_s()  # before the stamp, so that the read is not timed
        start = self._clock.stamp()
        for _ in range(iterations):
            run()
        end = self._clock.stamp()
        started_s = self._clock.now_s()
        self._clock.wait(end)
        switches = _involuntary_switches() - switches
        self._spans.close_sample(start, end, iterations)
        ended_s, cpu_s = time.perf_counter(), time.thread_time() - cpu_s
        yardstick_s = self._time_control(control) if control is not None else 0.0
        self._yardsticks_s += time.perf_counter() - ended_s if control is not None else 0.0
        return _OwnSample(
            time_s=round(self._clock.elapsed_s(start, end) / iterations, _DECIMALS),
            launch_s=(started_s - began_s) / iterations,
            switches=switches,
            yardstick_s=yardstick_s,
            cpu_s=cpu_s,
            wall_s=ended_s - wall_s,
        )

    def _agree(self, own: list[_OwnSample], started_s: float) -> list[float]:
        """Return each sample's largest time, switches and yardstick of any rank; update the shared elapsed time."""
        numbers = [value for sample in own for value in (sample.time_s, float(sample.switches), sample.yardstick_s)]
        *worst, self._shared_elapsed_s = self._maximum([*numbers, self._elapsed(started_s)])
        return worst

    def _time_control(self, control: ControlWork) -> float:
        if control.meets:
            self.align()
        return round(control.time_s(self._time_once), _DECIMALS)

    def _time_once(self, run: Callable[[], Any]) -> float:
        start = self._clock.stamp()
        run()
        end = self._clock.stamp()
        self._clock.wait(end)
        return self._clock.elapsed_s(start, end)

    def _time_batch(self, run: Callable[[], Any], batch: int) -> tuple[float, float]:
        """Return the seconds of an iteration, and the seconds in which the host started one."""
        threads = not self._sends  # reading all threads would delay ranks that wait for each other
        before = Effort.now(all_threads=threads) if self._budget.yardstick else None
        began_s = self._clock.now_s()
        start = self._clock.stamp()
        for _ in range(batch):
            run()
        end = self._clock.stamp()
        launched_s = self._clock.now_s() - began_s
        self._clock.wait(end)
        if before is not None:
            self._effort += Effort.now(all_threads=threads).since(before)
        return self._clock.elapsed_s(start, end) / batch, launched_s / batch

    def _maximum(self, values: list[float]) -> list[float]:
        if self._member.world_size == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64, device=self._member.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        worst: list[float] = shared.tolist()
        return worst

    def _warm_up(self, run: Callable[[], Any], settled: Callable[[], Callable[[], Any]] | None = None) -> _WarmUp:
        """Run batches of iterations, which double until two agree; ``settled`` returns the inspected iteration."""
        facts = self._clock.facts()
        clock_s = max(facts.resolution_s, facts.cost_s)
        done, batch, last_s, warm_s = 0, 1, math.inf, 0.0
        barriers: list[float] = []
        seen: list[tuple[float, float]] = []
        started_s = time.perf_counter()
        while True:
            barriers.append(self._time_once(self.align))
            own_s, launch_s = self._time_batch(run, batch)
            done += batch
            if settled is not None and done >= LOOKED_AT:
                run, settled = settled(), None
            shared = self._maximum([own_s, self._elapsed(started_s), clock_s, _usual_s(barriers), launch_s])
            now_s, elapsed_s = shared[:2]
            seen.append((now_s, shared[4]))
            warm_s += now_s * batch
            steady = abs(now_s - last_s) <= _STEADY * now_s and warm_s >= self._least_warm_s(now_s)
            long_enough = done >= self._budget.warmup_min_iterations and warm_s >= (self._budget.warmup_min_s or 0.0)
            if long_enough and ((steady and now_s * batch >= _BATCH_S) or elapsed_s >= self._budget.warmup_time_s):
                break
            last_s = now_s
            if now_s * batch < _BATCH_S:
                batch *= 2
        if self._clock.queues and len(barriers) <= _BARRIERS and self._member.world_size > 1:
            barriers += [self._time_once(self.align) for _ in range(_BARRIERS - len(barriers) + 1)]
            shared = self._maximum([*shared[:3], _usual_s(barriers), shared[4]])
        iteration_s, launch_s = (statistics.median(times) for times in zip(*seen[2 * len(seen) // 3 :], strict=True))
        return _WarmUp(
            iterations=done, steady=steady, iteration_s=iteration_s,
            clock_s=shared[2], barrier_s=shared[3], launch_s=launch_s,
        )  # fmt: skip

    def _least_warm_s(self, iteration_s: float) -> float:
        if self._budget.warmup_min_s is not None:
            return self._budget.warmup_min_s
        return _LEAST_WARM_S if self._member.world_size > 1 and iteration_s < _SHORT_S else 0.0

    def _choose_iterations(self, warm: _WarmUp, *, feeds: bool = False) -> int:
        """Return k, a power of two from shared numbers, the same for similar warm-ups; 1 with a cache flush."""
        budget = self._budget
        if budget.cache_flush:
            return 1
        floor_s = max(_CLOCK_MARGIN * warm.clock_s, _FEEDING_S if feeds else 0.0)
        if self._clock.queues:  # the device has passed the first stamp before the first kernel reaches it
            floor_s = max(floor_s, min(_CLOCK_MARGIN * warm.launch_s, _LONGEST_FLOOR_S))
            if self._aligned and self._member.world_size > 1:
                floor_s = max(floor_s, _BARRIER_MARGIN * warm.barrier_s)
        if budget.sustain_s is not None:
            floor_s = max(floor_s, budget.sustain_s / _SUSTAINED_SAMPLES)
        length_s = max(budget.max_time_s, budget.sustain_s or 0.0)
        most = max(1, int(length_s / budget.min_rounds / max(warm.iteration_s, 1e-9)))
        feeding = _FEEDING if feeds and warm.iteration_s < _FEEDING_S else 1
        least = max(feeding, math.ceil(floor_s / max(warm.iteration_s, 1e-9)))
        return min(1 << (least - 1).bit_length(), 1 << (most.bit_length() - 1))

    def _make_flush(self) -> Callable[[], None]:
        """Return a function that writes twice the last-level cache, which removes all inputs from it."""
        buffer = torch.zeros(2 * self._member.code.cache_bytes() // 4, device=self._member.device)

        def flush() -> None:
            buffer.add_(1.0)

        return flush


def _usual_s(barriers: list[float]) -> float:
    return statistics.median(barriers[1:] or barriers)


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
