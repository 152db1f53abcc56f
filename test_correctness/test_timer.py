"""How k and what is agreed on at once are chosen: by a clock that moves only when something is done."""

import dataclasses
import math
import queue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from perfsuite.platforms.base import Clock
from perfsuite.record.result import ClockFacts
from perfsuite.record.workload import Budget
from perfsuite.runtime.ranks import timer as timing
from perfsuite.runtime.ranks.returned import Iteration
from perfsuite.runtime.ranks.timer import Timer
from perfsuite.runtime.ranks.yardstick import ControlWork

MS = 1_000_000
BARRIER_NS, FIRST_BARRIER_NS = MS, 400 * MS


class Steps(Clock):
    """Nanoseconds of a device that are set."""

    queues = True
    now_ns = 0

    def now_s(self):
        return self.now_ns * 1e-9

    def stamp(self):
        return self.now_ns

    def wait(self, stamp): ...

    def elapsed_s(self, start, end):
        return (end - start) * 1e-9

    def host_s(self, stamp, anchor, anchor_s):
        return stamp * 1e-9

    def facts(self):
        return ClockFacts(name="steps", resolution_s=1e-9, cost_s=1e-9)

    def passing(self, ns):
        """A call that takes so long: nanoseconds, or a function that returns them."""

        def call():
            self.now_ns += ns() if callable(ns) else ns

        return call


SPANS = SimpleNamespace(discard=lambda: None, close_sample=lambda *stamps: None)


def timer_of(monkeypatch, clock, budget=None, *, ranks=2, aligned=True, barrier=lambda: None, all_reduce=None):
    """A timer on one of so many ranks, whose communication is these functions."""
    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(dist, "all_reduce", all_reduce or (lambda values, how: None))
    code = SimpleNamespace(clock=clock, synchronize=lambda: None)
    member = SimpleNamespace(code=code, world_size=ranks, rank=min(1, ranks - 1), device="cpu")
    return Timer(member, budget or Budget(), SPANS, aligned=aligned)


@pytest.mark.parametrize(
    ("iteration_ns", "barriers", "iterations", "shared_values"),
    [
        (MS // 10, 7, 256, 7),  # batches of 1, 2, ... 64 iterations; 20 barriers are 200 iterations
        (6 * MS, 6, 4, 4),  # three batches: three barriers more are timed, 20 of which are four iterations
    ],
)
def test_barriers_are_timed_in_the_warm_up_but_for_the_first(
    monkeypatch, iteration_ns, barriers, iterations, shared_values
):
    monkeypatch.setattr(timing, "_LEAST_WARM_S", 0.0)
    clock, met, shared = Steps(), [], []

    def barrier():
        met.append(clock.now_ns)
        clock.now_ns += BARRIER_NS if len(met) > 1 else FIRST_BARRIER_NS

    timer = timer_of(monkeypatch, clock, barrier=barrier, all_reduce=lambda values, how: shared.append(values.tolist()))
    assert iterations == timer._choose_iterations(timer._warm_up(clock.passing(iteration_ns)))
    assert barriers == len(met)
    assert shared_values == len(shared)  # one with each batch, and one where barriers were added: none for k alone


@pytest.mark.parametrize(
    ("iteration_ns", "ranks", "asked_s", "iterations"),
    [
        (2 * MS, 2, None, 1 + 2 + 4 * 62),  # half a second in batches of 1, 2 and 4
        (2 * MS, 1, None, 1 + 2 + 4),
        (12 * MS, 2, None, 1 + 1 + 1),
        (12 * MS, 1, 3.0, 250),  # longer than the second after which a warm-up that is not steady ends
        (2 * MS, 2, 0.05, 1 + 2 + 4 * 6),
    ],
)
def test_ranks_that_wait_for_each_other_are_warm_after_half_a_second_or_what_was_asked(
    monkeypatch, iteration_ns, ranks, asked_s, iterations
):
    clock = Steps()
    timer = timer_of(monkeypatch, clock, Budget(warmup_min_s=asked_s), ranks=ranks)
    assert iterations == timer._warm_up(clock.passing(iteration_ns)).iterations


@pytest.mark.parametrize(
    ("ends_ms", "barrier_ns", "most_s", "iterations"),
    [
        (math.inf, MS, 1.0, 16),  # 20 barriers are ten iterations
        (480.0, MS, 1.0, 16),  # three times as slow just before the warm-up ends
        (math.inf, 6 * MS // 5, 1.0, 16),  # a barrier a fifth longer
        (math.inf, MS, 0.06, 4),  # a fifth of the time, for five samples, is six iterations
    ],
)
def test_nearly_alike_warm_ups_give_samples_as_many_iterations(monkeypatch, ends_ms, barrier_ns, most_s, iterations):
    clock = Steps()
    run = clock.passing(lambda: 2 * MS if clock.now_ns < ends_ms * MS else 6 * MS)
    timer = timer_of(monkeypatch, clock, Budget(max_time_s=most_s), barrier=clock.passing(barrier_ns))
    assert iterations == timer._choose_iterations(timer._warm_up(run))


@pytest.mark.parametrize(("iteration_ns", "iterations"), [(MS // 10, 1), (30, 4)])
def test_a_message_of_a_host_is_timed_by_itself(monkeypatch, iteration_ns, iterations):
    # Several in a row measure the scheduler where gloo's threads share cores; only what a clock resolves asks for more.
    monkeypatch.setattr(timing, "_LEAST_WARM_S", 0.0)
    monkeypatch.setattr(timing, "_BATCH_S", 100e-9)
    monkeypatch.setattr(Steps, "queues", False)
    clock, met = Steps(), []
    timer = timer_of(monkeypatch, clock, barrier=clock.passing(lambda: met.append(clock.now_ns) or BARRIER_NS))
    warm = timer._warm_up(clock.passing(iteration_ns))
    assert iterations == timer._choose_iterations(warm)
    assert len(met) <= warm.iterations  # none is timed for its own sake


@pytest.mark.parametrize(
    ("iteration_ns", "most_s", "on_rank", "iterations"),
    [
        (MS // 10, 1.0, 1, 256),  # 20 ms are 200 iterations
        (3 * MS, 1.0, 1, 16),  # 20 ms are seven, fewer than a logger's queue holds
        (30 * MS, 1.0, 1, 1),
        (3 * MS, 0.05, 1, 2),  # five samples within the budget
        (3 * MS, 1.0, 0, 16),  # the other rank's iterations give work to a thread
        (3 * MS, 1.0, None, 1),
    ],
)
def test_samples_of_iterations_that_give_work_to_a_thread_have_their_share_of_its_waits(
    monkeypatch, iteration_ns, most_s, on_rank, iterations
):
    # Nine of ten calls of a logger return at once, and the tenth waits for its thread.
    monkeypatch.setattr(timing, "_LEAST_WARM_S", 0.0)
    monkeypatch.setattr(Steps, "queues", False)

    def all_reduce(values, how):
        if len(values) == 1 and on_rank == 0:  # only flags are alone
            values[0] = 1.0

    clock, given = Steps(), queue.Queue()
    spend = clock.passing(iteration_ns)
    step = Iteration(lambda: [spend(), *([given.put(0)] if on_rank == 1 else [])], "step")
    taken = timer_of(monkeypatch, clock, Budget(max_time_s=most_s, max_rounds=5), all_reduce=all_reduce).take(step)
    assert iterations == taken.iterations


@pytest.mark.parametrize(
    ("iteration_ns", "budget", "aligned", "agreed"),
    [
        # ten of a millisecond, by what the samples so far took; never more than are left
        (MS, Budget(max_rounds=25), True, [1, 10, 10, 4]),
        (MS, Budget(max_time_s=0.0145), True, [1, 10, 4]),
        (MS, Budget(sustain_s=0.0145, max_rounds=3, max_time_s=1e-6), True, [1, 10, 4]),
        (MS, Budget(min_rounds=4, max_time_s=0.0015), True, [1, 1, 1, 1]),
        (6 * MS, Budget(max_time_s=0.03), True, [1, 2, 2]),
        (12 * MS, Budget(max_time_s=0.06), True, [1] * 5),
        (MS, Budget(max_rounds=5), False, [1] * 5),
    ],
)
def test_samples_of_ten_milliseconds_are_agreed_on_at_once(monkeypatch, iteration_ns, budget, aligned, agreed):
    # After each sample of a small message, agreeing on it would take as long again.
    monkeypatch.setattr(timing, "_LEAST_WARM_S", 0.0)
    monkeypatch.setattr(Steps, "queues", False)
    clock, seen, began = Steps(), [], []

    def all_reduce(values, how):
        if not began:
            return
        taken = (len(values) - 1) // 3
        values[: 3 * taken : 3] += sum(seen) + torch.arange(taken, dtype=torch.float64)  # rank 0 is ever slower
        values[1 : 3 * taken : 3] += 7
        values[-1] = (clock.now_ns - began[0]) * 1e-9
        seen.append(taken)

    monkeypatch.setattr(timing.gc, "collect", lambda: began.append(clock.now_ns))
    timer = timer_of(monkeypatch, clock, budget, aligned=aligned, all_reduce=all_reduce)
    taken = timer.take(Iteration(clock.passing(iteration_ns), "run"))
    assert agreed == seen
    own_s = iteration_ns * 1e-9
    assert taken.own_s == pytest.approx([own_s] * sum(agreed))
    assert list(taken.times_s) == pytest.approx([own_s + k for k in range(sum(agreed))])
    assert all(count >= 7 for count in taken.involuntary_switches)


def test_a_sample_has_no_digits_that_the_clock_did_not_show(monkeypatch):
    clock = Steps()
    assert clock.elapsed_s(0, 4_625_463) == 0.004625463000000001
    control = ControlWork(kind="compute", parts=(clock.passing(4_625_463),))
    monkeypatch.setattr(timing, "make_control", lambda *doing: control)
    budget = Budget(max_rounds=3, yardstick=True)
    taken = timer_of(monkeypatch, clock, budget, ranks=1).take(Iteration(clock.passing(4_625_463), "run"))
    assert {0.004625463} == {*taken.times_s, *taken.yardsticks_s}


@pytest.mark.parametrize(
    ("yardstick_ns", "budget", "samples"),
    [
        (0, Budget(max_time_s=0.03), 30),
        (MS, Budget(max_time_s=0.03), 30),  # as many as without one
        (5 * MS, Budget(max_time_s=0.03), 15),  # three times the budget in all
        (5 * MS, Budget(max_time_s=0.03, sustain_s=0.06), 10),  # as long as was asked for
    ],
)
def test_yardsticks_cost_no_samples_within_three_times_the_budget(monkeypatch, yardstick_ns, budget, samples):
    monkeypatch.setattr(timing, "_AGREE_EVERY_S", 0.0)  # one by one: it ends on time
    monkeypatch.setattr(Steps, "queues", False)
    clock = Steps()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock.now_s, thread_time=clock.now_s))
    control = ControlWork(kind="compute", parts=(clock.passing(yardstick_ns),))
    monkeypatch.setattr(timing, "make_control", lambda *doing: control)
    budget = dataclasses.replace(budget, yardstick=yardstick_ns > 0, min_rounds=1)
    taken = timer_of(monkeypatch, clock, budget, ranks=1).take(Iteration(clock.passing(MS), "run"))
    assert samples == len(taken.times_s)
    assert 1.0 == pytest.approx(taken.cpu_share)


@pytest.mark.parametrize(("queues", "waited"), [(False, 0.4), (True, None)])
def test_waits_for_a_core_are_a_share_of_the_time_of_the_samples_on_a_cpu(monkeypatch, queues, waited):
    """A device does not wait for the core of a host that has queued its work."""
    monkeypatch.setattr(Steps, "queues", queues)
    clock, readings = Steps(), iter([{"7": 5.0, "8": 1.0}, {"7": 5.001, "8": 1.002}])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock.now_s, thread_time=clock.now_s))
    monkeypatch.setattr(timing, "waits_for_cores", lambda: next(readings))
    budget = Budget(min_rounds=5, max_rounds=5)
    taken = timer_of(monkeypatch, clock, budget, ranks=1).take(Iteration(clock.passing(MS), "run"))
    assert (len(taken.times_s), taken.waited) == (5, waited and pytest.approx(waited))


class Queue(Steps):
    """A host that takes a while to start a kernel, and a device that waits for it."""

    def __init__(self, launch_ns, kernel_ns):
        self.launch_ns, self.kernel_ns = launch_ns, kernel_ns
        self.host_ns = self.device_ns = 0

    def run(self):
        self.host_ns += self.launch_ns
        self.device_ns = max(self.device_ns, self.host_ns) + self.kernel_ns

    def stamp(self):
        self.device_ns = max(self.device_ns, self.host_ns)
        return self.device_ns

    def wait(self, stamp):
        self.host_ns = max(self.host_ns, stamp)

    def now_s(self):
        return self.host_ns * 1e-9


@pytest.mark.parametrize(
    ("launch_ns", "kernel_ns", "iterations"),
    [
        (4_000, 28_000, 16),  # 100 launches of 4 us: the first, for which the device waits, is a hundredth of a sample
        (4_000, 800_000, 1),
        (90_000, 100_000, 16),  # many kernels in an iteration: the device waits for the first of them alone
    ],
)
def test_a_sample_is_long_beside_the_launch_that_the_device_waits_for(monkeypatch, launch_ns, kernel_ns, iterations):
    clock = Queue(launch_ns, kernel_ns)
    timer = timer_of(monkeypatch, clock, ranks=1)
    assert iterations == timer._choose_iterations(timer._warm_up(clock.run))


def test_a_flushed_sample_has_no_launch_in_it_because_the_flush_keeps_the_device_busy():
    clock = Queue(launch_ns=4_000, kernel_ns=3_000)

    def flush():
        clock.host_ns += clock.launch_ns
        clock.device_ns = max(clock.device_ns, clock.host_ns) + 100_000

    def synchronize():
        clock.host_ns = max(clock.host_ns, clock.device_ns)

    member = SimpleNamespace(code=SimpleNamespace(clock=clock, synchronize=synchronize), world_size=1, rank=0)
    for aligned in (True, False):
        timer = Timer(member, Budget(), SPANS, aligned=aligned)
        synchronize()
        assert 3e-6 == pytest.approx(timer._sample(clock.run, 1, None, flush).time_s)
    assert 7e-6 == pytest.approx(timer._sample(clock.run, 1, None, synchronize).time_s)  # as with an idle device
