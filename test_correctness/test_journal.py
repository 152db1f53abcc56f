"""The journal: every finished case is on disk, a torn end is forgiven, other damage is named."""

import dataclasses
import json
import os
import re

import pytest

from perfsuite.base.errors import JournalError
from perfsuite.record.describe import instrumented_line
from perfsuite.record.journal import durations_s, read_journal
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import Work
from perfsuite.record.run import GateRecord, Header, Revision, RunEnd
from perfsuite.record.verdict import Verdict
from perfsuite.reports.notable import notable
from test_correctness.helpers.measurements import result_of
from test_correctness.helpers.runs import journal_of, remeasured, verdict
from test_correctness.helpers.scripted_driver import measured_on

HEADER = Header(
    session="s1",
    fingerprint="cpu-x",
    platform="cpu",
    started_at="2024-01-01T00:00:00+00:00",
    versions={"torch": "2.13"},
)


def result(case, median_s=0.5, kernel="5.4"):
    return result_of(
        measured_on(2, (median_s,) * 3),
        case,
        parameters={"shape": [1, 2], "dtype": "fp32"},
        work=Work(collective="all_reduce", message_bytes=1024.0),
        metrics=("latency_us", "busbw_gb_per_s"),
        fingerprint="cpu-x",
        environment={"kernel": kernel},
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "journal.jsonl"


def header_of(run):
    return Header(**{field.name: getattr(run, field.name) for field in dataclasses.fields(Header)})


def written(path, *results):
    return journal_of(path, *results, header=HEADER)


def test_what_was_written_is_read_back_and_an_environment_is_written_once_for_all_that_share_it(path):
    results = [*(result(f"case{index}") for index in range(5)), result("b", kernel="6.1")]
    assert written(path, *results).read_text().count('"kernel"') == 2
    journal = read_journal(path)
    assert journal.results == {each.case: each for each in results}
    assert not journal.truncated


def test_every_line_is_synced_before_the_call_returns(path, monkeypatch):
    sizes = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (sync(descriptor), sizes.append(path.stat().st_size)))
    writer = JournalWriter(path, HEADER)
    writer.result(result("a"))
    writer.failure("b", "rank 1 died")
    assert sizes[-1] == path.stat().st_size
    assert len(sizes) == path.read_bytes().count(b"\n") - 1  # a result with its environment
    writer.close()


def test_the_newest_line_of_a_case_counts(path):
    writer = JournalWriter(path, HEADER)
    writer.failure("a", "rank 1 died")
    writer.interrupted("a", "SIGINT")
    writer.interrupted("c", "SIGTERM")
    writer.result(result("a", 0.25))
    writer.result(result("a", 0.75))
    writer.failure("b", "rank 0 hung")
    writer.close()
    journal = read_journal(path)
    assert journal.results["a"].median_s == 0.75
    assert journal.failures == {"b": "rank 0 hung"}
    assert journal.interrupted == {"c": "SIGTERM"}


def test_a_torn_last_line_is_left_out_wherever_it_ends(path):
    whole = written(path, result("a"), result("b")).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last + 1, len(whole), 97):
        path.write_bytes(whole[:end])
        journal = read_journal(path)
        assert list(journal.results) == ["a"]
        assert journal.truncated


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (1, "{}", "line 1: not an object with one key"),
        (1, '{"result": {}}', "line 1: this is not the header of a perfsuite journal"),
        (1, "#!/bin/sh", "line 1: not JSON"),
        (1, '{"header": {"schema": 99}}', "line 1: schema 99 is newer than 1.*update perfsuite"),
        (1, '{"header": {"session": "s"}}', "line 1: Header: .*missing"),
        (3, '{"result": {"case": 7}}', "line 3: Result.case is 7, not a str"),
        (3, '{"result": ', "line 3: not JSON"),
        (3, "[]", "line 3: not an object with one key"),
        (3, "", "line 3: not JSON"),
        (3, '{"weather": "fine"}', "line 3: 'weather' is not a line of a journal"),
        (3, '{"failure": {"case": "a"}}', "line 3: 'failure' is not a line"),
        (1, None, "line 1: no complete line"),
    ],
)
def test_any_other_damage_is_named_by_line_and_reason(path, number, line, message):
    lines = written(path, result("a"), result("b")).read_text().splitlines()
    lines[number - 1] = line
    broken = "".join(f"{line}\n" for line in lines) if line is not None else ""
    path.write_text(broken)
    with pytest.raises(JournalError, match=message) as caught:
        read_journal(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == broken


def test_a_missing_journal_is_named(path):
    with pytest.raises(JournalError, match=r"journal .*journal.jsonl cannot be read: No such file"):
        read_journal(path)


def test_a_journal_is_never_overwritten(path):
    before = written(path, result("a")).read_bytes()
    with pytest.raises(JournalError, match="cannot be made: File exists; name another file by --perf-journal"):
        JournalWriter(path, HEADER)
    assert path.read_bytes() == before


def test_lines_are_plain_json_that_other_tools_read(path):
    lines = [json.loads(line) for line in written(path, result("a")).read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["header", "environment", "result"]
    assert lines[2]["result"]["measurement"]["times_s"] == [0.5] * 3


def test_the_journal_tells_the_whole_run(path):
    revision = Revision(commit="c" * 40, branch="main", dirty=True, subject="A \x1b[31msubject")
    header = dataclasses.replace(HEADER, revision=revision, arguments=("-k", "all_reduce", "\udcff"))
    gate = GateRecord(
        gate=True,
        fail_on=("regressed",),
        verdicts=(verdict("a", mde=float("inf")), Verdict(case="b", name="pass")),
        suite="drifted",
        suite_line="slower",
        banner=("noisy",),
    )
    end = RunEnd(
        at="2024-01-01T00:05:00+00:00", took_s=300.5, exit_status=1, warnings=("not quiet",), failed={"b": "x"}
    )
    journal = read_journal(
        journal_of(path, result("a"), header=header, failures={"c": "rank 1 died"}, gate=gate, end=end)
    )
    assert (header_of(journal), journal.gate, journal.end) == (header, gate, end)
    assert journal.failures == {"b": "x", "c": "rank 1 died"}
    assert journal.case_errors == {"c": "rank 1 died"}
    assert list(journal.results) == ["a"]


def test_a_run_in_which_nothing_finished_leaves_no_journal_though_it_ended(path):
    writer = JournalWriter(path, HEADER)
    writer.skip("a", "no device")
    writer.ended(RunEnd(at="", took_s=0.0, exit_status=0))
    writer.close()
    assert not path.exists()


@pytest.mark.parametrize("file", ["perfsuite/__init__.py", "/elsewhere/perfsuite/__init__.py"])
def test_modules_from_elsewhere_are_notable_in_a_journal_too(path, file):
    whole = remeasured(result("a"), imports={"perfsuite": file})
    told = [one.sentence for one in notable(read_journal(written(path, whole)))]
    assert [file in sentence for sentence in told] == [True] * file.startswith("/")


def test_instruments_of_the_ranks_are_told_of_a_journal_too(path):
    ranks = tuple(dataclasses.replace(rank, instruments=("tracer",)) for rank in result("a").measurement.ranks)
    whole = remeasured(result("a"), ranks=ranks)
    read = read_journal(written(path, whole)).results
    assert instrumented_line(read.values()) == instrumented_line([whole])
    assert "tracer" in instrumented_line(read.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"value":500000.0', '"value":"fast"', "Result.metrics[0].value is 'fast', not a float"),
        ('{"name":"latency_us",', "{", "missing 1 required keyword-only argument: 'name'"),
        ('"metrics":[', '"metrics":[1,', "Result.metrics[0] is 1, not an object"),
        ('"metrics":[', '"metrics":[,', "Expecting value"),
        ('"iterations":7', '"iterations":"seven"', "Result.measurement.iterations is 'seven', not a int"),
    ],
)
def test_damage_inside_a_result_is_named_by_line(path, old, new, message):
    text = written(path, result("a")).read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(JournalError, match=f"line 3: .*{re.escape(message)}"):
        read_journal(path)


def test_what_cases_took_is_read_without_decoding_them(path):
    took = dataclasses.replace(result('t.py::test["x\\y"]'), took_s=12.25)
    written(path, took, result("without"))
    assert durations_s(path, "cpu-x") == {'t.py::test["x\\y"]': 12.25}
    assert durations_s(path, "cpu-of-others") == durations_s(path.parent / "nowhere", "cpu-x") == {}
