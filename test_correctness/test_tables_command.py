"""``perfsuite report`` on real journals and baseline files, and ``--perf-report`` at the end of a run."""

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import pytest

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Hardware
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.cli import main as cli
from perfsuite.plugin.options import STYLE_NAMES
from perfsuite.record.journal import read_journal
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.run import Header
from perfsuite.reports.tables.report import STYLES
from test_correctness.helpers.report_runs import latte, measurement, rows, section, table
from test_correctness.helpers.scripted_driver import repository

ROOT = Path(__file__).parent.parent


def journal(path, *results, platform="s4000", failures=(), skips=()):
    header = Header(session="s", fingerprint=f"{platform}-test", platform=platform, started_at="2025-11-21T00:00:00")
    writer = JournalWriter(path, header)
    for result in results:
        writer.result(result)
    for case, message in failures:
        writer.failure(case, message)
    for case, reason in skips:
        writer.skip(case, reason)
    writer.close()
    return path


def reported(capsys, *arguments, code=0):
    assert cli.main(["report", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


CASE = "test_perf/test_it.py::test_latte[s4000-ws{}-latte-l]".format


def test_a_journal_is_printed_with_what_was_skipped_and_what_failed(tmp_path, capsys):
    file = journal(
        tmp_path / "j.jsonl",
        latte(1, 0.5),
        latte(2, 0.5),
        failures=[(CASE(4), "rank 3 died\nits stack"), (CASE(2), "once")],
        skips=[(CASE(8), "2 devices"), (CASE(1), "once")],
    )
    heads, *rows = table(reported(capsys, file), "DDP: latte-l")
    assert {row[0]: row[-1] for row in rows if not row[0].startswith("published")} == {
        "1 x 1 s4000": "",
        "1 x 2 s4000": "",
        "1 x 4 s4000": "failed: rank 3 died",
        "1 x 8 s4000": "skipped: 2 devices",
    }
    assert heads[-1] == "not measured because"


def test_the_base_may_be_a_baseline_file(tmp_path, capsys):
    hardware = Hardware(platform="rtx4090", fingerprint="rtx4090-test", key={"accelerator": "RTX 4090"})
    base = latte(8, 0.5, platform="rtx4090")
    run = dataclasses.replace(summarise(dataclasses.replace(base, session="s", started_at="2025-01-01T00:00:00Z")))
    run = dataclasses.replace(run, process="fresh")
    store.update(tmp_path, hardware, [NewRuns(case=case_of(base), runs=(run,), verdict="pass")], mode="append")
    file = journal(tmp_path / "j.jsonl", latte(8, 0.25))
    text = reported(capsys, file, "--base", store.path_of(tmp_path, hardware), "--style=latte")
    told = {row["nodes x ranks"]: row for row in rows(text, "DDP: latte-l")}
    assert told["1 x 8 s4000"]["times rtx4090, same ranks"] == "2"
    # batch and length are not stored with a run: they follow from its rates and its median
    columns = ("local batch", "global batch", "samples/s (all devices)")
    assert ["1", "8", "16"] == [told["8 rtx4090"][name] for name in columns]


def test_the_documentation_shows_what_is_printed(capsys):
    text = (ROOT / "docs" / "how-to" / "reports.md").read_text()
    shown = text.partition("<!-- example -->\n")[2].partition("<!-- end of example -->")[0]
    assert shown.startswith("### Matrix products")
    assert reported(capsys, ROOT / "baselines" / "examples" / "cpu-example.json").endswith(shown)


def test_out_writes_a_file_and_names_the_styles(tmp_path, capsys):
    file, out = journal(tmp_path / "j.jsonl", latte(1, 0.5)), tmp_path / "report.md"
    assert reported(capsys, file, "--out", out) == f"{out}: latte\n"
    assert out.read_text() == reported(capsys, file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl"], "missing.jsonl is not a file; give a journal or a baseline file"),
        (["empty.jsonl"], "empty.jsonl: no report has a table for these results"),
        (["j.jsonl", "--style=flagperf"], "style flagperf has no table for the cases of j.jsonl (latte-l)"),
        (
            ["j.jsonl", "--base=same.jsonl"],
            "the base same.jsonl is of the same hardware as j.jsonl, s4000 (s4000-test)",
        ),
        (["j.jsonl", "--base=none.jsonl"], "none.jsonl is not a file"),
        (["notes.md"], "notes.md"),
        (["j.jsonl", "--out=missing/report.md"], "--out: missing/report.md cannot be written: No such file"),
    ],
)
def test_what_cannot_be_shown_is_one_line_that_says_why(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    journal(Path("j.jsonl"), latte(1, 0.5))
    shutil.copy("j.jsonl", "same.jsonl")
    journal(Path("empty.jsonl"), failures=[(CASE(1), "bad luck")])
    Path("notes.md").write_text("# notes\n")
    text = reported(capsys, *arguments, code=4)
    assert text.startswith("perfsuite: error: ")
    assert said in text
    assert text.count("\n") == 1


def test_an_unknown_style_is_refused_with_those_there_are(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path / "j.jsonl"), "--style=mlperf"])
    assert stopped.value.code == 4
    said = capsys.readouterr().err
    for name in ("'mlperf'", "opensora", "latte", "flagperf", "oneflow", "methods"):
        assert name in said


TRAINING = """
import pytest
from perfsuite.workloads.training.train_step import TrainStep

@sizes(param="model", full=["latte-tiny"], small=["latte-tiny"])
@world_sizes(1, 2, 4)
def test_latte(perf, ranks, model):
    if ranks.world_size == 4:
        pytest.skip("no time for 4")
    perf(TrainStep(model=model, strategy="ddp"), on=ranks)
"""


def scripted(job):
    return measurement(job.world_size, 1.0, shared=True)


@pytest.fixture
def mine(pytester, monkeypatch):
    return repository(pytester, monkeypatch, TRAINING, scripted)


def test_a_run_writes_its_report_says_where_and_its_journal_gives_the_same_tables_later(mine, capsys):
    result = mine.run("--perf-report=out/report.md", "--perf-journal=j.jsonl")
    result.assert_outcomes(passed=2, skipped=1)
    path = mine.pytester.path / "out" / "report.md"
    result.stdout.fnmatch_lines([f"report {path}: latte"])
    result.stdout.fnmatch_lines(["test_latte?cpu-ws2-latte-tiny?*2*weak*2*vs 1 rank*100%"])
    told = {row["nodes x ranks"]: row for row in rows(path.read_text(), "DDP: latte-tiny")}
    assert {"1 x 1 cpu": "1 (base)", "1 x 2 cpu": "2 vs 1 rank", "1 x 4 cpu": ""} == {
        name: row["speed-up"] for name, row in told.items() if not name.startswith("published")
    }
    assert told["1 x 4 cpu"]["not measured because"] == "skipped: no time for 4"
    kept = mine.pytester.path / "j.jsonl"
    assert {"test_it.py::test_latte[cpu-ws4-latte-tiny]": "no time for 4"} == read_journal(kept).skips
    capsys.readouterr()
    later = reported(capsys, kept)
    assert section(path.read_text(), "DDP: latte-tiny") == section(later, "DDP: latte-tiny")


def test_the_ini_file_may_ask_for_it(mine):
    ini = mine.pytester.path / "tox.ini"
    ini.write_text(ini.read_text() + "\nperf_report_style = flagperf\n")
    mine.run().assert_outcomes(passed=2, skipped=1)
    ini.write_text(ini.read_text() + "perf_report = report.md\n")
    mine.run("--perf-report-style=latte").stdout.fnmatch_lines(["report *report.md: latte"])
    assert "## Latte training" in (mine.pytester.path / "report.md").read_text()


def test_the_option_names_every_style():
    assert STYLE_NAMES == tuple(STYLES)


def test_wrong_options_stop_the_run_before_anything_is_measured(mine):
    for arguments, said in (
        (("--perf-report=r.md", "--perf-report-style=mlperf"), "style 'mlperf' is unknown; choose from opensora"),
        (("--perf-report-style=latte",), "give --perf-report=FILE too"),
        (("--perf-report=.",), "is a folder; give a file in it"),
    ):
        result = mine.run(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert said in "\n".join([*result.errlines, *result.outlines])
    assert mine.driver.jobs == []


def test_a_report_that_cannot_be_made_costs_no_result(mine):
    for arguments, said in (
        (("--perf-report=r.md", "--perf-report-style=flagperf"), "style flagperf has no table for"),
        (("--perf-report=r.md", "--benchmark-disable"), "no report has a table for these results"),
    ):
        result = mine.run(*arguments)
        result.assert_outcomes(passed=2, skipped=1)
        assert result.ret == 0
        assert said in result.stdout.str()
        assert not (mine.pytester.path / "r.md").exists()


def test_a_disk_that_is_full_at_the_end_costs_report_and_summary_and_no_result(mine, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = os.replace
    monkeypatch.setattr(os, "replace", lambda draft, path: (full if str(path).endswith(".md") else real)(draft, path))
    result = mine.run("--perf-report=r.md", "--perf-summary=s.md")
    result.assert_outcomes(passed=2, skipped=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines_random(
        [
            "perfsuite: error: report *r.md was not written: *No space left*",
            "perfsuite: error: summary *s.md cannot be written: No space left*",
        ]
    )


def test_a_journal_of_skips_alone_is_kept_only_in_the_file_of_the_option(pytester, monkeypatch):
    tests = "import pytest\n@pytest.mark.skip(reason='not today')\ndef test_a(perf):\n    perf(step)\n"
    mine = repository(pytester, monkeypatch, tests)
    mine.run().assert_outcomes(skipped=1)
    assert not [*(pytester.path / ".perfsuite").glob("journal-*")]
    mine.run("--perf-journal=j.jsonl").assert_outcomes(skipped=1)
    assert {"test_it.py::test_a[cpu]": "not today"} == read_journal(pytester.path / "j.jsonl").skips
