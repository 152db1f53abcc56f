"""Acceptance on simulated devices: a slow device, a slow link and a missing device are named, and nobody else."""

import dataclasses
import json

import pytest

from perfsuite.fleet.rule import slow_links
from perfsuite.plugin.expecting import slow_members
from perfsuite.run.session import Case
from perfsuite.workloads.memory_bandwidth import MemoryTriad
from perfsuite.workloads.pair_rounds import PairRounds
from simmusa.costs import S4000, VARIABLE
from test_correctness.helpers.command_line import as_json, run
from test_correctness.helpers.processes import run_python
from test_correctness.helpers.simmusa_ranks import FAMILY, KERNELS, QUICK, ROOT, opened, require_built

ONE_SLOW_DEVICE = {"device 3": 1.1}
ONE_SLOW_LINK = {"mccl::link 1 to 2": 2.5}


def measured(tmp_path, workload, ranks, slow):
    """The result of a workload on devices of which some, or a link, are slower."""
    require_built()
    with opened(dataclasses.replace(S4000, slow=slow, memory_bytes=1 << 30), tmp_path, KERNELS) as session:
        case = Case(id="test_it[s4000]", workload=workload, world_size=ranks, budget=QUICK, platform="s4000")
        return session.run(case)


NOTHING_SLOW = pytest.param({}, [], marks=pytest.mark.slow)


@pytest.mark.extended
@pytest.mark.parametrize(("slow", "named"), [NOTHING_SLOW, (ONE_SLOW_DEVICE, ["musa:3"])])
def test_one_of_eight_devices_is_named(tmp_path, slow, named):
    found = slow_members(measured(tmp_path, MemoryTriad(buffer_bytes=16 << 20), 8, slow))
    assert named == list(found)
    assert all(9 < float(sentence.split()[2]) < 10 for sentence in found.values())


@pytest.mark.extended
@pytest.mark.parametrize(("slow", "named"), [({}, []), (ONE_SLOW_LINK, [(1, 2)])])
def test_a_suspected_link_is_tried_again_and_named(tmp_path, slow, named):
    result = measured(tmp_path, PairRounds(message_bytes=1 << 20, rounds="all"), 6, slow)
    assert len(named) == len(result.measurement.records)
    found = slow_links(result)
    assert [tuple(f"{result.measurement.ranks[0].host} musa:{rank}" for rank in pair) for pair in named] == [
        link.ends for link in found
    ]
    assert all(link.slower == link.again > 1.0 for link in found)  # no time is by chance


# -- the commands ------------------------------------------------------------------------------------------------


def acceptance(tmp_path, *arguments, devices=8, slow=None):
    """The acceptance run on simulated devices; returns its exit code, what it printed, and its journal."""
    require_built()
    journal = tmp_path / "journal.jsonl"
    suite = ["-m", "pytest", "test_perf", "-m", "acceptance", "-p", "no:cacheprovider", "--perf-platform=simmusa"]
    expect = ["--perf-expect", "--perf-allow-unjudged", "--benchmark-min-rounds=3", f"--perf-journal={journal}"]
    simulated = {"PERFSUITE_FAMILIES": FAMILY, "SIMMUSA_DEVICES": str(devices)}
    simulated[VARIABLE] = json.dumps({"slow": slow or {}})
    done = run_python(*suite, *expect, *arguments, cwd=ROOT, timeout_s=600, **simulated)
    return done.returncode, done.stdout, journal


@pytest.mark.slow
def test_a_slow_device_fails_the_acceptance_run_and_the_fleet(tmp_path, capsys):
    code, said, journal = acceptance(tmp_path, "-k", "memory_everywhere", "--perf-world-sizes=8", slow=ONE_SLOW_DEVICE)
    assert 1 == code
    assert ["SLOW: musa:3 takes 9.88 % longer in all of 4 runs:"] == [
        line.strip() for line in said.splitlines() if line.strip().startswith("SLOW: ")
    ]
    (node,) = as_json(capsys, "fleet", journal, code=1)["nodes"].values()
    assert ["musa:3"] == [slow["device"] for slow in node["slow"]]


@pytest.mark.slow
def test_a_slow_link_fails_the_acceptance_run(tmp_path):
    selected = ("-k", "pair_bandwidth and one or pair_rounds", "--perf-world-sizes=4", "--perf-expect-devices=4")
    code, said, _ = acceptance(tmp_path, *selected, devices=4, slow=ONE_SLOW_LINK)
    assert 1 == code
    slow = " ".join(said.split()).split("SLOW: ")[1:]
    assert 2 == len(slow)
    assert slow[0].startswith("musa:1 to musa:2 (within the host): 2.50 times slower than its like")
    assert "musa:1 - " in slow[1]
    assert "musa:2 takes 150 % longer" in slow[1]


@pytest.mark.slow
def test_a_missing_device_fails_the_acceptance_run_and_nothing_is_slow(tmp_path, capsys):
    code, said, journal = acceptance(tmp_path, "-k", "memory_everywhere", "--perf-world-sizes=7", devices=7)
    assert 1 == code
    assert "FAIL: 7 of 8 devices" in said
    assert "SLOW" not in said
    (node,) = json.loads(run(capsys, "fleet", journal, "--json")[1])["nodes"].values()
    assert ("pass", []) == (node["standing"], node["slow"])
