"""Which stored runs a case may be compared with, and what is said of the others."""

from pathlib import Path

import pytest

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Hardware, flattened, hardware_differences
from perfsuite.gate.comparable import (
    causes,
    find,
    gate_case,
    nearest_hardware,
    shortened,
    soft_differences,
    usable_runs,
)
from test_correctness.helpers.stored_files import HARDWARE, NOW, baseline_of, case, entry_of, offer, run_of


def matched(folder, one):
    return find(one, baseline=store.load(folder, HARDWARE), hardware=HARDWARE, folder=folder)


def given(baseline, one=None, *, environment=None, folder=Path()):
    """The gate's case of these stored runs, measured in this environment."""
    asked = {"environment": environment or {}, "hardware": HARDWARE, "folder": folder, "now": NOW}
    return gate_case(one or case(), baseline=baseline, **asked)


def test_the_same_case_on_the_same_hardware_is_found(tmp_path):
    offer(tmp_path, run_of("s0"))
    assert matched(tmp_path, case()).case == case()
    assert matched(tmp_path, case(workload="moved:Sum"))
    assert matched(tmp_path, case(backend=""))  # out of memory before anybody could say


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
    assert matched(tmp_path, case(**changes)) == reasons


def test_the_nearest_other_hardware_is_named(tmp_path):
    for name, key in (
        ("cpu-far", {"cpu_model": "Other", "cores": 64}),
        ("cpu-near", {"cpu_model": "Test CPU", "cores": 4}),
    ):
        offer(tmp_path, run_of("s0"), hardware=Hardware(platform="cpu", fingerprint=name, key=key))
    (tmp_path / "cpu" / "cpu-broken.json").write_text("{")
    told = nearest_hardware(tmp_path, HARDWARE)
    assert told == "the nearest file is of other hardware, cpu-near.json: cores 2, stored 4"
    assert nearest_hardware(tmp_path / "nowhere", HARDWARE) == ""
    assert matched(tmp_path, case()) == ("nearest stored hardware is cpu-near", "cores 2, stored 4")
    assert given(None, folder=tmp_path).refusal == "not-comparable"
    unknown = given(None, case("new"), folder=tmp_path)
    assert (unknown.refusal, unknown.reasons) == ("no-baseline", ())


def test_hardware_differences_reach_into_nested_keys():
    more = Hardware(platform="cpu", fingerprint="x", key={"cpu": {"model": "B", "cores": 2}})
    less = Hardware(platform="cpu", fingerprint="y", key={"cpu": {"model": "A", "cores": 2}})
    assert hardware_differences(more, less) == ("cpu.model B, stored A",)
    assert flattened({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


def test_an_old_baseline_is_not_used_and_a_stale_one_is_marked():
    stale = entry_of(run_of("s0", 130), run_of("s1", 90), run_of("s2", 70))
    kept, flags = usable_runs(stale, NOW)
    assert kept == stale.runs  # the reference of an epoch does not age while runs are appended
    assert flags[0].startswith("stale baseline: its newest run is 70 days old")
    told = "1 stored run not used: the newest is older than 120 days"
    assert usable_runs(entry_of(run_of("s0", 121)), NOW) == ((), (told,))
    fresh = entry_of(run_of("s0", 59))
    assert usable_runs(fresh, NOW) == (fresh.runs, ())


def test_a_case_is_compared_with_the_reference_and_told_what_differs_from_the_nearest_of_its_environments():
    old, new = {"torch": "2.12"}, {"torch": "2.13"}
    runs = [run_of(f"s{index}", 30 - index, environment=new if index % 2 else old) for index in range(12)]
    given_case = given(baseline_of(entry_of(*runs)), environment=old)
    assert given_case.stored == tuple(runs[:8])
    assert given_case.newest == tuple(runs[8:])
    assert given_case.environment_changes == ()


def test_runs_of_sessions_that_are_one_of_the_machine_stay_in_the_reference():
    minute = 1 / (24 * 60)
    runs = tuple(run_of(f"s{index:02}", 30 - 5 * index * minute, boot="b", commit="c") for index in range(12))
    entry = entry_of(*runs)
    assert set(baseline_of(entry).machine_session.values()) == {"s00"}
    given_case = given(baseline_of(entry))
    assert [run.time for run in given_case.stored] == [run.time for run in entry.reference]
    assert [run.time for run in given_case.newest] == [run.time for run in runs if run not in entry.reference]
    assert {run.session for run in (*given_case.stored, *given_case.newest)} == {"s00"}
    assert given_case.refusal is None


def test_differences_of_the_environment_are_named_up_to_a_number():
    now, then = {f"key{index}": "a" for index in range(9)}, {f"key{index}": "b" for index in range(9)}
    shown = shortened(soft_differences(now, then))
    assert len(shown) == 7
    assert shown[-1] == "and 3 more differences of the environment"
    assert soft_differences(now, now) == ()


CPU = "EPYC; sockets: 1; threads per core: 2; cores used: 2"


@pytest.mark.parametrize(
    ("now", "stored", "named", "said"),
    [
        ({"cpu": f"{CPU}; CPU quota: 1.5 cores"}, {"cpu": CPU}, "CPU quota 1.5 cores, stored none", True),
        ({"cpu": CPU}, {"cpu": f"{CPU}; CPU quota: 1.5 cores"}, "CPU quota none, stored 1.5 cores", True),
        ({"cpu": f"{CPU}; CPU quota: unknown"}, {"cpu": CPU}, "", True),
        ({"cpu": f"{CPU}; CPU quota: 2 cores"}, {"cpu": f"{CPU}; CPU quota: 2 cores"}, "", False),
        ({"governor": "powersave"}, {"governor": "performance"}, "governor powersave, stored performance", True),
        ({"driver": "535.2"}, {"driver": "535.1"}, "driver 535.2, stored 535.1", True),
        ({"variables": {"OMP_NUM_THREADS": "1"}}, {}, "variables.OMP_NUM_THREADS 1, stored absent", True),
        ({"packages": {"pytest": "9.0"}}, {"packages": {"pytest": "8.0"}}, "", True),
        ({"hostname": "a"}, {"hostname": "b"}, "", True),
        ({"tcp": "bbr"}, {"tcp": "cubic"}, "tcp bbr, stored cubic", True),
        ({"governor": "unknown"}, {"governor": "performance"}, "", True),
        (
            {"cores": {"which": "0-1", "physical": "1"}},
            {"cores": {"which": "0,2", "physical": "2"}},
            "cores.physical 1, stored 2",
            True,
        ),
        ({"cores": {"which": "4-5"}}, {"cores": {"which": "0-1"}}, "", True),
    ],
)
def test_what_can_make_a_case_slower_is_told_from_what_cannot_and_a_quota_is_named_by_itself(now, stored, named, said):
    assert causes(now, stored) == ((named,) if named else ())
    assert bool(soft_differences(now, stored)) == said
