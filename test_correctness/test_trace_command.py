"""``benchmarks/schedule.py`` and ``perfsuite trace``: what they print, write and refuse."""

import dataclasses
import json
import re

import pytest

from benchmarks import schedule
from perfsuite.cli import main as cli
from perfsuite.reports.timelines.files import file_stem
from perfsuite.schedules import SCHEDULES, make_schedule
from test_correctness.helpers.pipelines import measured, result_of, simulated
from test_correctness.helpers.runs import journal_of


def printed(capsys, *arguments, code=0):
    words = [str(each) for each in arguments]
    assert (schedule.main(words[1:]) if words[0] == "schedule" else cli.main(words)) == code
    return capsys.readouterr()


def refused(capsys, *arguments):
    said = printed(capsys, *arguments, code=4)
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line.removeprefix("perfsuite: ").removeprefix("error: ")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_and_traced(name, tmp_path, capsys):
    picture, trace = tmp_path / "a.svg", tmp_path / "a.JSON"
    said = printed(
        capsys, "schedule", name, "--ranks", 2, "--micro-batches", 4, "--out", picture, "--out", trace
    ).out.splitlines()
    assert said[-2:] == [f"wrote {picture}", f"wrote {trace}"]
    other = json.loads(trace.read_text())["otherData"]
    assert (other["schedule"], other["source"], other["ranks"]) == (name, "simulated", 2)
    assert f"bubble_ratio             {other['bubble_ratio']:.3f}" in "\n".join(said)
    assert f": simulated, bubble_ratio {other['bubble_ratio']:.3f}" in picture.read_text(encoding="utf-8")


def test_halves_of_a_backward_messages_and_unequal_stages_are_said(capsys):
    split = printed(capsys, "schedule", "zbv", "--ranks", 2, "--micro-batches", 4, "--backward-s", 3).out
    assert "forward 1 s, backward 3 s, as input and weight gradients of 1.5 s; a message no time" in split
    assert "formula, equal stages    none: it depends on" in split
    many = printed(capsys, "schedule", "1f1b", "--ranks", 16, "--micro-batches", 16).out
    assert "micro-batches in flight  1 to 16 over the ranks" in many
    slow = printed(capsys, "schedule", "gpipe", "--ranks", 2, "--micro-batches", 1, "--communication-s", 0.5).out
    assert "a message 500 ms" in slow
    assert "step                     7 s" in slow
    costs = ("--stage-costs", 1, 1, 2, 1)
    uneven = printed(capsys, "schedule", "1f1b", "--ranks", 4, "--micro-batches", 8, *costs).out.splitlines()
    assert ", times its cost; " in uneven[1]
    assert uneven[-1] == (
        "stage 2 binds, rank 2 has +60% work; an even split: bubble_ratio 0.455 -> 0.273, step 55 s -> 41.25 s"
    )


GPIPE = ("gpipe", "--ranks", 2, "--micro-batches", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mine", "--ranks", 4, "--micro-batches", 8), "schedule='mine' is unknown; choose naive, .* or dualpipev"),
        ((*GPIPE, "--stages-per-rank", 2), "stages_per_rank=2 .*; choose 1"),
        ((*GPIPE, "--forward-s", 0), "--forward-s 0 is no duration; .* above 0"),
        ((*GPIPE, "--backward-s", "nan"), "--backward-s nan is no duration"),
        ((*GPIPE, "--communication-s=-1"), "--communication-s -1 is no duration; give a number at least 0"),
        ((*GPIPE, "--stage-costs", 1, 1, 1), "--stage-costs has 3 numbers for 2 ranks x 1 stages; give 2"),
        ((*GPIPE, "--stage-costs", 1, "inf"), "--stage-costs inf is no duration"),
        ((*GPIPE, "--out", "a.png"), "--out a.png ends in neither .svg .* choose"),
        ((*GPIPE, "--out", "/proc/no/a.svg"), "/proc/no/a.svg cannot be written: No such file or directory; free"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_legal_choices(arguments, message, capsys):
    assert schedule.main([*map(str, arguments)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"error: {message}.*", line)


OTHER = result_of("t.py::test_other[cpu]", None)
CASES = ("t.py::test_step[cpu-ws4-1f1b]", "t.py::test_step[cpu-ws4-gpipe]")


@pytest.fixture
def journal(tmp_path):
    """Two cases with a timeline and one without."""
    timelines = [measured(make_schedule(name, ranks=4, num_micro_batches=8)) for name in ("1f1b", "gpipe")]
    return journal_of(tmp_path / "journal.jsonl", *map(result_of, CASES, timelines), OTHER)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_journal_gives_files_of_every_case_with_a_timeline(journal, tmp_path, capsys):
    out = tmp_path / "traces"
    said = printed(capsys, "trace", journal, "--out", out).out.splitlines()
    expected = [f"{file_stem(case)}{end}" for case in CASES for end in (".trace.json", ".svg")]
    assert names(out) == set(expected)
    assert said[-4:] == [str(out / name) for name in expected]
    assert [line.split()[0] for line in said if line.startswith("cpu-")] == ["cpu-ws4-1f1b", "cpu-ws4-gpipe"]
    trace = json.loads((out / expected[0]).read_text())
    assert (trace["otherData"]["schedule"], trace["otherData"]["source"]) == ("1f1b", "measured")


def test_cases_are_chosen_and_simulated_beside(journal, tmp_path, capsys):
    out = tmp_path / "traces"
    printed(capsys, "trace", journal, "--case", "gpipe", "--simulated", "--out", out)
    stem = file_stem(CASES[1])
    ends = (".svg", ".trace.json", ".simulated.svg", ".simulated.trace.json")
    assert names(out) == {stem + end for end in ends}
    took = [json.loads((out / (stem + end)).read_text())["otherData"] for end in (ends[1], ends[3])]
    assert [each["source"] for each in took] == ["measured", "simulated"]
    assert took[1]["bubble_ratio"] < took[0]["bubble_ratio"]  # the gaps between actions are gone


def test_what_a_journal_does_not_have_is_named(journal, tmp_path, capsys):
    out = tmp_path / "traces"
    assert refused(capsys, "trace", journal, "--case", "zbv", "--out", out) == (
        f"--case 'zbv': no id of 2 cases with a timeline contains it; give a part of an id such as {CASES[0]}"
    )
    assert refused(capsys, "trace", journal_of(tmp_path / "plain.jsonl", OTHER), "--out", out) == (
        f"journal {tmp_path}/plain.jsonl has 1 case and none with a timeline; "
        "give the journal of a run with pipeline cases"
    )
    assert "cannot be read: No such file" in refused(capsys, "trace", tmp_path / "no.jsonl", "--out", out)
    (tmp_path / "file").write_text("")
    assert "cannot be made: File exists" in refused(capsys, "trace", journal, "--out", tmp_path / "file")
    assert not out.exists()


def test_a_case_that_cannot_be_shown_keeps_no_other_from_being_written(tmp_path, capsys):
    known = measured(make_schedule("1f1b", ranks=4, num_micro_batches=8))
    own = result_of("t.py::own", dataclasses.replace(known, schedule="mine"))
    journal, out = journal_of(tmp_path / "j.jsonl", own, result_of("t.py::known", known)), tmp_path / "traces"
    said = printed(capsys, "trace", journal, "--simulated", "--out", out, code=4)
    assert said.err.startswith("perfsuite: error: t.py::own: schedule='mine' is unknown; choose")
    stems = (f"{file_stem('t.py::own')}.svg", f"{file_stem('t.py::known')}.simulated.svg")
    assert names(out) >= set(stems)
    assert len(names(out)) == 6


def test_a_simulated_timeline_in_a_journal_is_named_as_such(tmp_path, capsys):
    journal = journal_of(tmp_path / "journal.jsonl", result_of("t.py::t", simulated("1f1b")))
    printed(capsys, "trace", journal, "--out", tmp_path / "out")
    assert names(tmp_path / "out") == {f"{file_stem('t.py::t')}.simulated{end}" for end in (".svg", ".trace.json")}
