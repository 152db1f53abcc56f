"""``--perf-html``, ``perfsuite report --html`` and the page of an A/B: where they go, and what is told in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.cli import ab
from perfsuite.plugin.options import BESIDE
from perfsuite.reports.page import page
from perfsuite.statistics.comparison import Comparison
from test_correctness.helpers.command_line import printed, refused
from test_correctness.helpers.pages import Read
from test_correctness.helpers.report_runs import gpt
from test_correctness.helpers.scripted_driver import measurement, repository

CASES = """
import pytest

@pytest.mark.parametrize("side", [64, 128])
def test_product(perf, side):
    perf(Product(side=side))

def test_fails(perf):
    raise ValueError("of /home/somebody/x.py")
"""


@pytest.fixture
def repo(pytester, monkeypatch):
    monkeypatch.setattr(page, "renderer", lambda: None)
    return repository(pytester, monkeypatch, CASES, measurement)


def pages():
    return sorted(str(path) for path in Path().rglob("*.html"))


def test_a_page_stands_where_it_was_asked_for(repo):
    repo.run()
    assert pages() == []
    done = repo.run("-o", "perf_html=out/run.html")
    assert pages() == ["out/run.html"]
    done.stdout.fnmatch_lines(
        ["page        out/run.html without charts: pip install *", "next *perfsuite show *--show=tables"]
    )
    read = Read(Path("out/run.html").read_text())
    assert "2 measured, 1 failed" in read.text
    assert "test_product[cpu-64]" in read.text
    assert "somebody" not in read.text


def test_without_a_name_it_stands_beside_the_journal(repo):
    repo.run("--perf-html").stdout.fnmatch_lines(["page *.html without charts: pip install *"])
    (written,) = Path(".perfsuite").glob("*.html")
    assert f"perfsuite show .perfsuite/{written.stem}.jsonl" in Read(written.read_text()).text
    assert written.with_suffix(".jsonl").exists()


def test_the_tests_are_not_taken_for_the_file(repo):
    done = repo.run("--perf-html", "test_it.py")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--perf-html: test_it.py does not end in .html; write --perf-html=FILE.html*"])
    assert BESIDE  # the word that stands for no file is none either
    assert not BESIDE.endswith(".html")


def test_a_full_disk_costs_the_page_and_not_the_run(repo, monkeypatch):
    def full(material, path):
        raise page.ConfigurationError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(page, "write_page", full)
    done = repo.run("--perf-html=run.html")
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(
        ["perfsuite: error: page *run.html was not written: *No space left*; perfsuite report *.jsonl --html *"]
    )


def test_report_writes_the_page_of_a_journal_beside_another(repo, capsys):
    repo.run("--perf-journal=a.jsonl")
    repo.run("--perf-journal=b.jsonl")
    command = ("report", "b.jsonl", "--html", "b.html", "--base", "a.jsonl")
    assert "page b.html" in printed(capsys, *command)
    text = Read(Path("b.html").read_text()).text
    assert "nsure: one run each of 2 cases decides nothing" in text
    assert "o case is shown" not in text
    assert "measure both in turns: perfsuite ab --a" in text
    first = Path("b.html").read_bytes()
    printed(capsys, *command)
    assert first == Path("b.html").read_bytes()


def test_report_shows_a_baseline_file_and_compares_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "renderer", lambda: None)
    example = Path(__file__).parent.parent / "baselines" / "examples" / "cpu-example.json"
    printed(capsys, "report", example, "--html", tmp_path / "x.html", "--baseline", example)
    assert "3 unchanged. 3 measured." in Read((tmp_path / "x.html").read_text()).text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["x.json", "--html", "p.html"], "x.json is not a file"),
        (["x.json", "--baseline", "y.json"], "--baseline is for a page; give --html FILE too"),
        (["x.json", "--html", "p.html", "--style", "latte"], "--style is for a report in Markdown"),
        (["x.json", "--html", "p.html", "--base", "a", "--baseline", "b"], "give one of them"),
    ],
)
def test_wrong_options_of_report_are_told(capsys, arguments, told):
    assert told in refused(capsys, "report", *arguments)


class Arms:
    """What ``perfsuite ab`` has when all pairs ran."""

    def __init__(self):
        results = gpt("test_ddp", 1, 1.0), gpt("test_ddp", 1, 1.2)
        self.of = [[{result.case: result}] * 3 for result in results]
        self.arms = [type("Arm", (), {"name": name}) for name in ("a (main)", "b (HEAD)")]
        self.pairs = 3


def test_an_ab_is_a_page_of_two_arms(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "renderer", lambda: None)
    runs = Arms()
    case = next(iter(runs.of[0][0]))
    found = Comparison(
        case=case, pairs=3, a_s=1.0, b_s=1.2, change=0.2, low=0.18, high=0.22, smallest=0.05, outcome="slower"
    )
    ab.write_arms(runs, [found], tmp_path / "ab.html")
    text = Read((tmp_path / "ab.html").read_text()).text
    assert f"1 case slower, worst {case.partition('::')[2]} +20.0 % [+18.0, +22.0]" in text
    assert "b (HEAD) against a (main), 3 pairs" in text


def test_an_ab_tells_a_bad_place_before_it_measures(tmp_path, capsys):
    wrong = tmp_path / "none" / "ab.html"
    said = refused(capsys, "ab", "--a-env", "X=1", "--html", wrong)
    assert f"--html: {wrong} cannot be written: No such file" in said
