"""Workloads and parameters that were renamed: stored runs and old journals still match the cases of today."""

from __future__ import annotations

import dataclasses
import importlib
import json

import pytest

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware
from perfsuite.baselines.encode import encode
from perfsuite.baselines.renames import (
    RENAMES,
    Rename,
    baseline_of_today,
    case_of_today,
    names_of_today,
    result_of_today,
)
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.baselines.text import dump
from perfsuite.cli import main as cli
from perfsuite.journal import Header, read_journal
from perfsuite.journal_writer import JournalWriter
from perfsuite.records import Result, Work
from perfsuite.runtime.reference import describe
from perfsuite.runtime.values import recorded
from perfsuite.workload import Workload
from perfsuite.workloads.training.train_step import TrainStep

HARDWARE = Hardware(platform="cpu", fingerprint="cpu-test", key={"cores": 2})
OLD = "perfsuite.workloads.train_step:TrainStep"
NODE = "test_perf/test_train_step.py::test_dit[cpu-ws2-ddp]"
PIPELINE = next(rename for rename in RENAMES if rename.old.endswith(":PipelineStep"))
"""A workload that became a choice of another one."""
KEPT = {
    "mesh": "pp2-dp2",
    "model": "gpt2",
    "overrides": {"layers": 4},
    "micro_batch_size": None,
    "global_batch_size": 16,
    "dtype": "bf16",
    "learning_rate": 1e-4,
    "seed": 0,
    "builds": ["memory"],
}


def run_of(session):
    return RunSummary(session=session, time=f"2026-01-0{session}T00:00:00+00:00", quantiles_s=(1.0,) * 5, samples=40)


def entry_of(workload, parameters, *sessions):
    case = CaseIdentity(node=NODE, world_size=2, backend="gloo", parameters=parameters, workload=workload)
    return Entry(case=case, runs=tuple(map(run_of, sessions)))


def baseline_of(*entries):
    return Baseline(hardware=HARDWARE, entries={entry.case.key: entry for entry in entries})


def final_names():
    return sorted({names_of_today(rename.old, {})[0] for rename in RENAMES})


@pytest.mark.parametrize("name", final_names())
def test_a_renamed_workload_ends_at_one_that_there_is_with_the_parameters_that_it_has(name):
    module, _, attribute = name.partition(":")
    workload = getattr(importlib.import_module(module), attribute)
    assert issubclass(workload, Workload)
    fields = {field.name for field in dataclasses.fields(workload)}
    added = {target.partition(".")[0] for rename in RENAMES if rename.new == name for target in rename.added}
    assert added <= fields


@pytest.mark.parametrize("rename", RENAMES, ids=lambda rename: rename.old)
def test_what_a_row_adds_is_plain_json(rename):
    assert json.loads(json.dumps(dict(rename.added))) == dict(rename.added)


@pytest.mark.parametrize(
    ("stages_per_rank", "options"),
    [(None, {"schedule": "1f1b"}), (2, {"schedule": "1f1b", "stages_per_rank": 2})],
)
def test_a_workload_that_became_a_choice_of_another_one(stages_per_rank, options):
    stored = {**KEPT, "schedule": "1f1b", "num_micro_batches": 8, "stages_per_rank": stages_per_rank}
    name, parameters = names_of_today("perfsuite.workloads.pipeline_step:PipelineStep", stored)
    assert name == PIPELINE.new
    added = {target: value for rename in RENAMES if rename.new == name for target, value in rename.added.items()}
    assert parameters == {**KEPT, **added, "accumulation": 8, "options": options}
    assert names_of_today(name, parameters) == (name, parameters), "renamed twice is renamed once"


def test_a_parameter_that_a_workload_gained_stands_for_its_default_where_it_is_not_stored():
    gained = Rename(old="m:W", new="m:W", added={"options.overlap": True, "compiled": False})
    assert names_of_today("m:W", {"size": 1}, [gained]) == (
        "m:W",
        {"size": 1, "compiled": False, "options": {"overlap": True}},
    )
    given = {"size": 1, "compiled": True, "options": {"overlap": False, "stage": 2}}
    assert names_of_today("m:W", given, [gained]) == ("m:W", given)
    assert names_of_today("m:Other", {"size": 1}, [gained]) == ("m:Other", {"size": 1})


def test_rows_follow_each_other_from_the_oldest():
    first = Rename(old="m:A", new="m:B", moved={"size": "size_bytes"})
    second = Rename(old="m:B", new="m:C", moved={"size_bytes": "message_bytes"}, added={"dtype": "fp32"})
    assert names_of_today("m:A", {"size": 1}, [first, second]) == ("m:C", {"message_bytes": 1, "dtype": "fp32"})


def test_a_stored_case_is_todays_case_and_a_result_likewise():
    stored = entry_of("m:A", {"size": 1}, "1").case
    renames = [Rename(old="m:A", new="m:B", moved={"size": "message_bytes"})]
    today = dataclasses.replace(stored, workload="m:B", parameters={"message_bytes": 1})
    assert today.differences(case_of_today(stored, renames)) == ()
    result = Result(
        case=NODE,
        workload="m:A",
        parameters={"size": 1},
        platform="cpu",
        world_size=2,
        outcome="out_of_memory",
        work=Work(),
    )
    renamed = result_of_today(result, renames)
    assert (renamed.workload, renamed.parameters) == ("m:B", {"message_bytes": 1})


def test_a_case_stored_under_both_names_becomes_one_with_all_runs():
    renames = [Rename(old="m:A", new="m:B", added={"dtype": "fp32"})]
    both = baseline_of(entry_of("m:A", {"size": 1}, "1", "3"), entry_of("m:B", {"size": 1, "dtype": "fp32"}, "2"))
    renamed, said = baseline_of_today(both, renames)
    (entry,) = renamed.entries.values()
    assert [run.session for run in entry.runs] == ["1", "2", "3"]
    assert said == (f'{NODE}: m:A is m:B; now dtype="fp32"',)


# -- files and journals ----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cpu" / "cpu-test.json"
    path.parent.mkdir()
    path.write_text(dump(encode(baseline_of(entry_of(OLD, {"model": "dit"}, "1")))))
    return path


def test_a_file_is_read_in_the_names_of_today_and_stays_as_it_is(file):
    before = file.read_bytes()
    (entry,) = store.read(file).entries.values()
    assert entry.case.workload == names_of_today(OLD, {})[0]
    assert file.read_bytes() == before


def test_the_command_writes_the_names_of_today_and_says_what_it_renamed(file, capsys):
    before = file.read_bytes()
    assert cli.main(["baselines", "rename", str(file), "--dry-run"]) == 0
    assert f"{file}: 1 case would be renamed\n  {NODE}: {OLD} is " in capsys.readouterr().out
    assert file.read_bytes() == before
    assert cli.main(["baselines", "rename", str(file.parent)]) == 0
    assert f"{file}: 1 case renamed\n" in capsys.readouterr().out
    assert f'"workload":"{names_of_today(OLD, {})[0]}"' in file.read_text()
    renamed = file.read_bytes()
    assert cli.main(["baselines", "rename", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 0 cases renamed\n"
    assert file.read_bytes() == renamed


def test_an_old_journal_is_read_in_the_names_of_today(tmp_path):
    writer = JournalWriter(
        tmp_path / "old.jsonl", Header(session="s", fingerprint="f", platform="cpu", started_at="2026-01-01T00:00:00")
    )
    old = Result(
        case=NODE,
        workload=OLD,
        parameters={"model": "dit"},
        platform="cpu",
        world_size=2,
        outcome="out_of_memory",
        work=Work(),
    )
    writer.result(old)
    writer.close()
    assert read_journal(writer.path).results == {NODE: result_of_today(old)}
    assert result_of_today(old) != old


def test_a_stored_pipeline_is_the_training_step_that_runs_today():
    old = {**KEPT, "schedule": "zbv", "stages_per_rank": 2, "num_micro_batches": 8}
    options = {"schedule": "zbv", "stages_per_rank": 2}
    today = TrainStep(strategy="hybrid", options=options, accumulation=8, **{**KEPT, "builds": ("memory",)})
    assert names_of_today(PIPELINE.old, old) == (describe(today), recorded(today.parameters()))
