"""Results for other programs: whatever the format, the figures are those of the journal, the baseline, the history."""

import csv
import io
import json
import math
import sys

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from perfsuite.base.text import cell_text, escaped, markdown_text
from test_correctness.helpers.command_line import printed, refused
from test_correctness.helpers.histories import commit, session, written
from test_correctness.helpers.report_runs import latte
from test_correctness.test_cli_baselines import offer, run
from test_correctness.test_tables_command import journal


@pytest.fixture
def results(tmp_path):
    return journal(tmp_path / "j.jsonl", latte(1, 0.5), latte(2, 0.25))


def exported(capsys, path, form, *more):
    return printed(capsys, "export", path, f"--format={form}", *more)


def test_json_has_every_figure_with_its_meaning(results, capsys):
    rows = json.loads(exported(capsys, results, "json"))["rows"]
    (time,) = [row for row in rows if row["metric"] == "median_s" and row["ranks"] == 2]
    assert (0.25, "s", "lower", "s4000") == (time["value"], time["unit"], time["better"], time["platform"])
    (rate,) = [row for row in rows if row["metric"] == "samples_per_s" and row["ranks"] == 2]
    assert ("higher", "samples/s") == (rate["better"], rate["unit"])
    assert all(math.isfinite(row["value"]) for row in rows)


def test_csv_says_the_same_and_no_cell_is_a_formula(tmp_path, capsys):
    hostile = session(1, cases=('=HYPERLINK("http://x")', "@SUM(1)", "plain"))
    rows = list(csv.DictReader(io.StringIO(exported(capsys, written(tmp_path / "h.jsonl", hostile), "csv"))))
    assert ['\'=HYPERLINK("http://x")', "'@SUM(1)", "plain"] == sorted(row["case"] for row in rows)
    assert {commit(1)} == {row["commit"] for row in rows}
    assert [pytest.approx(0.01, rel=1e-4)] * 3 == [float(row["value"]) for row in rows]


@pytest.mark.parametrize("parse", [text_string_to_metric_families, openmetrics_families], ids=["text", "openmetrics"])
def test_openmetrics_is_what_prometheus_reads(results, capsys, parse):
    text = exported(capsys, results, "openmetrics")
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in parse(text)}
    samples = families["perfsuite_median_seconds"].samples
    assert {"1": 0.5, "2": 0.25} == {sample.labels["ranks"]: sample.value for sample in samples}
    assert {"lower"} == {sample.labels["better"] for sample in samples}
    assert "perfsuite_samples_per_s" in families


def test_openmetrics_without_its_package_names_the_extra(results, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "pip install 'perfsuite[export]'" in refused(capsys, "export", results, "--format=openmetrics")


def test_bencher_and_github_action_benchmark(results, capsys):
    bencher = json.loads(exported(capsys, results, "bencher"))
    assert [0.25, 0.5] == sorted(measures["median-s"]["value"] for measures in bencher.values())
    entries = json.loads(exported(capsys, results, "github-action-benchmark"))
    assert [("s", 0.25), ("s", 0.5)] == sorted((entry["unit"], entry["value"]) for entry in entries)


def test_otava_gets_a_line_per_session_and_a_column_per_case(tmp_path, capsys):
    path = written(tmp_path / "h.jsonl", session(1, cases=("a", "b")), session(2, cases=("b",)))
    header, first, second = csv.reader(io.StringIO(exported(capsys, path, "otava")))
    assert ["time", "commit", "branch", "a", "b", "filled"] == header
    assert ([commit(1), "main"], [commit(2), "main"]) == (first[1:3], second[1:3])


def test_otava_gets_no_empty_cell_and_says_which_are_filled(tmp_path, capsys):
    """Otava rejects a file of which a cell is not a number: float('') in its CsvImporter."""
    one, two = ("b",), ("a", "b")
    slow = session(2, cases=two, level=lambda case: 0.5)
    path = written(tmp_path / "h.jsonl", session(1, cases=one), slow, session(3, cases=one), session(4, cases=two))
    out = tmp_path / "o.csv"
    shown = exported(capsys, path, "otava", f"--out={out}")
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    times = [float(row["a"]) for row in rows]
    assert (times[0], times[2]) == (times[1], times[1])
    assert times[1] != times[3]
    assert ["a", "", "a", ""] == [row["filled"] for row in rows]
    assert "6 figures as otava" in shown
    assert "2 cells of cases that a session lacks repeat another session" in shown


@pytest.mark.parametrize(
    ("form", "count"), [("json", 3), ("csv", 3), ("openmetrics", 2), ("bencher", 2), ("github-action-benchmark", 2)]
)
def test_the_count_printed_is_that_of_the_file(tmp_path, capsys, form, count):
    path = written(tmp_path / "h.jsonl", session(1, cases=("a", "b")), session(2, cases=("b",)))
    shown = exported(capsys, path, form, f"--out={tmp_path / 'out'}")
    assert f"{count} figures as {form}" in shown
    assert ("1 figure left out" in shown) == (count == 2)


def test_a_baseline_gives_its_newest_runs(tmp_path, capsys):
    path = offer(tmp_path, run("a", days_old=3, median_s=0.02), run("b", median_s=0.01), name="it").path
    row, latency = json.loads(exported(capsys, path, "json"))["rows"]
    expected = {"case": "test_x.py::test_it[cpu-ws2-1KiB]", "value": 0.01, "session": "b", "ranks": 2}
    assert row.items() >= expected.items()
    assert ("latency_us", 1e4, "b") == (latency["metric"], latency["value"], latency["session"])


def test_what_cannot_be_exported_says_why(tmp_path, capsys, results):
    assert "is not a file" in refused(capsys, "export", tmp_path / "absent", "--format=json")
    simulated = written(tmp_path / "h.jsonl", session(1, simulated=True))
    assert "cannot be in one export" in refused(capsys, "export", results, simulated, "--format=json")
    empty = written(tmp_path / "e.jsonl", session(1, cases=()))
    assert "nothing was measured" in refused(capsys, "export", empty, "--format=csv")


def test_foreign_text_is_text():
    assert r"a\x1bb\u202ec\udcff" == escaped("a\x1bb\u202ec\udcff")
    assert "&lt;img&gt; \\[x\\](y) \\`z\\` a_b \\_\\_c\\_\\_" == markdown_text("<img> [x](y) `z` a_b __c__")
    assert "http:\\//x www\\.y" == markdown_text("http://x www.y")
    assert ["'+1", "'-1", "a=1"] == [cell_text(text) for text in ("+1", "-1", "a=1")]
