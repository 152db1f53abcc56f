"""What CI shows of a run: a summary with the verdict first, annotations where tests failed."""

import dataclasses

import pytest

from perfsuite.base.text import LONGEST
from perfsuite.plugin.summary import MOST_ANNOTATIONS, error_commands
from perfsuite.record.run import GateRecord
from perfsuite.record.verdict import Verdict
from perfsuite.reports.notable import notable
from perfsuite.reports.summary import LIMIT_BYTES, first_sentence, markdown_summary
from test_correctness.helpers.runs import large_run, record, result, verdict


def test_the_summary_says_the_verdict_first():
    changed = [verdict(f"t.py::slow{number}", effect=0.05 + number / 1000) for number in range(12)]
    same = [Verdict(case=f"t.py::same{number}", name="pass") for number in range(204)]
    run = record(
        *(result(one.case) for one in (*changed, *same)),
        gate=GateRecord(gate=True, fail_on=("regressed",), verdicts=(*changed, *same)),
    )
    assert first_sentence(run) == "12 cases slower, worst `t.py::slow11` +6.1 % [+4.2, +8.0]; 204 unchanged"
    text = markdown_summary(run, notable(run))
    assert text.splitlines()[0] == f"**perfsuite**: {first_sentence(run)}"
    table = text.partition("| verdict |")[2].partition("<details>")[0]
    assert (table.count("t.py::slow"), table.count("t.py::same")) == (12, 0)
    assert "<details><summary>204 other cases</summary>" in text


def test_a_run_with_nothing_to_see_is_three_lines():
    same = [Verdict(case=f"t.py::same{number}", name="pass") for number in range(9)]
    run = record(*(result(one.case) for one in same), gate=GateRecord(gate=True, verdicts=tuple(same)))
    text = markdown_summary(run, notable(run))
    assert text.splitlines() == ["**perfsuite**: 9 unchanged", "", "cpu-x, torch 2.13.0, 9 measured"]


def test_a_summary_is_cut_at_a_row():
    run = large_run(2000)
    text = markdown_summary(run, notable(run))
    assert len(text.encode()) <= LIMIT_BYTES
    assert "more in the journal" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    assert text.count("<details>") == text.count("</details>")


@pytest.mark.parametrize("outcome", ["smoke", "out_of_memory"])
def test_a_run_that_nobody_judged_has_a_summary(outcome):
    gone = result("t.py::a", outcome=outcome, measurement=None, detail="OOM at 44 GiB of 48 GiB")
    assert markdown_summary(record(gone), notable(record(gone))).startswith("**perfsuite**: 1 ")
    assert "no cases" in markdown_summary(record(), ())
    failed = record(failures={"t.py::a": "/home/me/repo/x.py: rank 0 of node17 died"})
    assert "/home" not in markdown_summary(failed, notable(failed))


def test_a_path_is_cut_before_the_text_around_it_is():
    kept = "/ann/secret/x.py "  # the end of what is shown begins inside of the path
    detail = f"{'x' * LONGEST} /home{kept}{'y' * ((LONGEST - 3) // 2 - len(kept))}"
    gone = result("t.py::a", outcome="out_of_memory", measurement=None, detail=detail)
    assert "secret" not in markdown_summary(record(gone), ())


def test_cases_that_ran_out_of_memory_are_not_counted_as_measured():
    full = result("t.py::full", outcome="out_of_memory", measurement=None, detail="OOM at 2 GiB of 2 GiB")
    verdicts = tuple(Verdict(case=case, name="no-baseline") for case in ("t.py::full", "t.py::a"))
    said = first_sentence(record(full, result("t.py::a"), gate=GateRecord(gate=False, verdicts=verdicts)))
    assert said.startswith("1 case out of memory; 1 case measured, none compared")


def test_the_summary_has_what_fails_before_what_is_undecided():
    names = ("inconclusive", "improved", "environment", "regressed", "impossible")
    verdicts = tuple(Verdict(case=f"t.py::{name}", name=name) for name in names)
    run = record(gate=GateRecord(gate=True, verdicts=verdicts))
    rows = [line.split("|")[1].strip() for line in markdown_summary(run, ()).splitlines() if line.startswith("| ")]
    assert rows == ["verdict", "---", "impossible", "regressed", "environment", "improved", "inconclusive"]


def test_names_of_hosts_stay_only_where_they_are_asked_for():
    one = result("t.py::a", environment={"hostname": "node17"})
    run = record(one, failures={"t.py::b": "rank 3 on node17 died"})
    assert "node17" not in markdown_summary(run, notable(run))
    assert "node17" in markdown_summary(run, notable(run), show_hosts=True)


def test_annotations_stand_at_the_tests_that_failed(tmp_path):
    cases = [f"t.py::test_{number}" for number in range(MOST_ANNOTATIONS + 5)]
    run = record(
        failures={"t.py::test_x": "50 % gone\nTraceback"},
        gate=GateRecord(gate=True, fail_on=("regressed",), verdicts=tuple(verdict(case) for case in cases)),
    )
    places = dict.fromkeys(("t.py::test_x", *cases), ("suite/t,x.py", 7))
    lines = list(error_commands(run, places, root=tmp_path / "below", workspace=str(tmp_path)))
    assert lines[0] == "::error file=below/suite/t%2Cx.py,line=7::t.py::test_x: failed: 50 %25 gone"
    assert lines[1].startswith("::error file=below/suite/t%2Cx.py,line=7::t.py::test_0: REGRESSED +8.1 %25")
    assert (len(lines), lines[-1]) == (MOST_ANNOTATIONS + 1, "::error::and 6 more cases failed, see the log")
    looked = dataclasses.replace(run, failures={}, gate=dataclasses.replace(run.gate, gate=False))
    assert list(error_commands(looked, places, root=tmp_path)) == []
