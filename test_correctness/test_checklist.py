"""Report 004's tuning checklist, answered from results: what counts as yes, as no, and as not measured."""

import dataclasses
import json

import pytest

from perfsuite.cli import main as cli
from perfsuite.platforms import load_catalog
from perfsuite.record.result import Metric, Work
from perfsuite.reports.checklist import Facts, answers
from perfsuite.reports.tables.recording import gathered
from test_correctness.helpers.report_runs import gpt, kernel, run
from test_correctness.helpers.runs import remeasured
from test_correctness.test_tables_command import journal

LINES = 9


def told(*results, worker=(), platform="a100"):
    """Answers of every line, by a word of it."""
    facts = Facts(
        cases=gathered([run(*results)], None).cases, worker=dict(worker), device=load_catalog().models.get(platform)
    )
    every = list(answers(facts))
    assert len(every) == LINES
    words = ("library", "flash", "precision", "checkpointing", "batch", "overlaps", "network", "utilisation", "30 %")
    return dict(zip(words, every, strict=True))


def verdicts(*results, **meaning):
    return {word: answer.verdict for word, answer in told(*results, **meaning).items()}


def with_metric(result, name, value):
    kept = tuple(metric for metric in result.metrics if metric.name != name)
    return dataclasses.replace(result, metrics=(*kept, Metric(name=name, value=value, unit="", better="lower")))


def test_what_nothing_measured_names_the_command_that_would():
    for answer in told().values():
        assert (answer.verdict, answer.evidence) == ("not measured", "")
        assert answer.advice.startswith("pytest test_perf")
        assert answer.advice.endswith(" measures it")


@pytest.mark.parametrize(
    ("version", "verdict"), [("2.17.9", "no"), ("2.18", "yes"), ("2.27.5", "yes"), ("unknown", "not measured")]
)
def test_the_librarys_version_is_compared_by_number(version, verdict):
    assert told(gpt("test_ddp", 2, 1.0), worker={"nccl": version})["library"].verdict == verdict


def test_another_library_counts_its_versions_otherwise():
    answer = told(gpt("test_ddp", 2, 1.0), worker={"mccl": "2.11.4"}, platform="s4000")["library"]
    assert answer.verdict == "does not apply"
    assert answer.evidence.startswith("mccl 2.11.4")


def attending(way, time_s):
    return gpt(f"test_attention[a100-{way}]", 1, time_s, attention=way)


def test_flash_attention_counts_where_it_is_no_slower():
    assert verdicts(gpt("test_ddp", 1, 1.0))["flash"] == "not measured", "auto says nothing"
    faster = told(attending("flash", 1.0), attending("math", 2.0))["flash"]
    assert (faster.verdict, "at least 2 times" in faster.evidence) == ("yes", True)
    assert verdicts(attending("flash", 2.0), attending("math", 1.0))["flash"] == "no"
    assert verdicts(attending("flash", 1.01), attending("math", 1.0))["flash"] == "yes", "within the noise"


def in_dtype(dtype, time_s):
    return gpt(f"test_it[a100-{dtype}]", 1, time_s, dtype=dtype)


def test_mixed_precision_is_judged_by_what_it_gains():
    assert verdicts(in_dtype("fp32", 1.0))["precision"] == "no"
    answer = told(in_dtype("fp32", 1.0), in_dtype("bf16", 0.5))["precision"]
    assert answer.verdict == "yes"
    assert "1 of 2 training cases" in answer.evidence
    assert "bf16 has 2 times the samples/s of fp32" in answer.evidence
    assert verdicts(in_dtype("fp32", 0.5), in_dtype("bf16", 1.0))["precision"] == "no"


def test_checkpointing_says_what_it_saves_and_costs():
    def case(way, time_s, peak_gib):
        return with_metric(gpt(f"test_it[a100-{way}]", 1, time_s, checkpointing=way), "peak_gib", peak_gib)

    answer = told(case("none", 1.0, 8.0), case("full", 1.25, 2.0))["checkpointing"]
    assert answer.verdict == "yes"
    assert "full: 0.25 of the peak memory and 0.8 times the samples/s" in answer.evidence


def searched(largest, **setup):
    found = dataclasses.replace(gpt("test_largest", 1, 1.0, **setup), workload="perfsuite.workloads.x:LargestBatch")
    return with_metric(found, "largest_local_batch_samples", float(largest))


@pytest.mark.parametrize(
    ("largest", "micro", "verdict", "says"),
    [
        (800, 600, "yes", "600 of 800 samples that fit; at least 50% asked for; largest global batch 614,400 tokens"),
        (8, 6, "no", "largest global batch 6,144 tokens (test_ddp[gpt2-xl]), 500,000 to 4,000,000 asked for"),
        (6400, 600, "no", "600 of 6400 samples that fit"),
    ],
)
def test_the_batch_is_compared_with_the_largest_that_fits_and_with_the_reports_range(largest, micro, verdict, says):
    answer = told(searched(largest), gpt("test_ddp", 1, 1.0, micro_batch_size=micro))["batch"]
    assert (answer.verdict, says in answer.evidence) == (verdict, True)


def test_a_search_says_nothing_of_another_set_up():
    answer = told(searched(8), gpt("test_fsdp", 1, 1.0, micro_batch_size=6, strategy="fsdp"))["batch"]
    assert answer.verdict == "not measured"
    assert answer.advice.endswith("measures it")


def test_of_several_searches_the_one_farthest_from_its_batch_counts():
    far = searched(6400, dtype="bf16")
    ran = [gpt(f"test_{dtype}", 1, 1.0, micro_batch_size=600, dtype=dtype) for dtype in ("fp32", "bf16")]
    assert verdicts(searched(800, dtype="fp32"), far, *ran)["batch"] == "no"


def test_a_batch_above_the_budget_of_the_search_decides_nothing():
    answer = told(searched(4), gpt("test_ddp", 1, 1.0, micro_batch_size=6))["batch"]
    assert answer.verdict == "not measured"
    assert "6 samples ran, 4 fit the budget of the search" in answer.evidence


def test_overlap_is_judged_beside_the_case_without_it():
    def case(overlap, time_s):
        return gpt(f"test_overlap[a100-{overlap}]", 2, time_s, options={"overlap": overlap})

    assert verdicts(case(True, 1.0))["overlaps"] == "not measured"
    assert verdicts(case(True, 1.0), case(False, 1.5))["overlaps"] == "yes"
    assert verdicts(case(True, 1.5), case(False, 1.0))["overlaps"] == "no"


@pytest.mark.parametrize(("busbw", "verdict"), [(150.0, "yes"), (40.0, "no")])
def test_the_network_is_that_between_hosts(busbw, verdict):
    work = Work(collective="all_reduce", message_bytes=2.0**30)
    one = kernel("test_all_reduce", "AllReduce", 8, {"message_bytes": 2**30}, work, busbw_gb_per_s=280.0)
    within = told(one)["network"]
    assert within.verdict == "not measured", "ranks of one host say nothing of the network"
    assert within.evidence.startswith("within one host alone: 280 GB/s")
    two = kernel("test_all_reduce", "AllReduce", 16, {"message_bytes": 2**30}, work, busbw_gb_per_s=busbw)
    ranks = tuple(dataclasses.replace(rank, host=f"node{rank.rank // 8}") for rank in two.measurement.ranks)
    answer = told(one, remeasured(two, ranks=ranks))["network"]
    assert (answer.verdict, answer.evidence.startswith("between 2 hosts: ")) == (verdict, True)
    assert "GB/s of a node's network" in answer.evidence


def test_utilisation_and_communication_are_those_of_the_worst_case():
    busy = with_metric(gpt("test_ddp", 2, 1.0), "device_utilisation_percent", 97.0)
    idle = with_metric(gpt("test_fsdp", 4, 1.0), "device_utilisation_percent", 60.0)
    assert verdicts(busy)["utilisation"] == "yes"
    answer = told(busy, idle)["utilisation"]
    assert (answer.verdict, answer.evidence[:16]) == ("no", "60 % utilisation")
    talks = with_metric(gpt("test_ddp", 2, 1.0), "exposed_communication_percent", 45.0)
    calm = with_metric(gpt("test_fsdp", 4, 1.0), "exposed_communication_percent", 12.0)
    assert verdicts(calm)["30 %"] == "yes"
    answer = told(calm, talks)["30 %"]
    assert answer.verdict == "no"
    assert "1 of 2 cases within 30 %" in answer.evidence


def test_the_command_prints_every_line_with_its_mark(tmp_path, capsys):
    file = journal(tmp_path / "j.jsonl", in_dtype("fp32", 1.0), in_dtype("bf16", 0.5), platform="a100")
    assert cli.main(["checklist", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tuning checklist for a100 (a100-test)"
    assert sum(line.startswith(("[x] ", "[ ] ", "[?] ", "[-] ")) for line in lines) == LINES
    assert "[x] mixed precision is on: yes" in lines
    assert cli.main(["checklist", str(file), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [answer["verdict"] for answer in plain if "precision" in answer["line"]] == ["yes"]
