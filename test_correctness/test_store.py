"""Baseline files: what an update adds, replaces and refuses, and whose file it is."""

import dataclasses

import pytest

from perfsuite.base.errors import BaselineError, ConfigurationError
from perfsuite.baselines import store
from perfsuite.baselines.baseline import KEPT_RUNS, Acceptance
from perfsuite.baselines.draft import NewRuns
from test_correctness.helpers.stored_files import HARDWARE, case, entry_in, offer, run_of, sessions_in


def test_append_keeps_the_newest_twelve(tmp_path):
    for index in range(15):
        report = offer(tmp_path, run_of(f"s{index:02d}", 20 - index))
        assert (report.written, report.added) == (True, {case().node: 1})
    assert sessions_in(tmp_path) == [f"s{index:02d}" for index in range(3, 15)]


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
        ("accept", "regressed", "accepted"),
        ("accept", "drifted", "accepted"),
        ("accept", "environment", "accepted"),
        ("accept", "improved", "accepted"),
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
    entry = entry_in(tmp_path)
    why = f"its runs are older than the epoch that began at {entry.accepted.time}; measure it again"
    assert (late.written, late.refused) == (False, {case().node: why})


def test_what_is_not_meant_by_an_accepted_environment_is_appended(tmp_path):
    offer(tmp_path, run_of("s0", 2))
    report = offer(tmp_path, run_of("s1", 1), mode="environment", verdict="pass", reason="new driver")
    assert (report.added, report.replaced) == ({case().node: 1}, [])
    entry = entry_in(tmp_path)
    assert entry.accepted is None


def test_accept_adds_where_nothing_changed_and_needs_a_reason(tmp_path):
    offer(tmp_path, run_of("s0", 2))
    offer(tmp_path, run_of("s1", 1), mode="accept", verdict="pass", reason="new driver")
    assert sessions_in(tmp_path) == ["s0", "s1"]
    with pytest.raises(ConfigurationError, match="--perf-reason"):
        offer(tmp_path, run_of("s2"), mode="accept", reason="  ")


def test_real_and_simulated_runs_never_meet(tmp_path):
    offer(tmp_path, run_of("s0"))
    simulated = dataclasses.replace(HARDWARE, simulated=True)
    new = NewRuns(case=case(), runs=(run_of("s1", 0.5),))
    with pytest.raises(BaselineError, match="the two are never compared"):
        store.update(tmp_path, simulated, [new], mode="append")
    with pytest.raises(BaselineError, match="the two are never compared"):
        store.load(tmp_path, simulated)


def test_a_file_under_a_wrong_name_is_not_taken_for_this_machines(tmp_path):
    path = offer(tmp_path, run_of("s0")).path
    other = dataclasses.replace(HARDWARE, fingerprint="cpu-other")
    path.rename(store.path_of(tmp_path, other))
    with pytest.raises(BaselineError, match="holds runs of cpu/cpu-test, but it is named after cpu/cpu-other"):
        store.load(tmp_path, other)
    assert store.load(tmp_path, HARDWARE) is None
