"""Baseline files: what goes in comes out, and pytest-benchmark reads them."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Acceptance, Baseline, Entry, newest
from perfsuite.baselines.document import dumps, loads, stats_of
from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary
from test_correctness.helpers.stored_files import HARDWARE, OUT_OF_MEMORY, offer, run_of

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "baselines" / "examples" / "cpu-example.json"

texts = st.text(min_size=1, max_size=8)
times = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)).map(lambda time: time.isoformat(timespec="seconds"))


@st.composite
def runs_of_any_kind(draw):
    if draw(st.integers(0, 4)) == 0:
        same = {"session": draw(texts), "time": draw(times), "ordinal": draw(st.integers(0, 3))}
        return RunSummary(outcome="out_of_memory", **same)
    samples = draw(st.integers(1, 50))
    clean = draw(st.integers(0, samples))
    return RunSummary(
        session=draw(texts),
        time=draw(times),
        ordinal=draw(st.integers(0, 3)),
        quantiles_s=tuple(sorted(draw(st.lists(st.floats(1e-9, 1e3), min_size=5, max_size=5)))),
        location=draw(st.floats(-20, 7)) if clean else None,
        yardstick=draw(st.none() | st.floats(-20, 7)),
        yardstick_mean=draw(st.none() | st.floats(-20, 7)),
        yardstick_p95=draw(st.none() | st.floats(-20, 7)),
        control=draw(st.sampled_from(["", "compute", "message 32 KiB", "compute+sleep 4 ms", "unlike"])),
        samples=samples,
        clean=clean,
        iterations=draw(st.integers(1, 1000)),
        cpu_share=draw(st.floats(0, 1)),
        waited=draw(st.none() | st.floats(0, 1)),
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
        one = CaseIdentity(
            node=draw(texts),
            world_size=draw(st.integers(1, 8)),
            backend=draw(st.sampled_from(["", "gloo", "nccl"])),
            parameters=draw(st.dictionaries(texts, st.integers() | texts | st.booleans() | st.none(), max_size=3)),
            workload=draw(texts),
            group=draw(st.none() | texts),
            metrics={name: MetricMeaning(unit="us", better="lower") for name in draw(st.lists(texts, max_size=2))},
        )
        accepted = draw(st.none() | st.builds(Acceptance, reason=texts, session=texts, time=times))
        kept = draw(st.lists(runs_of_any_kind(), min_size=1, max_size=5, unique_by=lambda run: run.key))
        entries[one.key] = Entry(case=one, runs=newest(kept), accepted=accepted)
    return Baseline(hardware=HARDWARE, entries=entries, commit_info={"id": draw(texts)}, machine_info={})


@pytest.mark.extended
@settings(max_examples=60, deadline=None)
@given(baselines())
def test_what_goes_into_a_file_comes_out(baseline):
    text = dumps(baseline)
    assert loads(text.encode()) == baseline
    assert dumps(loads(text.encode())) == text


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


def test_statistics_are_those_of_pytest_benchmark():
    stats = stats_of([1.0, 2.0, 3.0, 4.0, 10.0], iterations=3)
    names = ("median", "q1", "q3", "outliers", "ops", "iterations")
    assert [3.0, 1.75, 5.5, "1;0", 0.25, 3] == [stats[name] for name in names]


def test_pytest_benchmark_compares_the_stored_files(tmp_path):
    one = offer(tmp_path / "one", *(run_of(f"s{index}", 9 - index) for index in range(6))).path
    two = offer(tmp_path / "two", *(run_of(f"s{index}", 9 - index, median_s=0.02) for index in range(6))).path
    example = store.read(EXAMPLE)
    command = [str(Path(sys.executable).parent / "pytest-benchmark"), "compare", "--columns=median,rounds"]
    files = [str(path) for path in (one, two, EXAMPLE, with_a_case_that_never_fitted(tmp_path))]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    rows = [line for line in shown.splitlines() if line.startswith("test_a[")]
    assert len(rows) == 2, shown
    assert any("10,000.0000" in row and row.split()[-1] == "6" for row in rows)
    assert any("20,000.0000" in row for row in rows)
    assert "test_fits" in shown
    assert all(entry.case.node.partition("::")[2] in shown for entry in example.entries.values())
    assert (example.hardware.platform, example.hardware.fingerprint) == ("cpu", EXAMPLE.stem)
    assert len(example.entries) >= 3


def with_a_case_that_never_fitted(folder):
    offer(folder, run_of("s0", **OUT_OF_MEMORY))
    return offer(folder, run_of("s0"), name="fits").path


def test_a_case_that_never_fitted_is_kept_apart_from_what_pytest_benchmark_reads(tmp_path):
    path = with_a_case_that_never_fitted(tmp_path)
    document = json.loads(path.read_text())
    assert [len(document[name]) for name in ("benchmarks", "unmeasured")] == [1, 1]
    offer(tmp_path, run_of("s1", 0.5))  # now it fits
    assert len(json.loads(path.read_text())["benchmarks"]) == 2
