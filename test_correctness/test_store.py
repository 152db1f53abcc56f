"""Baseline files: what goes in comes out, updates and merges, and pytest-benchmark reads them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_benchmark.stats import Stats

from perfsuite.baselines import store
from perfsuite.baselines.baseline import (
    KEPT_RUNS,
    Acceptance,
    Baseline,
    Entry,
    Hardware,
    flattened,
    hardware_differences,
    merge,
    moment,
    newest,
    prune,
)
from perfsuite.baselines.decode import decode
from perfsuite.baselines.encode import encode
from perfsuite.baselines.entry_stats import entry_stats
from perfsuite.baselines.runs import QUANTILES, Case, Meaning, Run, case_of, summarise
from perfsuite.baselines.text import dump, parse
from perfsuite.errors import BaselineError, ConfigurationError
from perfsuite.gate.comparable import find, gate_case, major_changes, soft_differences, usable_runs
from perfsuite.records import ClockFacts, Measurement, Metric, RankFacts, Result, Sample, Work

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "baselines" / "examples" / "cpu-example.json"
HARDWARE = Hardware(platform="cpu", fingerprint="cpu-test", key={"cpu_model": "Test CPU", "cores": 2})
NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)


def run_of(session="s0", days_old=1.0, median_s=0.01, number=0, **changes):
    plain = Run(
        session=session,
        time=(NOW - timedelta(days=days_old) + timedelta(seconds=number)).isoformat(),
        ordinal=number,
        quantiles_s=tuple(float(f"{median_s * factor:.3e}") for factor in (0.98, 0.99, 1.0, 1.01, 1.02)),
        location=round(math.log(median_s), 5),
        samples=40,
        clean=30,
        metrics={"latency_us": float(f"{median_s * 1e6:.5e}")},
        environment={"packages": {"torch": "2.13.0"}, "kernel": "6.1.0"},
    )
    return dataclasses.replace(plain, **changes)


def case(name="a", **changes):
    plain = Case(
        node=f"test_x.py::test_{name}[cpu-ws2-1KiB]",
        world_size=2,
        backend="gloo",
        parameters={"message_bytes": 1024, "dtype": "fp32"},
        workload="test_x:Sum",
        metrics={"latency_us": Meaning(unit="us", better="lower")},
    )
    return dataclasses.replace(plain, **changes)


def offer(folder, *runs, name="a", mode="append", verdict="pass", **more):
    new = store.NewRuns(case=case(name), runs=runs, verdict=verdict)
    return store.update(folder, HARDWARE, [new], mode=mode, **more)


def sessions_in(folder, name="a"):
    found = store.load(folder, HARDWARE)
    (entry,) = found.by_node[case(name).node]
    return [run.session for run in entry.runs]


# -- a file ----------------------------------------------------------------------------------------------------------


texts = st.text(min_size=1, max_size=8)
times = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)).map(lambda time: time.isoformat(timespec="seconds"))


@st.composite
def runs_of_any_kind(draw):
    if draw(st.integers(0, 4)) == 0:
        return Run(session=draw(texts), time=draw(times), outcome="out_of_memory", ordinal=draw(st.integers(0, 3)))
    samples = draw(st.integers(1, 50))
    clean = draw(st.integers(0, samples))
    return Run(
        session=draw(texts),
        time=draw(times),
        ordinal=draw(st.integers(0, 3)),
        quantiles_s=tuple(sorted(draw(st.lists(st.floats(1e-9, 1e3), min_size=5, max_size=5)))),
        location=draw(st.floats(-20, 7)) if clean else None,
        yardstick=draw(st.none() | st.floats(-20, 7)),
        samples=samples,
        clean=clean,
        iterations=draw(st.integers(1, 1000)),
        cpu_share=draw(st.floats(0, 1)),
        metrics=draw(st.dictionaries(texts, st.floats(-1e9, 1e9), max_size=3)),
        process=draw(st.sampled_from(["fresh", "reused"])),
        disturbance=draw(st.sampled_from(["", "unknown", "device 0 is throttled (thermal)"])),
        commit=draw(st.sampled_from(["", "6861899"])),
        environment=draw(st.dictionaries(texts, st.integers() | texts | st.lists(texts, max_size=2), max_size=3)),
    )


@st.composite
def baselines(draw):
    entries = {}
    for _ in range(draw(st.integers(0, 4))):
        one = Case(
            node=draw(texts),
            world_size=draw(st.integers(1, 8)),
            backend=draw(st.sampled_from(["", "gloo", "nccl"])),
            parameters=draw(st.dictionaries(texts, st.integers() | texts | st.booleans() | st.none(), max_size=3)),
            workload=draw(texts),
            group=draw(st.none() | texts),
            metrics={name: Meaning(unit="us", better="lower") for name in draw(st.lists(texts, max_size=2))},
        )
        accepted = draw(st.none() | st.builds(Acceptance, reason=texts, session=texts, time=times))
        kept = draw(st.lists(runs_of_any_kind(), min_size=1, max_size=5, unique_by=lambda run: run.key))
        entries[one.key] = Entry(case=one, runs=newest(kept), accepted=accepted)
    return Baseline(hardware=HARDWARE, entries=entries, commit_info={"id": draw(texts)}, machine_info={})


@settings(max_examples=60, deadline=None)
@given(baselines())
def test_what_goes_into_a_file_comes_out(baseline):
    text = dump(encode(baseline))
    assert decode(parse(text.encode())) == baseline
    assert dump(encode(decode(parse(text.encode())))) == text


def test_a_diff_shows_a_new_run_as_one_line(tmp_path):
    path = offer(tmp_path, *(run_of(f"s{index}", 10 - index) for index in range(5))).path
    offer(tmp_path, run_of("s0", 10), name="other")
    before = [line.rstrip(",") for line in path.read_text().splitlines()]
    offer(tmp_path, run_of("s5", 1))
    after = [line.rstrip(",") for line in path.read_text().splitlines()]
    added = [line.strip().split(":")[0] for line in after if line not in before]
    assert [line for line in added if line.startswith('"')][:2] == ['"check"', '"stats"']
    assert len(added) == 6  # the run, its session, check and stats of its case, date and check of the file
    assert [line for line in before if line not in after].count('   {"clean"') == 0


def test_a_line_holds_one_run_with_sorted_keys(tmp_path):
    path = offer(tmp_path, run_of("s0"), run_of("s1", 0.5)).path
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines() if '"quantiles_s"' in line]
    assert len(lines) == 2
    for line in lines:
        plain = json.loads(line)
        assert list(plain) == sorted(plain)
        assert set(plain) >= {"clean", "location", "metrics", "quantiles_s", "samples", "session", "time"}


@given(st.lists(st.sampled_from([0.001, 0.002, 0.0021, 0.5]) | st.floats(1e-6, 10), min_size=1, max_size=12))
def test_statistics_are_those_of_pytest_benchmark(medians_s):
    oracle = Stats()
    oracle.data = list(medians_s)
    ours = entry_stats(medians_s, iterations=3)
    for name, value in oracle.as_dict().items():
        if name in ("outliers", "stddev_outliers", "iqr_outliers"):
            continue  # compared where rounding cannot move a value over a fence
        assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-12), name
    assert ours["iterations"] == 3


def test_outliers_are_counted_as_pytest_benchmark_counts_them():
    oracle = Stats()
    oracle.data = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 3.0]
    assert entry_stats(oracle.data, iterations=1)["outliers"] == oracle.outliers


def compared(*files):
    command = [str(Path(sys.executable).parent / "pytest-benchmark"), "compare", "--columns=median,rounds", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_pytest_benchmark_compares_the_stored_files(tmp_path):
    one = offer(tmp_path / "one", *(run_of(f"s{index}", 9 - index) for index in range(6))).path
    two = offer(tmp_path / "two", *(run_of(f"s{index}", 9 - index, median_s=0.02) for index in range(6))).path
    done = compared(str(one), str(two))
    assert done.returncode == 0, done.stderr
    rows = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("test_a")]
    assert len(rows) == 2
    assert any("10.0000" in row and "6" in row for row in rows)
    assert any("20.0000" in row and "(2.0" in row for row in rows)


def test_the_example_is_a_sound_file_that_pytest_benchmark_compares():
    baseline = store.read(EXAMPLE)
    assert (baseline.hardware.platform, baseline.hardware.fingerprint) == ("cpu", EXAMPLE.stem)
    assert len(baseline.entries) >= 3
    done = compared(str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    assert all(entry.case.node.partition("::")[2] in done.stdout + done.stderr for entry in baseline.entries.values())


def test_a_case_that_never_fitted_is_kept_apart_from_what_pytest_benchmark_reads(tmp_path):
    never = dataclasses.replace(
        run_of("s0"), outcome="out_of_memory", quantiles_s=(), location=None, samples=0, clean=0, metrics={}
    )
    path = offer(tmp_path, never).path
    offer(tmp_path, run_of("s0"), name="fits")
    document = json.loads(path.read_text())
    assert [len(document[name]) for name in ("benchmarks", "unmeasured")] == [1, 1]
    assert compared(str(path)).returncode == 0
    offer(tmp_path, run_of("s1", 0.5))  # now it fits
    assert len(json.loads(path.read_text())["benchmarks"]) == 2


# -- updates ---------------------------------------------------------------------------------------------------------


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
        ("append", "regressed", {}, "it has regressed; if that is meant, use --perf-update=accept with --perf-reason"),
        ("append", "impossible", {}, "its verdict is impossible"),
        ("accept", "impossible", {}, "its verdict is impossible"),
        ("append", "unstable-host", {}, "its verdict is unstable-host"),
        ("append", "pass", {"process": "reused"}, "its processes were reused; a baseline takes fresh ones"),
        ("append", "pass", {"clean": 3}, "its runs are unstable"),
        ("improved", "pass", {}, "its verdict is pass; --perf-update=improved stores improved cases only"),
    ],
)
def test_what_is_refused_changes_nothing(tmp_path, mode, verdict, changes, why):
    path = offer(tmp_path, run_of("s0")).path
    before = path.read_bytes()
    report = offer(tmp_path, run_of("s1", 0.5, **changes), mode=mode, verdict=verdict, reason="because")
    assert report.refused == {case().node: why}
    assert (report.written, report.added) == (False, {})
    assert path.read_bytes() == before


def test_storing_the_same_run_twice_stores_it_once(tmp_path):
    path = offer(tmp_path, run_of("s0")).path
    before = path.read_bytes()
    assert offer(tmp_path, run_of("s0")).refused == {case().node: "its runs are stored already"}
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("mode", "verdict"), [("accept", "regressed"), ("accept", "improved"), ("improved", "improved")]
)
def test_accepted_and_improved_cases_start_anew(tmp_path, mode, verdict):
    offer(tmp_path, *(run_of(f"s{index}", 9 - index) for index in range(6)))
    report = offer(
        tmp_path,
        *(run_of("now", 0.1, median_s=0.02, number=number) for number in range(5)),
        mode=mode,
        verdict=verdict,
        reason="faster disk",
    )
    assert report.replaced == (case().node,)
    assert sessions_in(tmp_path) == ["now"] * 5
    (entry,) = store.load(tmp_path, HARDWARE).entries.values()
    assert entry.accepted.reason == ("faster disk" if mode == "accept" else "improved")


def test_accept_adds_where_nothing_changed_and_needs_a_reason(tmp_path):
    offer(tmp_path, run_of("s0", 2))
    offer(tmp_path, run_of("s1", 1), mode="accept", verdict="pass", reason="new driver")
    assert sessions_in(tmp_path) == ["s0", "s1"]
    with pytest.raises(ConfigurationError, match="--perf-reason"):
        offer(tmp_path, run_of("s2"), mode="accept", reason="  ")


def test_real_and_simulated_runs_never_meet(tmp_path):
    offer(tmp_path, run_of("s0"))
    simulated = dataclasses.replace(HARDWARE, simulated=True)
    new = store.NewRuns(case=case(), runs=(run_of("s1", 0.5),))
    with pytest.raises(BaselineError, match="the two never meet"):
        store.update(tmp_path, simulated, [new], mode="append")
    with pytest.raises(BaselineError, match="the two never meet"):
        store.load(tmp_path, simulated)


def test_a_file_under_a_wrong_name_is_not_taken_for_this_machines(tmp_path):
    path = offer(tmp_path, run_of("s0")).path
    other = dataclasses.replace(HARDWARE, fingerprint="cpu-other")
    path.rename(store.path_of(tmp_path, other))
    with pytest.raises(BaselineError, match="holds runs of cpu/cpu-test, its name says cpu/cpu-other"):
        store.load(tmp_path, other)
    assert store.load(tmp_path, HARDWARE) is None


def test_a_link_stays_one_and_permissions_stay(tmp_path):
    real = tmp_path / "real"
    path = offer(real, run_of("s0")).path
    path.chmod(0o640)
    folder = tmp_path / "linked" / "cpu"
    folder.mkdir(parents=True)
    (folder / path.name).symlink_to(path)
    offer(tmp_path / "linked", run_of("s1", 0.5))
    assert (folder / path.name).is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sessions_in(real) == ["s0", "s1"]


# -- merging and pruning ---------------------------------------------------------------------------------------------


@st.composite
def files_of_one_machine(draw):
    pool = [run_of(f"s{index}", days_old=40 - index, number=index % 2) for index in range(18)]
    entries = {}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        kept = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=14, unique_by=lambda run: run.key))
        accepted = draw(st.none() | st.sampled_from(kept))
        reason = Acceptance(reason="r", session=accepted.session, time=accepted.time) if accepted else None
        if accepted:
            kept = [run for run in kept if moment(run.time) >= moment(accepted.time)]
        entries[case(name).key] = Entry(case=case(name), runs=newest(kept), accepted=reason)
    return Baseline(hardware=HARDWARE, entries=entries)


@settings(max_examples=100, deadline=None)
@given(files_of_one_machine(), files_of_one_machine(), files_of_one_machine())
def test_merging_is_a_union_in_any_order(one, two, three):
    assert merge(one, one) == one
    assert merge(one, two) == merge(two, one)
    assert merge(merge(one, two), three) == merge(one, merge(two, three))


def test_merged_files_hold_every_run(tmp_path):
    first = offer(tmp_path / "a", run_of("s0", 3), run_of("s1", 2)).path
    second = offer(tmp_path / "b", run_of("s1", 2), run_of("s2", 1)).path
    offer(tmp_path / "b", run_of("s9"), name="only-b")
    target = tmp_path / "merged.json"
    whole = store.merge_files(target, [first, second])
    assert store.read(target) == whole
    assert [run.session for run in whole.by_node[case().node][0].runs] == ["s0", "s1", "s2"]
    assert store.merge_files(target, [second]) == whole


def test_files_of_different_hardware_or_changed_runs_are_not_merged(tmp_path):
    first = offer(tmp_path / "a", run_of("s0")).path
    new = store.NewRuns(case=case(), runs=(run_of("s0"),))
    more = Hardware(platform="cpu", fingerprint="cpu-more", key={"cpu_model": "Test CPU", "cores": 4})
    other = store.update(tmp_path / "b", more, [new], mode="append").path
    before = first.read_bytes()
    with pytest.raises(BaselineError, match=r"differ in hardware \(cores 4, stored 2\)"):
        store.merge_files(first, [other])
    changed = offer(tmp_path / "c", run_of("s0", median_s=0.02)).path
    with pytest.raises(BaselineError, match="one of them was changed after it was measured"):
        store.merge_files(first, [changed])
    assert first.read_bytes() == before


def test_prune_drops_by_age_by_name_and_what_was_superseded():
    old = Entry(case=case("a"), runs=(run_of("s0", 200), run_of("s1", 10)))
    larger = case("a", parameters={"message_bytes": 2048})
    new = Entry(case=larger, runs=(run_of("s2", 5),))
    other = Entry(case=case("b"), runs=(run_of("s0", 200),))
    whole = Baseline(hardware=HARDWARE, entries={each.case.key: each for each in (old, new, other)})
    kept, said = prune(whole, now=NOW, older_than_days=120)
    assert [len(entry.runs) for entry in kept.entries.values()] == [1, 1]
    assert len(said) == 2
    kept, said = prune(whole, now=NOW, superseded=True)
    assert set(kept.entries) == {larger.key, other.case.key}
    assert "superseded (dtype=absent, stored fp32; message_bytes=2048, stored 1024)" in said[0]
    kept, _ = prune(whole, now=NOW, case="*test_b*")
    assert other.case.key not in kept.entries


# -- what may be compared --------------------------------------------------------------------------------------------


def matched(folder, one, hardware=HARDWARE):
    return find(one, baseline=store.load(folder, hardware), hardware=hardware, folder=folder)


def test_the_same_case_on_the_same_hardware_is_found(tmp_path):
    offer(tmp_path, run_of("s0"))
    assert matched(tmp_path, case()).entry.case == case()
    assert matched(tmp_path, case(workload="moved:Sum")).entry is not None
    assert matched(tmp_path, case(backend="")).entry is not None  # out of memory before anybody could say


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"world_size": 4}, ("world size 4, stored 2",)),
        ({"backend": "nccl"}, ("backend nccl, stored gloo",)),
        ({"parameters": {"message_bytes": 1024, "dtype": "bf16"}}, ("dtype=bf16, stored fp32",)),
        ({"parameters": {"message_bytes": 1024}}, ("dtype=absent, stored fp32",)),
        ({"node": "test_x.py::test_new"}, ()),
    ],
)
def test_what_differs_in_a_case_is_named(tmp_path, changes, reasons):
    offer(tmp_path, run_of("s0"))
    match = matched(tmp_path, case(**changes))
    assert (match.entry, match.reasons) == (None, reasons)


def test_the_nearest_other_hardware_is_named(tmp_path):
    for name, key in (
        ("cpu-far", {"cpu_model": "Other", "cores": 64}),
        ("cpu-near", {"cpu_model": "Test CPU", "cores": 4}),
    ):
        hardware = Hardware(platform="cpu", fingerprint=name, key=key)
        store.update(tmp_path, hardware, [store.NewRuns(case=case(), runs=(run_of("s0"),))], mode="append")
    (tmp_path / "cpu" / "cpu-broken.json").write_text("{")
    match = matched(tmp_path, case())
    assert match.reasons == ("nearest stored hardware is cpu-near", "cores 2, stored 4")
    given_case = gate_case(case(), environment={}, baseline=None, hardware=HARDWARE, folder=tmp_path)
    assert given_case.refusal == "not-comparable"
    unknown = gate_case(case("new"), environment={}, baseline=None, hardware=HARDWARE, folder=tmp_path)
    assert (unknown.refusal, unknown.reasons) == ("no-baseline", ())


def test_hardware_differences_reach_into_nested_keys():
    more = Hardware(platform="cpu", fingerprint="x", key={"cpu": {"model": "B", "cores": 2}})
    less = Hardware(platform="cpu", fingerprint="y", key={"cpu": {"model": "A", "cores": 2}})
    assert hardware_differences(more, less) == ("cpu.model B, stored A",)
    assert flattened({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


def test_old_runs_are_not_used_and_a_stale_baseline_is_marked():
    entry = Entry(case=case(), runs=(run_of("s0", 130), run_of("s1", 90), run_of("s2", 70)))
    kept, flags = usable_runs(entry, entry.runs[0].environment, NOW)
    assert [run.session for run in kept] == ["s1", "s2"]
    assert flags[0] == "1 stored run not used: older than 120 days"
    assert flags[1].startswith("stale baseline: its newest run is 70 days old")
    fresh = Entry(case=case(), runs=(run_of("s0", 59),))
    assert usable_runs(fresh, fresh.runs[0].environment, NOW) == (fresh.runs, ())


def test_runs_of_another_major_version_are_not_used():
    entry = Entry(case=case(), runs=(run_of("s0", 2), run_of("s1", 1, environment={"packages": {"torch": "3.0.1"}})))
    kept, flags = usable_runs(entry, {"packages": {"torch": "2.14.0"}}, NOW)
    assert [run.session for run in kept] == ["s0"]
    assert flags == ("1 stored run not used: packages.torch 2.14.0, stored 3.0.1",)


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        ({"driver": "550.54"}, {"driver": "535.1"}, ("driver 550.54, stored 535.1",)),
        ({"driver": "535.2"}, {"driver": "535.1"}, ()),
        ({"kernel": "6.1.0-9"}, {"kernel": "5.15.0"}, ("kernel 6.1.0-9, stored 5.15.0",)),
        ({"memory_gib": "23.5"}, {"memory_gib": "31.2"}, ()),
        ({"packages": {"pytest": "9.0"}}, {"packages": {"pytest": "8.0"}}, ()),
        ({"governor": "performance"}, {"governor": "powersave"}, ()),
        ({"torch": "2.13.0"}, {}, ()),
    ],
)
def test_only_versions_of_what_is_timed_count_as_major(now, then, expected):
    assert major_changes(now, then) == expected


def test_differences_of_the_environment_are_named_up_to_a_number():
    now, then = {f"key{index}": "a" for index in range(9)}, {f"key{index}": "b" for index in range(9)}
    shown = soft_differences(now, then)
    assert len(shown) == 7
    assert shown[-1] == "and 3 more differences of the environment"
    assert soft_differences(now, now) == ()


# -- a run out of a result -------------------------------------------------------------------------------------------


def result_of(samples, **changes):
    ranks = tuple(
        RankFacts(
            rank=rank,
            host="h",
            device="cpu",
            threads=1,
            cores=None,
            median_s=0.01,
            min_s=0.01,
            max_s=0.01,
            cpu_share=0.999 - rank / 10,
            max_rss_bytes=1,
        )
        for rank in range(2)
    )
    measurement = Measurement(
        samples=samples,
        iterations=4,
        warmup_iterations=1,
        warmup_steady=True,
        aligned=True,
        clock=ClockFacts(name="perf_counter", resolution_s=1e-9, cost_s=1e-7),
        ranks=ranks,
        backend="gloo",
        process="fresh",
        transport="local",
    )
    plain = Result(
        case="test_x.py::test_a",
        workload="test_x:Sum",
        parameters={"size": (1, 2), "dtype": "fp32"},
        platform="cpu",
        world_size=2,
        outcome="measured",
        work=Work(),
        metrics=(
            Metric(name="latency_us", value=10_000.123456, unit="us", better="lower"),
            Metric(name="unknown", value=None, unit="us", better="lower", note="no"),
        ),
        measurement=measurement,
        session="now",
        started_at="2026-01-01T00:00:00+00:00",
        environment={"torch": "2.13.0"},
    )
    return dataclasses.replace(plain, **changes)


def test_a_run_keeps_quantiles_of_all_samples_and_the_median_of_the_clean_ones():
    rng = random.Random(1)
    clean = [Sample(time_s=0.01 + rng.random() / 1000, yardstick_s=0.002) for _ in range(30)]
    dirty = [Sample(time_s=0.02, involuntary_switches=2, yardstick_s=0.004) for _ in range(10)]
    run = summarise(result_of((*clean, *dirty)), ordinal=2, commit="abc")
    assert (run.samples, run.clean, run.ordinal, run.commit, run.iterations) == (40, 30, 2, "abc", 4)
    assert run.location == pytest.approx(math.log(0.0105), abs=0.02)
    assert run.yardstick == pytest.approx(math.log(0.002), abs=1e-4)
    assert run.cpu_share == 0.899
    assert run.metrics == {"latency_us": 10000.1}
    assert len(run.quantiles_s) == len(QUANTILES)
    assert run.quantiles_s[-1] == 0.02
    assert run.has_clean


def test_a_yardstick_missing_from_a_sample_is_not_used_and_few_samples_may_be_clean():
    samples = (
        Sample(time_s=0.01, yardstick_s=0.002),
        Sample(time_s=0.01),
        Sample(time_s=0.012, involuntary_switches=1),
    )
    run = summarise(result_of(samples))
    assert run.yardstick is None
    assert (run.clean, run.has_clean) == (2, True)
    assert not summarise(result_of((samples[2],) * 5)).has_clean


def test_the_identity_of_a_case_is_plain_json():
    one = case_of(result_of((Sample(time_s=0.01),)))
    assert one.parameters == {"size": [1, 2], "dtype": "fp32"}
    assert (one.backend, one.kind) == ("gloo", "test_x.py::test_a on 2 ranks")
    assert one.metrics["latency_us"] == Meaning(unit="us", better="lower")
    failed = result_of((), outcome="out_of_memory", measurement=None)
    assert case_of(failed, backend="nccl").backend == "nccl"
    assert summarise(failed).outcome == "out_of_memory"


@pytest.mark.parametrize(
    "changes", [{"outcome": "smoke"}, {"measurement": result_of((Sample(time_s=0.0),)).measurement}]
)
def test_what_is_no_measurement_makes_no_run(changes):
    with pytest.raises(ValueError, match=r"test_x.py::test_a"):
        summarise(result_of((Sample(time_s=0.01),), **changes))
