"""Which control resembles a step, and what the gate makes of one that moved, stayed, or is of another kind."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.gate_kinds import Plan, outcome
from perfsuite.base.errors import RanksFailed
from perfsuite.gate.gate import Gate
from perfsuite.gate.shift import moved, stored_control
from perfsuite.platforms.cpu import CpuDevice
from perfsuite.record.step import UNLIKE
from perfsuite.record.verdict import GateSettings
from perfsuite.record.workload import Budget
from perfsuite.runtime.ranks import timer as timing
from perfsuite.runtime.ranks.arrival import ArrivalWatch
from perfsuite.runtime.ranks.timer import Timer
from perfsuite.runtime.ranks.yardstick import Doing, Effort, longest_wait_s, make_control, waits_for_cores
from test_correctness.helpers import steps
from test_correctness.helpers.gate_runs import WOBBLE, gated, jitter, judged, node_of, run_of, settle, stored_runs
from test_correctness.helpers.local_driver import QUICK, driver_fixture, job

STORED = "a" * 40
WITH_BASE = GateSettings(can_run_base=True, base_commit="b" * 40)
SLEEP, MESSAGE = "sleep 16 ms", "message 32 KiB"


def timed(change=0.0, kind=SLEEP):
    """Fields of a run whose control took ``change`` longer than the stored one."""
    return {"yardstick": math.log(0.001 * (1 + change)), "control": kind}


# -- which control ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("doing", "parts"),
    [
        ({}, ("compute",)),
        ({"declared": "memory"}, ("memory",)),
        ({"share": 0.02, "own_share": 0.02}, ("sleep",)),
        ({"share": 0.7, "own_share": 0.7}, ("compute", "sleep")),
        ({"share": 1.0, "own_share": 0.3}, ("compute",)),  # other threads of the process work for it
        ({"share": 0.4, "own_share": 0.2, "ranks": 2, "message_bytes": 4096.0}, ("message",)),
        ({"share": 1.0, "own_share": 0.7, "ranks": 2, "message_bytes": 4096.0}, ("compute", "message")),
        ({"share": 1.0, "own_share": 0.95, "ranks": 2, "message_bytes": 4096.0}, ("compute",)),
        ({"share": 0.1, "own_share": 0.1, "ranks": 2}, ("sleep",)),  # two ranks that do not talk
        ({"share": 0.1, "own_share": 0.1, "ranks": 2, "message_bytes": None}, ()),  # nobody knows what it waits for
        ({"share": 0.1, "own_share": 0.1, "blocks": 8.0}, ()),  # for a disk
        ({"declared": "message", "queues": True, "ranks": 2, "own_share": 0.1}, ("message",)),
        ({"declared": "message", "queues": True, "own_share": 0.1}, ("memory",)),
        ({"declared": "compute", "queues": True, "own_share": 0.1, "share": 0.1}, ("compute",)),
    ],
)
def test_the_control_is_chosen_by_what_the_step_does(doing, parts):
    assert Doing(**{"declared": "compute", **doing}).parts() == parts


def test_a_control_sleeps_and_sends_about_as_much_at_once_as_the_step():
    waits = {0.00001: 1e-3 / 16, 0.001: 0.001, 0.005: 0.004, 0.02: 0.016, 3.0: 0.064}
    assert {wait: Doing(declared="compute", wait_s=wait).sleep_s() for wait in waits} == pytest.approx(waits)
    sizes = {4.0: 1024, 40_000.0: 32 * 1024, 1e6: 1 << 20, 1e9: 1 << 20, math.inf: 1 << 20}
    assert {size: Doing(declared="compute", message_bytes=size).size(1 << 20) for size in sizes} == sizes


def test_what_wants_a_core_on_a_busy_host_is_at_work():
    starved = Effort(wall_s=1.0, own_s=0.99, all_s=0.99, waits=3)  # it had a fifth of a core and wanted all of it
    assert starved.own_share == 0.99
    assert Effort(wall_s=1.0, own_s=0.2, all_s=0.2).share == 1.0, "it never went to sleep"
    asleep = Effort(wall_s=1.0, own_s=0.01, all_s=0.01, waits=99)
    assert (asleep.share, asleep.wait_s) == (0.01, 0.01)
    later = Effort.now(all_threads=True)
    done = Effort.now(all_threads=True).since(later) + Effort()
    assert done.wall_s > 0
    assert done.own_s >= 0
    assert min(done.waits, done.blocks) >= 0


def test_without_a_kernel_that_tells_the_time_on_a_core_counts(monkeypatch):
    monkeypatch.setattr("perfsuite.runtime.ranks.yardstick._wanted_s", lambda file: 0.0)
    before = Effort.now(all_threads=True)
    assert 0 < before.own_s <= before.all_s


def test_the_waits_of_threads_for_a_core_are_read_from_the_kernel(tmp_path):
    for thread, statistics in (("7", "5000000000 2000000000 9\n"), ("8", "1000000000 500000000 3\n"), ("9", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(statistics)
    before = waits_for_cores(tmp_path)
    assert before == {"7": 2.0, "8": 0.5, "9": 0.0}
    assert longest_wait_s(before, {"8": 1.25, "9": 0.0, "10": 0.5}) == 0.75, "thread 7 has ended"
    assert waits_for_cores(tmp_path / "absent") is None
    assert longest_wait_s(None, before) is None
    assert longest_wait_s(waits_for_cores(), waits_for_cores()) >= 0


def member_of(ranks):
    return SimpleNamespace(code=CpuDevice(), world_size=ranks, rank=1, device=torch.device("cpu"), backend="gloo")


@pytest.mark.parametrize(
    ("ranks", "sent", "efforts", "kind"),
    [
        (1, 0.0, (Effort(wall_s=1.0, own_s=0.01, all_s=0.01, waits=80),), SLEEP),
        (1, 0.0, (Effort(wall_s=1.0, own_s=1.0, all_s=1.0, waits=1),), "compute"),
        (1, 0.0, (Effort(wall_s=1.0, own_s=0.7, all_s=0.7, waits=80),), "compute+sleep 4 ms"),
        (2, 4e4, (Effort(wall_s=1.0, own_s=0.1, all_s=0.9, waits=80),), MESSAGE),
        (2, math.inf, (Effort(wall_s=1.0, own_s=0.1, all_s=0.9, waits=80),), "message 1024 KiB"),
        (2, None, (Effort(wall_s=1.0, own_s=0.1, all_s=0.1, waits=80),), UNLIKE),
    ],
)
def test_ranks_agree_on_a_control_and_name_its_kind(monkeypatch, ranks, sent, efforts, kind):
    seen = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, how: seen.append(values.tolist()))
    timer = Timer(member_of(ranks), Budget(yardstick=True), spans=None, aligned=True)  # type: ignore[arg-type]
    timer._effort = efforts[0]
    control = timer._make_control(sent, 10)
    assert control.kind == kind
    assert bool(control.parts) == (kind != UNLIKE)
    assert control.meets == kind.startswith("message")
    assert len(seen) == ranks - 1, "one maximum over ranks, on several"


def test_a_message_is_timed_when_the_ranks_are_aligned_and_leaves_its_buffer(monkeypatch):
    done = []
    monkeypatch.setattr(dist, "barrier", lambda: done.append("met"))
    monkeypatch.setattr(dist, "all_reduce", lambda buffer, how: done.append((buffer.numel() * 4, how)))
    timer = Timer(member_of(2), Budget(yardstick=True), spans=None, aligned=False)  # type: ignore[arg-type]
    doing = Doing(declared="compute", own_share=0.1, share=0.1, message_bytes=1024.0, ranks=2)
    assert timer._time_control(make_control(doing, torch.device("cpu"), CpuDevice())) > 0
    assert done == ["met", (1024, dist.ReduceOp.MAX)]  # of ones: the maximum of equal buffers is the buffer


def test_two_parts_count_alike_however_long_each_takes():
    doing = Doing(declared="compute", own_share=0.7, share=0.7, wait_s=0.004)
    control = make_control(doing, torch.device("cpu"), CpuDevice())
    times_s = iter((0.001, 0.004))
    assert control.time_s(lambda part: next(times_s)) == pytest.approx(0.002)
    nothing = make_control(Doing(declared="compute", share=0.1, blocks=9.0), torch.device("cpu"), CpuDevice())
    assert nothing.time_s(lambda part: 1.0) == 0.0


def test_no_thread_is_looked_at_between_ranks_that_wait_for_each_other(monkeypatch):
    looked = []
    monkeypatch.setattr(timing.Effort, "now", lambda *, all_threads: looked.append(all_threads) or Effort())
    timer = Timer(member_of(1), Budget(yardstick=True), spans=None, aligned=True)  # type: ignore[arg-type]
    timer._time_batch(lambda: None, 1)
    timer._sends = True
    timer._time_batch(lambda: None, 1)
    assert looked == [True, True, False, False]


def _refuse(group):
    raise RuntimeError("no sequence numbers")


def test_the_watched_iteration_tells_how_much_a_message_has(tmp_path, monkeypatch):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        watch, buffer = ArrivalWatch(CpuDevice(), "step"), torch.ones(256)
        watch.once(lambda: [dist.all_reduce(buffer) for _ in range(3)])
        assert watch.message_bytes == 1024
        watch.once(lambda: None)
        assert watch.message_bytes == 0
        watch.once(dist.barrier)
        assert watch.message_bytes > 0, "a barrier is a message without bytes"
        watch.count(lambda: dist.all_reduce(buffer))  # where torch.compile would compile for the mode
        assert watch.message_bytes == math.inf
        watch.count(lambda: None)
        assert watch.message_bytes == 0
        monkeypatch.setattr(dist.ProcessGroup, "_get_sequence_number_for_group", _refuse)
        watch.count(lambda: None)
        assert watch.message_bytes is None
    finally:
        dist.destroy_process_group()


driver, cold_driver = driver_fixture(), driver_fixture(cold=True)
CONTROLLED = dataclasses.replace(QUICK, yardstick=True)


@pytest.mark.extended
def test_real_ranks_say_which_control_they_timed(cold_driver):
    measurement = cold_driver.run(job(steps.add_up, 2, budget=CONTROLLED))
    assert measurement.control not in ("", UNLIKE)
    assert len(measurement.yardsticks_s) == len(measurement.times_s)
    assert all(measurement.yardsticks_s)
    assert cold_driver.run(job(steps.add_up, 2)).control == ""


@pytest.mark.extended
@pytest.mark.parametrize(("compiles", "control"), [(False, "message 1 KiB"), (True, "message 1024 KiB")])
def test_a_compiler_that_an_earlier_case_loaded_does_not_change_the_control(cold_driver, compiles, control):
    asked = job(steps.waiting_beside_a_compiler, 2, budget=CONTROLLED, fresh=True, compiles=compiles)
    assert cold_driver.run(asked).control == control


def test_a_rank_that_dies_in_the_message_of_its_control_is_named(driver):
    with pytest.raises(RanksFailed, match=r"rank 1 .*SIGKILL"):
        driver.run(job(steps.dying_in_its_control, 2, budget=CONTROLLED, fresh=True))


# -- what it says ----------------------------------------------------------------------------------------------------


def test_how_far_case_and_control_usually_lie_apart_is_how_far_they_may():
    runs = stored_runs(control=SLEEP)
    loud = [dataclasses.replace(run, yardstick=math.log(0.001) + 20 * by) for run, by in zip(runs, WOBBLE, strict=True)]
    values = [run.location for run in runs]
    control = stored_control(loud, values, lambda run: run.yardstick)
    assert control.kind == SLEEP
    assert control.apart == pytest.approx(0.06, abs=0.03)
    now = moved(control, [run_of(0.1, **timed())])
    assert now.says(0.10, 0.03) == "unsure"
    assert now.says(0.30, 0.03) == "code"
    assert moved(control, [run_of(0.1)]) is None, "no control was timed today"
    assert stored_control(loud[:2], values[:2], lambda run: run.yardstick) is None


@pytest.mark.parametrize("settings", [WITH_BASE, GateSettings()])
@pytest.mark.parametrize(
    ("stored", "now", "name"),
    [
        (timed(), timed(0.10), "unstable-host"),
        (timed(), timed(0.0), "failing"),
        (timed(0.0, ""), timed(0.10, "compute"), "unstable-host"),  # all that earlier versions stored was a kernel
        (timed(0.0, ""), timed(0.0), "inconclusive"),  # stored by an earlier version: a compute kernel
        (timed(), timed(0.0, "sleep 4 ms"), "inconclusive"),
        (timed(), {"control": UNLIKE}, "inconclusive"),
        ({}, timed(), "inconclusive"),
    ],
)
def test_a_case_that_no_control_resembles_is_not_called_slower_code(settings, stored, now, name):
    given = gated(stored=stored_runs(commit=STORED, **stored))
    verdict, _ = judged(0.10, settings=settings, base=0.10, anchor=0.10, given=given, **now)
    assert verdict.fails == (name == "failing")
    if name != "failing":
        assert verdict.name == name
    if name == "inconclusive":
        assert "the cause may be the host or the code" in verdict.reasons[0]
    assert verdict.name not in ("pass", "improved"), "and it is never silent"


@pytest.mark.parametrize("clean", [0, 30], ids=["no clean samples", "clean samples"])
@pytest.mark.parametrize(
    ("change", "then", "now", "name"),
    [
        (1.0, 0.0, 0.5, "unstable-host"),
        (1.0, 0.15, 0.15, "regressed"),  # they always wait, and longer only in total
        (1.0, 0.5, 0.75, "regressed"),  # ranks that share cores wait longer if they do more
        (1.0, 0.0, 0.05, "regressed"),
        (1.0, None, 0.5, "regressed"),  # stored by a kernel without statistics
        (1.0, 0.0, None, "regressed"),
        (3.0, 0.0, 0.5, "regressed"),
        (1.0, 0.0, 1.0, "unstable-host"),
    ],
)
def test_a_case_whose_threads_wait_for_a_core_is_not_called_slower_code(change, then, now, name, clean):
    """The yardstick takes less than a turn of the scheduler, so most of them are not interrupted."""
    given = gated(stored=stored_runs(clean=30, waited=then, **timed()))
    verdict, _ = judged(change, given=given, waited=now, clean=clean, **timed())
    assert (verdict.name, verdict.decisive.quantity) == (name, "time")
    if (name, clean) == ("unstable-host", 30):
        assert "longer waits for a core explain +" in verdict.reasons[0]


@pytest.mark.parametrize("now", [timed(), timed(0.10), timed(0.0, "compute"), {"control": UNLIKE}])
@pytest.mark.parametrize(("base", "anchor", "name"), [(0.0, 0.0, "regressed"), (0.10, 0.0, "drifted")])
def test_code_that_an_a_b_shows_to_be_slower_fails_whatever_a_control_says(now, base, anchor, name):
    given = gated(stored=stored_runs(commit=STORED, **timed()))
    verdict, _ = judged(0.10, settings=WITH_BASE, base=base, anchor=anchor, given=given, **now)
    assert (verdict.name, verdict.fails) == (name, True)


def test_an_environment_that_changed_is_named_although_no_control_resembles_the_case():
    given = gated(stored=stored_runs(**timed()), environment_changes=("packages.torch 2, stored 1",))
    assert judged(0.10, given=given, control=UNLIKE)[0].name == "environment"


@pytest.mark.parametrize(("moved_by", "fails"), [(0.40, False), (0.0, True)])
def test_the_mean_has_the_mean_of_the_control(moved_by, fails):
    """A neighbour's bursts lengthen some samples: no median feels them."""
    beside = {**timed(), "yardstick_mean": math.log(0.001), "yardstick_p95": math.log(0.001)}
    means = [{"clean_mean": math.log(0.01 * (1 + by)), "clean_p95": math.log(0.0102 * (1 + by))} for by in WOBBLE]
    runs = stored_runs(commit=STORED, **beside)
    stored = [dataclasses.replace(run, **mean) for run, mean in zip(runs, means, strict=True)]
    now = {**beside, "yardstick_mean": math.log(0.001 * (1 + moved_by)), "clean_mean": math.log(0.014)}
    verdict, _ = judged(0.0, given=gated(stored=tuple(stored)), clean_p95=math.log(0.0102), **now)
    assert verdict.fails is fails
    assert verdict.decisive.quantity == "mean"
    assert verdict.name == ("regressed" if fails else "unstable-host")


def test_a_yardstick_of_another_kind_is_not_taken_off_the_values():
    wobble = [12 * step for step in WOBBLE]
    runs = stored_runs(wobble, commit=STORED, control="compute")
    followed = [dataclasses.replace(run, yardstick=run.location - 2.0) for run in runs]
    cases = [gated(name, stored=tuple(followed)) for name in ("a", "b", "c")]
    gate = Gate(cases, GateSettings())
    assert all(work.time.level.slope > 0.9 for work in gate._works.values())
    gate.add(node_of("a"), run_of(0.0, yardstick=math.log(0.01) - 2.0, control="compute"))
    gate.add(node_of("b"), run_of(0.0, **timed()))
    gate.add(node_of("c"), run_of(0.0, control=UNLIKE))
    levels = {name: gate._works[node_of(name)].time.level for name in ("a", "b", "c")}
    assert levels["a"].slope > 0.9
    assert levels["b"].slope == levels["c"].slope == 0.0
    assert levels["b"].sigma > 5 * levels["a"].sigma
    settle(gate, lambda name, number: run_of(jitter(number), **(timed() if name == "b" else {"control": UNLIKE})))
    assert gate.verdict(node_of("b")).name != "unstable-host", "its runs are as stable as any"


def suite(slower, control):
    """A suite of 12 cases of which those with an even number are moved; ``control`` has the fields of a case's runs."""
    names = [f"n{index}" for index in range(12)]
    kinds = {name: SLEEP if index % 3 else "compute" for index, name in enumerate(names)}
    given = [gated(name, stored=stored_runs(commit=STORED, **timed(0.0, kinds[name]))) for name in names]
    gate = Gate(given, GateSettings(remeasure=False))
    for number, name in enumerate(names):
        by = slower if kinds[name] == SLEEP else 0.0
        gate.add(node_of(name), run_of(by + jitter(number), number=number, **control(kinds[name])))
    return gate.suite()


def test_a_suite_is_held_against_the_controls_of_the_cases_that_moved():
    host = suite(0.31, lambda kind: timed(0.30 if kind == SLEEP else -0.002, kind))
    assert host.name == "unstable-host"
    assert "yardsticks moved by +30 % (8 cases: sleep 16 ms)" in host.line
    assert suite(0.31, lambda kind: timed(0.0, kind)).name == "drifted"
    unlike = suite(0.31, lambda kind: timed(-0.002, "compute"))  # as every control once was
    assert unlike.name == "inconclusive"
    assert "no yardstick resembles most of these cases (8 cases: its control is compute, stored is" in unlike.line
    assert suite(0.31, lambda kind: {}).name == "drifted", "as before where no control is timed at all"


def test_a_neighbour_that_costs_each_kind_something_else_raises_no_alarm_and_hides_nothing():
    plan = Plan(host="R3", cases=9, base=False, slower=0.0, busier=4.0, controls="own")
    assert sum(outcome(plan, f"few{number}").fails for number in range(6)) == 0
    slow = dataclasses.replace(plan, base=True, slower=0.30)
    ended = [outcome(slow, f"few{number}") for number in range(3)]
    assert all(one.fails for one in ended)
    assert not any(v.name in ("pass", "improved") for one in ended for v in one.verdicts if "compute" not in v.case
                   and "memory" not in v.case)  # fmt: skip
