"""A history's file, the order of its sessions, what the command prints, and the line that a run adds."""

import dataclasses
import json

import pytest

from perfsuite.base.errors import BaselineError
from perfsuite.cli import main as cli
from perfsuite.history import file
from perfsuite.history.file import line_of
from perfsuite.history.git import Repository
from perfsuite.history.order import in_order
from perfsuite.record.run import Revision
from test_correctness.helpers.histories import BEGIN, ScriptedRepository, commit, session, written
from test_correctness.helpers.report_runs import latte
from test_correctness.helpers.scripted_driver import repository
from test_correctness.test_git import run_git as git
from test_correctness.test_tables_command import journal


def printed(capsys, *arguments, code=0):
    assert cli.main(["history", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.err if code == 4 else captured.out


def test_a_session_is_read_as_it_was_appended(tmp_path):
    path = tmp_path / "h.jsonl"
    one, two = session(1, environment={"packages": {"torch": "2.13.0"}}), session(2)
    assert (True, True, False) == (file.append(path, two), file.append(path, one), file.append(path, two))
    assert (one, two) == file.read(path).sessions
    assert len(path.read_text().splitlines()) == 2
    assert list(tmp_path.iterdir()) == [path]  # the lock is gone


def test_what_git_merges_by_union_is_one_history(tmp_path):
    ours = written(tmp_path / "a", session(1), session(2))
    theirs = written(tmp_path / "b", session(1), session(3))
    both = tmp_path / "both"
    both.write_text(ours.read_text() + theirs.read_text())
    merged, new = file.merge(ours, [theirs])
    expected = (session(1), session(2), session(3))
    assert (1, *[expected] * 3) == (new, merged.sessions, file.read(both).sessions, file.read(ours).sessions)


def test_a_journal_added_by_hand_does_not_hide_what_the_run_knew(tmp_path):
    known, by_hand = session(1), session(1, revision=Revision(), time=BEGIN.isoformat())
    path = written(tmp_path / "h", by_hand, known)
    assert (known,) == file.read(path).sessions
    assert not file.append(path, by_hand)


LINE = line_of(session(1))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (f"<<<<<<< ours\n{LINE}\n", 1, "conflict marker of git; keep the lines of both sides"),
        (f"{LINE}\n=======\n", 2, "merge=union"),
        (f"{LINE}\n{LINE[:50]}", 2, "the line is incomplete"),
        (f"{LINE[:50]}\n{LINE}\n", 1, "remove or repair the line"),
        (f"{LINE.replace(chr(34) + 'schema' + chr(34) + ':2', chr(34) + 'schema' + chr(34) + ':3')}\n", 1, "update"),
        (f"{LINE}\n{line_of(session(2, fingerprint='cpu-other'))}\n", 2, "holds one hardware"),
        (f"{LINE}\n{line_of(session(2, simulated=True))}\n", 2, "holds one hardware"),
        (f"{LINE}\n{LINE.replace('-4.6', '-4.7')}\n", 2, "s0001 occurs twice with different values"),
        (f"{LINE.replace('-4.6', 'NaN,-4.6')}\n", 1, "NaN is not a number"),
        (f"{LINE.replace('-4.6', 'true,-4.6')}\n", 1, "t.py::a.log_time is True, not a float"),
        ('{"schema": 1}\n', 1, "missing 4 required keyword-only arguments: 'session', 'time'"),
        (f"{LINE.replace('-4.6', '9999.6')}\n", 1, "case t.py::a has values out of range"),
        (f"{'[' * 100_000}\n{LINE}\n", 1, "nested too deep"),
        (f"{LINE.replace(',1.0,', ',')}\n", 1, "not [log_time, clean_share, metrics, settings]"),
        ('{"schema": true}\n', 1, "not a line of a perfsuite history"),
        ('{"schema": -7}\n', 1, "schema -7 is not valid"),
        (f"{LINE.replace('2026-01-01', 'yesterday')}\n", 1, "not ISO 8601"),
    ],
)
def test_a_damaged_history_is_named_with_its_line_and_never_written(tmp_path, text, line, says):
    path = tmp_path / "h.jsonl"
    path.write_text(text)
    for touch in (file.read, lambda path: file.append(path, session(9)), lambda path: file.merge(path, [])):
        with pytest.raises(BaselineError) as error:
            touch(path)
        assert f"{path}:{line}: " in str(error.value)
        assert says in str(error.value)
    assert path.read_text() == text


def test_half_a_character_is_kept_as_its_escape(tmp_path):
    odd = session(1, revision=Revision(commit=commit(1), subject="half \udcff"))
    path = tmp_path / "h.jsonl"
    file.append(path, odd)
    file.merge(path, [written(tmp_path / "other", session(2))])
    assert (odd, session(2)) == file.read(path).sessions


def test_another_machine_or_another_result_is_not_added(tmp_path):
    path = written(tmp_path / "h", session(1))
    with pytest.raises(BaselineError, match=r"is of cpu \(cpu-new\), the history is of cpu \(cpu-test\)"):
        file.append(path, session(2, fingerprint="cpu-new"))
    with pytest.raises(BaselineError, match=r"with different values; .* history prune --session s0001"):
        file.append(path, session(1, cases=("t.py::b",)))
    assert (session(1),) == file.read(path).sessions


def test_a_last_line_without_its_end_is_completed(tmp_path):
    path = tmp_path / "h"
    path.write_text(LINE)
    file.append(path, session(2))
    assert (session(1), session(2)) == file.read(path).sessions


def test_a_link_out_of_its_folder_is_read_but_not_written(tmp_path):
    others = written(tmp_path / "others", session(1))
    before = others.read_bytes()
    linked = tmp_path / "repository" / "h.jsonl"
    linked.parent.mkdir()
    linked.symlink_to(others)
    assert file.read(linked).sessions == (session(1),)
    for use in (
        lambda: file.require_fit(linked, session(2)),
        lambda: file.append(linked, session(2)),
        lambda: file.merge(linked, [written(tmp_path / "new", session(3))]),
        lambda: file.prune(linked, sessions=["s1"]),
    ):
        told = r"is a link to .*others, outside .*repository; .* give the path of the file"
        with pytest.raises(BaselineError, match=told):
            use()
    assert others.read_bytes() == before
    others.unlink()
    for write in (file.require_fit, file.append):
        with pytest.raises(BaselineError, match="is a link to"):
            write(linked, session(2))
    assert not others.exists(), "a link that leads nowhere makes no file there"
    others.write_bytes(before)
    assert file.append(others, session(2))


def test_no_history_is_written_that_could_not_be_read(tmp_path, monkeypatch):
    path = written(tmp_path / "h", session(1))
    before = path.read_bytes()
    monkeypatch.setattr(file, "MOST_BYTES", len(before) + 10)
    with pytest.raises(BaselineError, match=r"at most \d+ can be read; .* perfsuite history prune"):
        file.append(path, session(2))
    assert path.read_bytes() == before


def test_prune_drops_what_is_named(tmp_path):
    path = written(tmp_path / "h", session(1), session(2, cases=("t.py::a", "t.py::b[x]")), session(50))
    before = path.read_text()
    drop = {"sessions": ["s0050"], "case": "t.py::a"}
    said = file.prune(path, **drop, dry_run=True)
    assert said == ("s0001: 1 case dropped", "s0002: 1 case dropped", "s0050: dropped, by its id")
    assert path.read_text() == before
    file.prune(path, **drop)
    assert [("s0002", ["t.py::b[x]"])] == [(one.session, list(one.cases)) for one in file.read(path).sessions]


# -- order -------------------------------------------------------------------------------------------------------


def names(sessions):
    return [one.session for one in sessions]


def test_sessions_are_in_the_order_of_the_commits_not_of_the_clock():
    bisected = dataclasses.replace(session(1), session="later", time=session(9).time)
    ordered = in_order([session(0), session(3), session(5), bisected], ScriptedRepository(count=6))
    assert (["s0000", "later", "s0003", "s0005"], (0, 1, 3, 5)) == (names(ordered.sessions), ordered.places)
    assert ordered.notes == ()


def test_dirty_trees_and_other_branches_stand_apart():
    dirty = session(1, revision=Revision(commit=commit(1), dirty=True, branch="main"))
    other = session(2, revision=Revision(commit=commit(77), branch="feature"))
    merged = session(3, revision=Revision(commit=commit(78), branch="main"))
    gone = session(4, revision=Revision(commit=commit(79), branch="feature"))
    beside = frozenset({commit(77), commit(78)})
    ordered = in_order([session(0), dirty, other, merged, gone], ScriptedRepository(count=5, beside=beside))
    assert names(ordered.sessions) == ["s0000"]
    assert [why for _, why in ordered.apart] == [
        "uncommitted changes",
        "on branch feature",
        "its commit is not on the branch's first-parent line",
        "on branch feature, whose commit is not in this clone",
    ]


@pytest.mark.parametrize(("shallow", "says"), [(True, "git fetch --unshallow"), (False, "it was rewritten")])
def test_a_commit_that_is_not_here_is_placed_by_time_and_that_is_said(shallow, says):
    sessions = [session(number) for number in (0, 1, 4, 5)]
    ordered = in_order(sessions, ScriptedRepository(count=6, first=4, shallow=shallow))
    assert (["s0000", "s0001", "s0004", "s0005"], (None, None, 0, 1)) == (names(ordered.sessions), ordered.places)
    assert "2 sessions placed by time" in ordered.notes[0]
    assert says in ordered.notes[0]


def test_sessions_without_a_commit_and_folders_without_git_are_ordered_by_time(tmp_path):
    unknown = session(2, revision=Revision())
    ordered = in_order([session(1), unknown, session(3)], ScriptedRepository(count=4))
    assert names(ordered.sessions) == ["s0001", "s0002", "s0003"]
    assert ordered.notes == ("1 session placed by time: measured outside of git, or without an answer of git",)
    outside = in_order([session(1), session(2)], Repository(root=tmp_path))
    assert names(outside.sessions) == ["s0001", "s0002"]
    assert "ordered by time" in outside.notes[0]


def test_a_real_repository_says_the_same(tmp_path):
    git(tmp_path, "init", "-q", "-b", "docs")
    (tmp_path / "docs").mkdir()  # the branch is not mistaken for the folder of its name
    here = Repository(root=tmp_path)
    assert not here.is_there()
    for subject in ("one", "two", "three"):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", subject)
        if subject == "two":
            git(tmp_path, "tag", "v1")
    assert list(here.first_parents("docs").values()) == ["one", "two", "three"]
    assert list(here.first_parents("docs", "v1").values()) == [here.revision("docs").subject] == ["three"]
    assert (here.branch(), here.last_tag("docs")[0]) == ("docs", "v1")
    assert here.present([here.commit("v1"), commit(1)]) == {here.commit("v1")}


# -- the command and the run -------------------------------------------------------------------------------------


def test_list_and_show(tmp_path, capsys):
    hostile = session(1, revision=Revision(commit=commit(1), branch="main", subject="red \x1b[31m alert"))
    path = written(tmp_path / "h.jsonl", session(0), hostile)
    told = printed(capsys, "list", path)
    assert "2026-01-01T01:00  0001cccccc on main  1 case  red \\x1b[31m alert" in told
    shown = printed(capsys, "show", path, "--repository", tmp_path)
    assert "2 sessions (0 apart), 1 case" in shown
    assert "a change needs 6 sessions of a case; no case has more than 2" in shown


def test_journals_are_added_once(tmp_path, capsys):
    path = tmp_path / "h.jsonl"
    file_of_run = journal(tmp_path / "j.jsonl", latte(1, 0.5), latte(2, 0.25))
    assert "session s with 2 cases added" in printed(capsys, "add", file_of_run, "--history", path)
    assert "is there already" in printed(capsys, "add", file_of_run, "--history", path)
    (one,) = file.read(path).sessions
    assert [-1.38629, -0.69315] == sorted(point.log_time for point in one.cases.values())
    assert all("samples_per_s" in point.metrics for point in one.cases.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "{}", "--fail-on=worse"), "--fail-on=worse is not valid"),
        (("show", "{}", "--case=nothing"), "no id of a case"),
        (("prune", "{}"), "give --older-than, --session or --case"),
        *(
            (("prune", "{}", f"--older-than={days}"), "days is not between 0 and 36500")
            for days in ("nan", "1e12", "-5")
        ),
        (("show", "absent"), "absent: cannot be read"),
        (("add", "absent", "--commit=nothing"), "is not a commit"),
    ],
)
def test_wrong_usage_says_what_to_do(tmp_path, capsys, arguments, says):
    path = written(tmp_path / "h.jsonl", session(0))
    assert says in printed(capsys, *(text.format(path) for text in arguments), code=4)


TEST = """
def test_one(perf):
    perf(Product())
"""


def test_a_run_adds_its_line_and_a_damaged_history_is_refused_before_it_measures(pytester, monkeypatch):
    ran = repository(pytester, monkeypatch, TEST)
    ran.run("--perf-history=h.jsonl").stdout.fnmatch_lines(["history *h.jsonl: 1 case added; perfsuite history show *"])
    path = pytester.path / "h.jsonl"
    (one,) = file.read(path).sessions
    (point,) = one.cases.values()
    assert {"test_it.py::test_one[cpu]"} == set(one.cases)
    assert (-0.69315, 1.0, {"tflops"}) == (point.log_time, point.clean_share, set(point.metrics))
    assert one.revision == Revision()
    assert "topology" not in json.loads(path.read_text())["environment"]

    path.write_text("<<<<<<< ours\n")
    jobs = len(ran.driver.timed())
    refused = ran.run("--perf-history=h.jsonl")
    assert "--perf-history: " in refused.stderr.str()
    assert "conflict marker" in refused.stderr.str()
    assert jobs == len(ran.driver.timed())
