"""--perf-project: cases that cannot run here carry a projection, and nothing takes it for a result."""

import dataclasses
import json
import re

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.cli import main as cli
from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.figures import metrics_of, projected
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.step import project
from perfsuite.record.codec import from_json, to_json
from perfsuite.record.journal import read_journal
from perfsuite.record.result import Metric, Peaks
from perfsuite.record.run import Projected
from perfsuite.reports.projected import as_json, beside, projected_grids
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.report_runs import rows, run, style, trained
from test_correctness.helpers.scripted_driver import repository

CASES = """
from perfsuite import workloads

def test_step(perf):
    perf(workloads.TrainStep(model="gpt2-tiny", strategy="ddp"), on=2)

def test_kernel(perf):
    perf(workloads.Matmul(m=256, k=256, n=256, dtype="bf16"))

@world_sizes(16)
def test_wide(perf, ranks):
    perf(workloads.TrainStep(model="gpt2-tiny", strategy="ddp"), on=ranks)
"""
CASE = "test_perf/test_it.py::test_it[s4000-ws8-opensora]"
OPENSORA = {"model": "opensora", "strategy": "fsdp", "options": {"reshard": False}, "dtype": "bf16"}


def test_absent_platform_stays_skipped_and_is_projected(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, CASES)
    result = repo.run(
        *("-k", "s4000", "--perf-journal=j.jsonl", "--benchmark-json=b.json", "--perf-summary=s.md", "-rs"),
        "--perf-project",
    )
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(
        [
            "*MTT S4000 not found*",
            "projected: estimated figures, none of them measured",
            "case*measured*projected*80 % band*published*",
            "test_step?s4000?*step_time_s*",
            "  1 case not projected: only training steps are projected*",
        ]
    )
    assert repo.driver.timed() == []
    journal = read_journal(pytester.path / "j.jsonl")
    assert {} == journal.results
    step = next(one for case, one in journal.projections.items() if "test_step" in case)
    assert ("projected", 2, "ddp", True) == (
        step.kind,
        step.world_size,
        step.training.strategy,
        "not found" in step.not_measured,
    )
    assert step.low_s < step.step_time_s < step.high_s
    rows = [line.split()[:4] for line in (pytester.path / "s.md").read_text().splitlines()]
    assert ["|", "test_step[s4000]", "|", "step_time_s"] in rows


def test_without_the_option_nothing_is_begun_or_projected(pytester, monkeypatch):
    result = repository(pytester, monkeypatch, CASES).run("-k", "s4000")
    result.assert_outcomes(skipped=3)
    result.stdout.no_fnmatch_line("projected: *")


def test_a_journal_of_projections_alone_prints_the_tables(pytester, monkeypatch, capsys):
    """By --perf-report, and later by report and show; each projected row says that it is one."""
    repo = repository(pytester, monkeypatch, CASES)
    repo.run("-k", "s4000", "--perf-journal=j.jsonl", "--perf-report=r.md", "--perf-project").assert_outcomes(skipped=3)
    assert cli.main(["report", str(pytester.path / "j.jsonl")]) == 0
    for text in ((pytester.path / "r.md").read_text(), capsys.readouterr().out):
        told = {row["nodes x ranks"]: row for row in rows(text, "Data parallel, DDP: gpt2-tiny")}
        assert {"projected: 2 s4000", "projected: 16 s4000"} <= set(told)
        row = told["projected: 16 s4000"]
        assert float(row["samples/s (all devices)"]) > float(told["projected: 2 s4000"]["samples/s (all devices)"])
        assert re.fullmatch(r"projected; step .*s to .*s in the 80 % band", row["not measured because"])
        assert "0 measured cases on cpu" in text
        assert "- projected, 1 case not projected: only training steps are projected" in text
    assert cli.main(["show", str(pytester.path / "j.jsonl"), "--show=tables"]) == 0
    shown = capsys.readouterr().out
    assert "projected: estimated figures, none of them measured" in shown
    assert "test_step[s4000]" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [("nothing.json", "is not a file"), ("test_it.py", "truncated or damaged"), ("other.json", "no calibration")],
)
def test_wrong_calibration_ends_the_run_at_once(pytester, monkeypatch, given, said):
    repo = repository(pytester, monkeypatch, CASES)
    (pytester.path / "other.json").write_text("{}")
    result = repo.run("-k", "s4000", f"--perf-project={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--perf-project: *{said}*"])


def test_a_software_is_projected_by_its_constants(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, CASES.replace('strategy="ddp"', 'strategy="ddp", dtype="bf16"'))
    repo.run("-k", "s4000", "--perf-journal=j.jsonl", "--perf-project=nemo").assert_outcomes(skipped=3)
    records = read_journal(pytester.path / "j.jsonl").projections
    step = next(one for case, one in records.items() if "test_wide" in case)
    assert "under nemo, constants fitted to 38 steps" in step.calibration
    assert step.regime.startswith("software, another device")
    result = repo.run("-k", "s4000", "--perf-project=nemmo")
    result.stderr.fnmatch_lines(["*--perf-project: nemmo is not a file and not a software; did you mean nemo?*"])


# -- the record and its tables -----------------------------------------------------------------------------------


@pytest.fixture
def record():
    device = load_catalog().find("s4000")
    work = TrainStep(**OPENSORA).work(MeshShape.of(dp=8))
    projection = project(TrainingJob.of(work.training, device), Calibration.from_platform(device))
    one = projected(CASE, projection, work, Peaks(tflops=device.tflops))
    return dataclasses.replace(one, parameters=to_json(TrainStep(**OPENSORA).parameters()))


def test_record_is_read_again_and_says_what_it_is(record):
    plain = json.loads(json.dumps(to_json(record)))
    assert "projected" == plain["kind"]
    assert record == from_json(Projected, plain)


def test_metrics_follow_from_the_step_as_measured_ones_do(record):
    work = TrainStep(**OPENSORA).work(MeshShape.of(dp=8))
    values = {metric.name: metric.value for metric in metrics_of(2.0, 8, work, Peaks())}
    assert (2.0, work.samples / 2) == (values["step_time_s"], values["samples_per_s"])
    assert work.tokens / 2 / 8 == values["tokens_per_s_per_device"]
    assert "mfu_percent" not in values
    assert record.value("mfu_percent") is not None


def test_measured_projected_and_published_stand_under_one_case(record):
    record = dataclasses.replace(
        record,
        step_time_s=4.0,
        low_s=3.0,
        high_s=5.0,
        metrics=(Metric(name="step_time_s", value=4.0, unit="s", better="lower"),),
    )
    result = trained(CASE.partition("::")[2], 8, 2.0, **OPENSORA)
    rows = beside({CASE: record}, {CASE: result})
    assert {2.0} == {row.measured for row in rows}
    assert 3.95 in {row.published for row in rows}
    row = next(row for row in as_json({CASE: record}, {CASE: result}) if row["published"] == 3.95)
    assert (2.0, pytest.approx(4 / 3.95), "projected") == (
        row["projected_to_measured"],
        row["projected_to_published"],
        row["kind"],
    )
    (grid,) = projected_grids({CASE: record}, {CASE: result})
    assert ("3 s to 5 s", "3.95 s [M?]", "2.00", "1.01") in [row[4:8] for row in grid.rows]


def test_a_row_is_measured_or_projected(record):
    """What another file measured is not shown as projected too, and a ratio is of one kind of rows."""
    one = dataclasses.replace(record, workload="m:TrainStep", parameters=to_json(TrainStep(**OPENSORA).parameters()))
    projections = run(platform="s4000", projections={CASE: one})
    shown = [row["nodes x ranks"] for row in rows(style("opensora", projections), "Overview")]
    assert [name for name in shown if not name.startswith("published")] == ["projected: 8 s4000"]
    result = trained(CASE.partition("::")[2], 8, 2.0, **OPENSORA)
    shown = [row["nodes x ranks"] for row in rows(style("opensora", projections, run(result)), "Overview")]
    assert [name for name in shown if not name.startswith("published")] == ["1 x 8 s4000"]


def test_the_memory_of_a_projection_stands_under_its_peak(record):
    one = dataclasses.replace(record, workload="m:TrainStep", parameters=to_json(TrainStep(**OPENSORA).parameters()))
    text = style("opensora", run(platform="s4000", projections={CASE: one}))
    (row,) = (row for row in rows(text, "Memory per device") if row["nodes x ranks"] == "projected: 8 s4000")
    assert float(row["peak GiB"]) == pytest.approx(record.memory_bytes / 2**30, rel=1e-3)
    assert row["weights GiB"] == ""


def test_rates_are_high_where_times_are_low(record):
    (row,) = (row for row in beside({CASE: record}, {}) if row.metric == "samples_per_s")
    assert row.low < row.projected < row.high
    assert pytest.approx(8 / record.high_s) == row.low


def test_lower_bound_of_time_is_an_upper_one_of_rates(record):
    bound = dataclasses.replace(record, lower_bound=True)
    (grid,) = projected_grids({CASE: bound}, {})
    signs = {row[1]: row[3][:2] for row in grid.rows}
    assert (signs["step_time_s"], signs["samples_per_s"]) == (">=", "<=")
    assert [] == projected_grids({}, {})
