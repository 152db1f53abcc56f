"""Baseline files: what an update adds, replaces and refuses, whose file it is, and which gains and losses are told."""

import dataclasses
import functools

import pytest

from perfsuite.base.errors import BaselineError, ConfigurationError
from perfsuite.baselines import store
from perfsuite.baselines.baseline import KEPT_RUNS, Acceptance
from perfsuite.baselines.draft import confirming, gain, gains_in, seen_in, slowdown, suspects_slowdown
from perfsuite.baselines.runs import MetricMeaning, usually_clean
from perfsuite.record.verdict import Finding, Verdict
from test_correctness.helpers.stored_files import (
    HARDWARE,
    OUT_OF_MEMORY,
    case,
    entry_in,
    filled,
    offer,
    run_of,
    sessions_in,
)


def test_one_session_does_not_push_out_the_others(tmp_path):
    offer(tmp_path, *(run_of(f"s{index}", 20 - index) for index in range(8)))
    offer(tmp_path, *(run_of("now", 0.1, number=number) for number in range(9)))
    assert sessions_in(tmp_path).count("now") == 4
    offer(tmp_path, *(run_of("more", 0.05, number=number) for number in range(9)), session_runs=9)
    assert sessions_in(tmp_path).count("more") == 9
    assert len(sessions_in(tmp_path)) == KEPT_RUNS


@pytest.mark.parametrize(
    ("mode", "verdict", "changes", "why"),
    [
        ("append", "regressed", {}, "regressed; if that is meant: --perf-accept=all --perf-reason=TEXT"),
        ("improved", "drifted", {}, "drifted; if that is meant: --perf-accept=all --perf-reason=TEXT"),
        ("environment", "regressed", {}, "regressed; if that is meant: --perf-accept=all --perf-reason=TEXT"),
        ("append", "environment", {}, "environment; if that is meant: --perf-accept=environment --perf-reason=TEXT"),
        ("append", "impossible", {}, "impossible; an error of measurement is never stored"),
        ("accept", "impossible", {}, "impossible; an error of measurement is never stored"),
        ("append", "pass", {"process": "reused"}, "its processes were reused; a baseline takes fresh ones"),
        ("improved", "pass", {}, "its verdict is pass; --perf-update=improved stores improved cases only"),
    ],
)
def test_what_is_refused_changes_nothing(tmp_path, mode, verdict, changes, why):
    path = offer(tmp_path, run_of("s0")).path
    before = path.read_bytes()
    report = offer(tmp_path, run_of("s1", 0.5, **changes), mode=mode, verdict=verdict, reason="because")
    assert report.refused == {case().node: why}
    assert (report.written, report.added) == (False, {})
    told = verdict in ("regressed", "drifted", "environment", "impossible")
    assert report.alarming == ([case().node] if told else [])
    assert path.read_bytes() == before


def test_storing_the_same_run_twice_stores_it_once(tmp_path):
    path = offer(tmp_path, run_of("s0")).path
    before = path.read_bytes()
    assert offer(tmp_path, run_of("s0")).refused == {case().node: "its runs are stored already"}
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("mode", "verdict", "kind"),
    [
        *(("accept", name, "accepted") for name in ("regressed", "drifted", "environment", "improved")),
        ("accept", "not-comparable", "accepted"),
        ("environment", "environment", "environment"),
    ],
)
def test_an_accepted_case_begins_a_new_epoch(tmp_path, mode, verdict, kind):
    offer(tmp_path, *(run_of(f"s{index}", 9 - index) for index in range(6)), session_runs=6)
    now = tuple(run_of("now", 0.1, median_s=0.02, number=number) for number in range(5))
    report = offer(tmp_path, *now, mode=mode, verdict=verdict, reason="faster disk")
    assert report.replaced == [case().node]
    entry = entry_in(tmp_path)
    assert entry.runs == entry.reference == now
    assert entry.accepted == Acceptance(reason="faster disk", session="now", time=now[0].time, kind=kind)


def test_runs_of_before_an_epoch_are_not_appended_to_it(tmp_path):
    offer(tmp_path, run_of("s1", 2), mode="accept", verdict="pass", reason="new disk")
    late = offer(tmp_path, run_of("s0", 3))
    why = f"its runs are older than the epoch that began at {entry_in(tmp_path).accepted.time}; measure it again"
    assert (late.written, late.refused) == (False, {case().node: why})


def test_what_is_not_meant_by_an_accepted_environment_is_appended(tmp_path):
    offer(tmp_path, run_of("s0", 2))
    report = offer(tmp_path, run_of("s1", 1), mode="environment", verdict="pass", reason="new driver")
    assert (report.added, report.replaced) == ({case().node: 1}, [])
    assert entry_in(tmp_path).accepted is None


def test_accept_adds_where_nothing_changed_and_needs_a_reason(tmp_path):
    offer(tmp_path, run_of("s0", 2))
    offer(tmp_path, run_of("s1", 1), mode="accept", verdict="pass", reason="new driver")
    assert sessions_in(tmp_path) == ["s0", "s1"]
    with pytest.raises(ConfigurationError, match="--perf-reason"):
        offer(tmp_path, run_of("s2"), mode="accept", reason="  ")


def test_real_and_simulated_runs_never_meet(tmp_path):
    offer(tmp_path, run_of("s0"))
    simulated = dataclasses.replace(HARDWARE, simulated=True)
    for use in (
        lambda: offer(tmp_path, run_of("s1", 0.5), hardware=simulated),
        lambda: store.load(tmp_path, simulated),
    ):
        with pytest.raises(BaselineError, match="the two are never compared"):
            use()


def test_a_file_under_a_wrong_name_is_not_taken_for_this_machines(tmp_path):
    path = offer(tmp_path, run_of("s0")).path
    other = dataclasses.replace(HARDWARE, fingerprint="cpu-other")
    path.rename(store.path_of(tmp_path, other))
    with pytest.raises(BaselineError, match="holds runs of cpu/cpu-test, but it is named after cpu/cpu-other"):
        store.load(tmp_path, other)
    assert store.load(tmp_path, HARDWARE) is None


TIME = {"time": 0.03}


improved = functools.partial(offer, verdict="improved", gains=TIME)


@pytest.fixture
def grown(tmp_path):
    """A file with a complete reference and runs after it."""
    filled(tmp_path, 10)
    return tmp_path


# -- improvements --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["append", "improved"])
def test_an_improvement_begins_an_epoch_when_a_second_session_of_the_machine_shows_it(grown, mode):
    node, reference = case().node, entry_in(grown).reference
    first = improved(grown, *(run_of("a", 9, median_s=0.008, number=number) for number in range(4)), mode=mode)
    assert first.notes == {node: "improved; a second session of the machine confirms it and begins a new epoch"}
    improved(grown, run_of("b", 8.98, median_s=0.008), mode=mode)  # within the hour
    assert entry_in(grown).reference == reference
    assert sessions_in(grown)[-5:] == ["a"] * 4 + ["b"]
    second = improved(grown, run_of("c", 8, median_s=0.0081), mode=mode)
    assert second.notes == {node: "improved in two sessions of the machine: a new epoch begins"}
    assert second.replaced == [node]
    entry = entry_in(grown)
    assert [run.session for run in entry.reference] == ["a"] * 4 + ["b", "c"]
    assert (entry.accepted.kind, entry.accepted.session) == ("improved", "a")


def test_a_gain_that_was_lost_in_between_is_seen_for_the_first_time_again(grown):
    improved(grown, run_of("a", 9, median_s=0.008))
    offer(grown, run_of("b", 8))
    improved(grown, run_of("c", 7, median_s=0.008))
    assert entry_in(grown).accepted is None
    improved(grown, run_of("d", 6, median_s=0.008))
    assert [run.session for run in entry_in(grown).reference] == ["c", "d"]


def test_runs_of_a_first_improvement_are_no_part_of_a_reference_that_still_fills(tmp_path):
    filled(tmp_path, 5)
    improved(tmp_path, run_of("a", 9, median_s=0.008))
    offer(tmp_path, run_of("b", 8))
    assert [run.session for run in entry_in(tmp_path).reference] == ["s0", "s1", "s2", "s3", "s4", "b"]


def test_a_gain_is_in_what_improved():
    reference = (run_of("s0", 9), run_of("s1", 8, median_s=0.0102))
    faster = (run_of("s2", 7, median_s=0.005),)
    assert gain(faster, reference, "time") == pytest.approx(1.02, rel=0.02)
    assert gain(faster, reference, "latency_us") == pytest.approx(0.505, rel=0.01)
    assert gain(faster, reference, "latency_us", "higher") == pytest.approx(-0.505, rel=0.01)
    assert gain(faster, reference, "unknown") == 0.0
    full = (run_of("s0", 9, **OUT_OF_MEMORY),)
    assert [gain(faster, full, "memory"), gain(full, faster, "memory"), gain(faster, reference, "memory")] == [1, 0, 0]
    own = (run_of("s2", 7, metrics={"memory": 2.0}),)  # a metric of one's own has that name
    assert [gain(own, full, "memory"), gain(own, own, "memory")] == [1, 0]


def test_a_metric_that_improved_is_confirmed_by_itself(grown):
    small = {"metrics": {"latency_us": 5000.0}}
    entry = entry_in(grown)
    runs = (run_of("a", 9, **small), run_of("b", 8, **small))
    sessions = {run.session: run.session for run in (*entry.kept, *runs)}
    assert case().metrics["latency_us"] == MetricMeaning(unit="us", better="lower")
    assert confirming(entry, runs[:1], {"latency_us": 0.25}, sessions) == ()
    assert confirming(entry, runs, {"latency_us": 0.25}, sessions) == runs
    assert confirming(entry, runs, TIME, sessions) == ()


# -- slowdowns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored_s", "now_s", "expected"),
    [((0.01, 0.0101, 0.0099), 0.0112, 0.12), ((0.01,), 0.02, 1.0), ((0.01, 0.02, 0.0101), 0.015, 0.0)],
)
def test_slower_is_what_is_slower_than_every_stored_run(stored_s, now_s, expected):
    stored = [run_of(f"s{index}", 9 - index, median_s=median_s) for index, median_s in enumerate(stored_s)]
    assert slowdown([run_of("now", median_s=now_s)], stored) == pytest.approx(expected, abs=0.002)


def test_a_case_that_still_learns_is_stored_and_a_slowdown_said(tmp_path):
    """The gate has no verdict on it: on a host that is busy by now every case is slower than the first runs."""
    offer(tmp_path, run_of("s0", 9))
    early = offer(tmp_path, run_of("s1", 8, median_s=0.02), verdict="learning")
    told = "100 % slower than the 1 run stored; stored, because the gate has no verdict (learning)"
    assert (early.added, early.notes, early.alarming) == ({case().node: 1}, {case().node: told}, [])
    slow = run_of("s2", 1, median_s=0.05)
    accepted = offer(tmp_path, slow, verdict="learning", mode="accept", reason="larger inputs")
    assert accepted.replaced == [case().node]


def test_a_slowdown_that_is_not_excluded_is_stored_beside_the_reference(tmp_path):
    filled(tmp_path, 5)
    seen = {"verdict": "inconclusive", "seen": "inconclusive, 4 % slower"}
    assert offer(tmp_path, run_of("now", 2), **seen, suspected=True).written
    assert ("now" in sessions_in(tmp_path), "now" in [run.session for run in entry_in(tmp_path).reference]) == (1, 0)
    offer(tmp_path, run_of("quiet", 1), **seen)
    assert "quiet" in [run.session for run in entry_in(tmp_path).reference]


def test_a_slowdown_that_the_gate_could_not_confirm_is_said_and_can_be_accepted(tmp_path):
    """No other case tells the host from the code in a repository of one: ten times slower is inconclusive."""
    filled(tmp_path, 5)
    slow, seen = run_of("slow", 2, median_s=0.1), {"verdict": "inconclusive", "suspected": True}
    told = "900 % slower than the 5 runs stored; stored, because the gate has no verdict (inconclusive)"
    assert offer(tmp_path, slow, **seen).notes == {case().node: told}
    accepted = offer(tmp_path, slow, **seen, mode="accept", reason="it must wait")
    assert accepted.replaced == [case().node]
    entry = entry_in(tmp_path)
    assert (sessions_in(tmp_path), entry.accepted and entry.accepted.reason) == (["slow"], "it must wait")


def test_clean_samples_are_asked_for_only_where_many_runs_have_them(tmp_path):
    busy = {"clean": 3}
    offer(tmp_path, run_of("first", 9))
    for index in range(5):
        done = offer(tmp_path, run_of(f"busy{index}", 8 - index, **busy), verdict="learning")
        assert (done.added, done.notes, done.alarming) == ({case().node: 1}, {}, [])
    assert not usually_clean(entry_in(tmp_path).runs)


def test_a_run_of_a_busy_host_is_stored_beside_clean_ones_and_accept_begins_with_it(tmp_path):
    filled(tmp_path, 6)
    busy = {"clean": 3, "samples": 40}
    done = offer(tmp_path, run_of("busy", 5, **busy), verdict="unstable-host")
    assert done.added == {case().node: 1}
    assert "3 of 40 samples undisturbed, 10 are needed" in done.notes[case().node]
    slow = run_of("slow", 4, median_s=0.02, **busy)
    accepted = offer(tmp_path, slow, verdict="unstable-host", mode="accept", reason="meant")
    assert (accepted.replaced, sessions_in(tmp_path)) == ([case().node], ["slow"])


# -- what a verdict tells ------------------------------------------------------------------------------------------


def verdict_of(name, **finding):
    found = Finding(name=name, **{"quantity": "time", "tolerance": 0.03, **finding})
    return Verdict(case="t", name=name, findings=(found,))


@pytest.mark.parametrize(
    ("name", "effect", "interval", "expected"),
    [
        ("inconclusive", 0.05, (0.01, 0.09), True),
        ("inconclusive", 0.014, (0.01, 0.018), False),  # within half the tolerance
        ("inconclusive", 0.05, (-0.2, 0.3), False),  # within the noise
        ("inconclusive", -0.2, (-0.3, -0.1), False),
        ("inconclusive", None, None, False),
        ("pass", 0.05, (0.01, 0.09), False),
    ],
)
def test_a_slowdown_is_suspected_as_the_gate_suspects(name, effect, interval, expected):
    assert suspects_slowdown(verdict_of(name, effect=effect, interval=interval)) is expected


def test_what_was_seen_is_said_in_a_few_words():
    assert seen_in(verdict_of("regressed", effect=0.325)) == "REGRESSED +32.5 %"
    assert seen_in(verdict_of("inconclusive", effect=0.5, quantity="m")) == "inconclusive +50 % worse in m"
    assert seen_in(Verdict(case="t", name="unstable-host", reasons=("3 of 3 runs",))) == "unstable-host: 3 of 3 runs"


def test_a_gain_counts_from_the_tolerance_or_from_half_of_what_is_exact():
    assert gains_in(verdict_of("improved", effect=-0.2)) == {"time": 0.03}
    exact = verdict_of("improved", effect=-0.2, quantity="bubble_ratio", tolerance=0.01, exact=True)
    assert gains_in(exact) == {"bubble_ratio": 0.1}
