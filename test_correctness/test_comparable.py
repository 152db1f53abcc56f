"""Which stored runs a case may be compared with, and what is said of the others."""

from __future__ import annotations

import pytest

from perfsuite.baselines import store
from perfsuite.baselines.baseline import (
    Entry,
    Hardware,
    flattened,
    hardware_differences,
)
from perfsuite.gate.comparable import find, gate_case, major_changes, soft_differences, usable_runs
from test_correctness.helpers.stored_files import HARDWARE, NOW, case, offer, run_of


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
