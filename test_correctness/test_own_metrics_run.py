"""Metrics of one's own from the record of a rank to the verdict, as a user meets them."""

import dataclasses
import json
import random
from xml.etree import ElementTree

import pytest
import torch

from perfsuite.base.errors import InvalidParameter
from perfsuite.cli import main as cli
from perfsuite.record.own_metrics import OwnMetric
from perfsuite.record.result import Record
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Job
from perfsuite.runtime.ranks.rank import RecordKeeper
from perfsuite.workloads.matmul import Matmul
from test_correctness.helpers import steps
from test_correctness.helpers.local_driver import local_driver
from test_correctness.helpers.scripted_driver import measurement, repository

TESTS = """
def test_own(perf):
    perf(step)
"""
MEMORY = OwnMetric(name="memory", unit="GiB", better="lower")
BANDWIDTH = OwnMetric(name="bandwidth", unit="GB/s", better="higher")


def step(rank):
    """Stands for a function of a user."""


def keeper(*known, workload=None):
    return RecordKeeper(workload or FunctionWorkload(function=step), known)


def kept(given, values, *, warm=(), known=()):
    """The number that is read after these values."""
    records = keeper(*known)
    for timed, some in ((False, warm), (True, values)):
        for value in some:
            records.keep("a", value, given, timed=timed)
    return records.read()["a"][0]


@pytest.mark.parametrize(("over", "expected"), [("last", 2.0), ("mean", 3.0), ("max", 4.0), ("min", 2.0), ("sum", 9.0)])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_timed_iterations_are_combined_and_the_warm_up_is_not(over, expected, kind):
    values = [kind(value) for value in (3.0, 4.0, 2.0)]
    assert expected == kept({"over": over}, values, warm=[kind(100.0), kind(0.0)])


def test_a_tensor_that_the_next_iteration_overwrites_is_not_taken_twice():
    records, buffer = keeper(), torch.zeros(())
    for value in (5.0, 1.0):
        buffer.fill_(value)
        records.keep("a", buffer, {"over": "sum"}, timed=True)
    assert records.read()["a"][0] == 6.0


@pytest.mark.parametrize(("over", "expected"), [("sum", 1000.0), ("mean", 1.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool])
def test_tensors_of_a_narrow_dtype_are_summed_exactly(over, expected, dtype):
    assert expected == kept({"over": over}, [torch.ones((), dtype=dtype)] * 1000)


def test_a_build_that_is_never_timed_has_its_values():
    assert kept({"over": "max"}, [], warm=[3.0, 7.0]) == 7.0


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("12 GiB", "the text '12 GiB'"),
        ("12", "the text '12'"),
        (None, "None of type NoneType"),
        ([1.0], "[1.0] of type list"),
        (1j, "1j of type complex"),
        (torch.zeros(2), "a tensor of 2 elements"),
        (torch.zeros((), dtype=torch.complex64), "a complex tensor"),
    ],
)
def test_what_is_not_one_number_is_refused_where_it_is_recorded(value, told):
    with pytest.raises(InvalidParameter) as refused:
        keeper().keep("a", value, {}, timed=True)
    assert told in str(refused.value)


def test_a_record_says_what_is_registered_or_nothing():
    assert {"unit": "GiB", "better": "lower"}.items() <= read_meaning({}, MEMORY).items()
    assert read_meaning({"unit": "GiB"}, MEMORY)["better"] == "lower"
    with pytest.raises(InvalidParameter, match="recorded with unit='MB', but its registration has it with unit='GiB'"):
        read_meaning({"unit": "MB"}, MEMORY)
    with pytest.raises(InvalidParameter, match="recorded with direction; a record may have better, exact"):
        read_meaning({"direction": "lower"})


def read_meaning(given, *known):
    records = keeper(*known)
    records.keep("memory", 1.0, given, timed=True)
    return records.read()["memory"][3]


def test_a_metric_of_perfsuite_s_that_the_case_does_not_have_may_be_recorded():
    records = keeper()
    records.keep("tokens_per_s", 12.0, {}, timed=True)
    assert {"unit": "tokens/s", "better": "higher"}.items() <= records.read()["tokens_per_s"][3].items()
    with pytest.raises(InvalidParameter, match="but perfsuite has it with unit='tokens/s'"):
        keeper().keep("tokens_per_s", 1.0, {"unit": "tok/s"}, timed=True)
    with pytest.raises(InvalidParameter, match=r"perfsuite derives .* for this case"):
        keeper().keep("latency_us", 1.0, {"better": "lower"}, timed=True)


def test_numbers_of_perfsuite_s_own_workloads_are_no_metrics():
    records = keeper(workload=Matmul(m=8, n=8, k=8, dtype="fp32"))
    records.keep("loss", 1.0, {"reduce": "mean"}, timed=True, users=False)
    assert records.read()["loss"] == (1.0, "", "mean", None)


def test_one_name_has_one_meaning():
    records = keeper()
    records.keep("a", 1.0, {"unit": "GiB"}, timed=True)
    with pytest.raises(InvalidParameter, match="a was recorded in two ways"):
        records.keep("a", 1.0, {"unit": "MiB"}, timed=True)


def test_a_metric_that_is_said_in_two_ways_keeps_what_was_recorded():
    records = keeper(OwnMetric(name="bandwidth", unit="GB/s", better="higher", over="sum"))
    for given in ({}, {"unit": "GB/s"}, {}, {"better": "higher"}):
        records.keep("bandwidth", 1.0, given, timed=True)
    assert 4.0 == records.read()["bandwidth"][0]


class Machine:
    """A case of 10 ms whose memory and bandwidth a test changes; both scatter by half a per cent."""

    def __init__(self):
        self.draw = random.Random(3)
        self.values = {MEMORY: 2.1, BANDWIDTH: 40.1}

    def record(self, metric):
        value = self.values[metric] * self.draw.gauss(1, 0.005)
        return Record(name=metric.name, value=value, unit=metric.unit, reduce=metric.reduce, metric=metric)

    def __call__(self, job):
        time_s = 0.01 * self.draw.gauss(1, 0.003)
        records = tuple(map(self.record, self.values))
        times = [time_s * self.draw.gauss(1, 0.002) for _ in range(30)]
        return measurement(job, times, records=records)


@pytest.mark.extended
def test_more_memory_and_less_bandwidth_fail_the_gate_and_are_everywhere(pytester, monkeypatch, capsys):
    own_machine = Machine()
    own_repo = repository(pytester, monkeypatch, TESTS, own_machine)
    for _ in range(6):
        own_repo.run("--perf-update=append").stdout.fnmatch_lines(["*1 run of 1 case added"])
    own_repo.run("--perf-gate").assert_outcomes(passed=1)
    own_machine.values[MEMORY] *= 1.12
    found = own_repo.run("--perf-gate")
    assert found.ret == 1
    found.stdout.fnmatch_lines(["REGRESSED memory 2.* GiB, +1*"])
    own_machine.values[MEMORY] /= 1.12
    own_machine.values[BANDWIDTH] *= 0.75
    files = ("--junitxml=j.xml", "--benchmark-json=b.json", "--perf-journal=j.jsonl", "--perf-history=h.jsonl")
    found = own_repo.run("--perf-gate", *files)
    assert found.ret == 1
    found.stdout.fnmatch_lines(["REGRESSED bandwidth 40.* GB/s, -2*"])
    found.stdout.fnmatch_lines(["*bandwidth*", "*GB/s*"])  # the columns of the table
    named = {each.get("name") for each in ElementTree.parse("j.xml").iter("property")}
    assert {"memory", "bandwidth"} <= named
    (stored,) = json.loads(pytester.path.joinpath("b.json").read_text())["benchmarks"]
    assert {"memory", "bandwidth"} <= set(stored["extra_info"])
    for source in ("j.jsonl", "h.jsonl", str(*pytester.path.glob("baselines/cpu/*.json"))):
        capsys.readouterr()
        assert cli.main(["export", "--format", "csv", source]) == 0
        rows = capsys.readouterr().out
        assert "bandwidth," in rows
        assert ",GB/s,higher," in rows
    assert cli.main(["show", "--case", "test_own", "j.jsonl"]) == 0
    assert "GB/s" in capsys.readouterr().out
    assert cli.main(["history", "show", "h.jsonl"]) == 0
    assert "GB/s, +0 %, between" in capsys.readouterr().out
    refused = own_repo.run("--perf-update=append", "--perf-gate")
    refused.stdout.fnmatch_lines(["*REGRESSED bandwidth*"])


def test_a_wrong_registration_ends_the_run_before_it_measures(pytester, monkeypatch):
    registers = "def pytest_perfsuite_metrics():\n    return ['memory']\n"
    repo = repository(pytester, monkeypatch, TESTS, conftest=registers)
    repo.refuses(says="*pytest_perfsuite_metrics returned 'memory'; return a list of perfsuite.OwnMetric*")


def test_the_ranks_know_what_is_registered(tmp_path):
    """Registered units, combined over real ranks and timed iterations; a contradiction fails with the line's reason."""
    budget = Budget(max_time_s=0.05, warmup_time_s=0.01, min_rounds=3)

    def job(**arguments):
        workload = FunctionWorkload(function=steps.own_numbers, arguments=arguments)
        return Job(workload=workload, world_size=2, budget=budget)

    with local_driver(tmp_path) as driver:
        driver._metrics = lambda: [dataclasses.replace(MEMORY, reduce="sum")]
        found = {record.name: record for record in driver.run(job()).records}
        assert (found["memory"].value, found["memory"].unit) == (3.0, "GiB")
        assert (found["seen"].value, found["seen"].metric.over) == (7.0, "min")  # nothing of the warm-up, which has 0
        with pytest.raises(InvalidParameter, match="recorded with unit='MB', but its registration"):
            driver.run(job(unit="MB"))
