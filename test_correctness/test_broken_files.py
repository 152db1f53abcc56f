"""Broken and hostile journals, baselines, histories and logs: one line, the documented exit code, no traceback."""

import gzip
import json
import math
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.store_torture import make_file
from perfsuite.base.errors import BaselineError, JournalError, PerfsuiteError
from perfsuite.baselines import store
from perfsuite.cli import main as cli
from perfsuite.cli.main import EXIT_USAGE
from perfsuite.history import file as history_file
from perfsuite.metrics import read_run
from perfsuite.projection.calibration import read_calibration
from perfsuite.record.codec import plain_json
from perfsuite.record.journal import durations_s, read_journal
from perfsuite.reports.notable import equal_work
from test_correctness.helpers import hostile, import_samples
from test_correctness.helpers.histories import session, written
from test_correctness.helpers.hostile import alike, lines_of, places, printed, put
from test_correctness.helpers.import_samples import SAMPLES

COMMANDS = (
    ["show"],
    ["show", "--show", "tables"],
    ["report"],
    ["export", "--format", "json"],
    ["checklist"],
    ["trace", "--out", "t"],
    ["history", "list"],
    ["history", "add"],
    ["baselines", "show"],
    ["baselines", "verify"],
    ["audit"],
    ["import"],
    ["calibrate"],
)
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BROKEN = {
    "empty": b"",
    "a newline": b"\n",
    "white space": b"  \n \n",
    "not UTF-8": b'{"header": "\xff\xfe"}\n',
    "UTF-16": '{"header": {}}\n'.encode("utf-16"),
    "NUL": b"\0" * 1000,
    "nested": DEEP + b"\n",
    "a nested header": b'{"header":' + DEEP + b"}\n",
    "many digits": b'{"header": ' + b"9" * 5000 + b"}\n",
    "digits that no float holds": b'{"header": {"schema": 1' + b"0" * 400 + b"}}\n",
    "NaN": b'{"header": NaN}\n',
    "1e400": b'{"header": {"schema": 1e400}}\n',
    "twice": b'{"header": {"schema": 1, "schema": 2}}\n',
    "gzip": gzip.compress(b'{"header": {}}\n'),
    "cut": b'{"header": {"sess',
    "no header": b'{"result": {}}\n',
    "a list": b"[[[]]]\n",
    "a number": b"1\n",
    "null": b"null\n",
    "a program": b"#!/bin/sh\nexit 0\n",
    "half a character": b'{"header": {"session": "\\ud800"}}\n',
}


def require_one_line(command, code, out, err):
    assert code in (0, 1, EXIT_USAGE), (command, code)
    assert "Traceback" not in out + err
    assert "this is a defect" not in err, (command, err)
    if code == EXIT_USAGE:
        assert err.startswith("perfsuite: error: "), (command, err)
        assert err.count("\n") == 1, (command, err)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_no_command_ends_in_a_traceback(name, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"file{suffix}"
    path.write_bytes(BROKEN[name])
    for command in COMMANDS:
        require_one_line(command, *printed([*command, str(path)]))


@pytest.mark.parametrize("kind", ["folder", "pipe", "zero", "absent", "loop", "socket name"])
def test_what_is_no_file_is_refused_and_nobody_waits(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "socket name":
        path.symlink_to("\udcff" * 20)
    for command in COMMANDS:
        if kind in ("pipe", "zero") and command in (["audit"], ["import"]):
            continue  # these read what a pipe gives
        code, out, err = printed([*command, str(path)])
        require_one_line(command, code, out, err)
        assert code == EXIT_USAGE or command in (["baselines", "verify"], ["baselines", "show"]), command
    for read in (read_journal, store.read, history_file.read, read_calibration):
        with pytest.raises(PerfsuiteError):
            read(path)
    assert durations_s(path, "x") == {}


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("perfsuite.record.journal._LONGEST_LINE", 2000)
    path = hostile.journal(tmp_path / "j.jsonl")
    with pytest.raises(PerfsuiteError, match=r"line \d+: it has more than 2000 bytes"):
        read_journal(path)


@pytest.mark.parametrize(
    ("place", "new", "says"),
    [
        (("world_size",), -5, "world_size is -5, but it must be finite and at least 1"),
        (("world_size",), 7, "the measurement of world_size 7 has 5 samples and 1 rank;"),
        (("measurement", "times_s", 3), -0.001, "times_s is -0.001, but it must be finite and at least 0"),
        (("measurement", "times_s", 3), math.nan, "times_s is nan, but it must be finite and at least 0"),
        (("measurement", "times_s"), [], "the measurement of world_size 1 has 0 samples and 1 rank"),
        (("measurement", "iterations"), 0, "iterations is 0, but"),
        (("measurement", "ranks", 0, "median_s"), math.inf, "ranks is inf, but"),
        (("metrics", 0, "value"), math.nan, "tflops is nan, but it must be finite;"),
        (("metrics", 0, "peak", "value"), -1.0, "peak of tflops is -1.0, but"),
        (("work", "flops", "exact"), -1.0, "work is -1.0, but"),
    ],
)
def test_a_journal_with_a_figure_that_no_run_writes_is_refused_with_its_line(samples, place, new, says):
    folder, lines, _ = samples
    number = next(number for number, line in enumerate(lines) if "result" in line)
    path = folder / "changed.jsonl"
    path.write_text(text_of([*lines[:number], put(lines[number], ("result", *place), new), *lines[number + 1 :]]))
    for command in (["show"], ["export", "--format", "csv"], ["fleet"]):
        code, _, err = printed([*command, str(path)])
        assert (code == EXIT_USAGE and f"line {number + 1}: {says}" in err) or command == ["fleet"], err


def test_a_key_that_occurs_twice_is_refused(samples):
    folder, lines, _ = samples
    path = folder / "changed.jsonl"
    path.write_text(text_of(lines).replace('"world_size":1,', '"world_size":1,"world_size":8,', 1))
    with pytest.raises(JournalError, match='the key "world_size" occurs twice in one object'):
        read_journal(path)
    (folder / "config.json").write_text('{"hidden_size": 64, "hidden_size": 128}')
    said = printed(["project", "--model", str(folder / "config.json"), "--global-batch", "8", "--platform", "h100"])[2]
    assert 'the key "hidden_size" occurs twice' in said


ODD = (10**400, -(10**400), 10**5, 10**18, -1, 0, 1e308, -1e308, 5e-324, math.nan, math.inf)
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(ODD),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\ud800", "\x1b[2J", "1", "nan", "../../x", "a" * 5000]),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner)),
)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    lines = lines_of(hostile.journal(folder / "j.jsonl"))
    kinds = {}
    for number, line in enumerate(lines):
        for place in places(line):
            kinds.setdefault((next(iter(line)), *alike(place)), (number, place))
    return folder, lines, list(kinds.values())


def text_of(lines):
    return "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)


def refusal(read, kind=PerfsuiteError):
    """Why something is not read; empty where it is."""
    try:
        read()
    except kind as error:
        return str(error)
    return ""


def read_all(path):
    journal = read_run(path)
    for result in journal.results.values():
        _ = (result.metrics, result.measurement, result.values, result.above_peak)
    _ = (journal.missing, equal_work(journal.results.values()))


def changed(samples, data):
    folder, lines, kinds = samples
    number, place = data.draw(st.sampled_from(kinds))
    new = data.draw(st.text(max_size=5) if isinstance(place[-1], tuple) else ANYTHING)
    path = folder / "changed.jsonl"
    path.write_text(text_of([*lines[:number], put(lines[number], place, new), *lines[number + 1 :]]))
    return path


@pytest.mark.parametrize("name", ["\n", "a\x1b[2J"])
def test_a_name_that_ends_a_line_stands_in_a_message_as_an_escape(samples, name):
    folder, lines, _ = samples
    path = folder / "changed.jsonl"
    path.write_text(text_of([*lines, {"peaks": {name: {}}}]))
    with pytest.raises(JournalError, match=re.escape(name.encode("unicode_escape").decode())):
        read_journal(path)


@given(data=st.data())
@settings(max_examples=120)
def test_a_changed_journal_is_read_or_refused(samples, data):
    path = changed(samples, data)
    assert "\n" not in refusal(lambda: read_all(path))


@given(data=st.data())
@settings(max_examples=25)
def test_a_changed_journal_is_shown_or_refused(samples, data):
    path = changed(samples, data)
    commands = [command for command in hostile.commands(path, samples[0]) if "--html" not in command]
    code, out, err = printed(data.draw(st.sampled_from(commands)))
    assert code in (0, 1, EXIT_USAGE)
    assert "Traceback" not in out + err
    assert code != EXIT_USAGE or err.count("\n") == 1


@given(data=st.data())
@settings(max_examples=40)
def test_a_changed_baseline_or_history_is_read_or_refused(samples, data):
    folder = samples[0]
    baseline = folder / "cpu" / "cpu-torture.json"
    if not baseline.exists():
        make_file(folder, cases=1, runs=2)
        written(folder / "h.jsonl", session(0), session(1))
    for path, read in ((baseline, store.read), (folder / "h.jsonl", history_file.read)):
        whole = lines_of(path) if path.suffix == ".jsonl" else [json.loads(path.read_text())]
        place = data.draw(st.sampled_from(list(places(whole[0]))))
        new = data.draw(st.text(max_size=5) if isinstance(place[-1], tuple) else ANYTHING)
        other = path.with_name(f"changed{path.suffix}")
        other.write_text(text_of([put(whole[0], place, new), *whole[1:]]))
        assert "\n" not in refusal(lambda read=read, other=other: read(other), BaselineError)


NASTY = (*ODD, None, True, "", "a" * 50, "1" * 50, [], [[]], {})


@pytest.mark.extended
@pytest.mark.parametrize(
    "sample", ["pytest-benchmark/0003.json", "superbench/results-summary.jsonl", "nccl-tests/constructed-v3.json"]
)
def test_a_changed_file_of_another_tool_is_read_or_refused(tmp_path, sample):
    lines = (SAMPLES / sample).read_text().splitlines()
    plain = [json.loads("\n".join(lines))] if sample.endswith(".json") else [json.loads(line) for line in lines]
    path = tmp_path / f"other{sample[-6:]}"
    for place in places(plain[0]):
        for new in ("", "a") if isinstance(place[-1], tuple) else NASTY:
            path.write_text(text_of([put(plain[0], place, new), *plain[1:]]))
            assert "\n" not in refusal(lambda: import_samples.read(path)), (place, new)


def test_what_nobody_expected_is_a_line_and_on_demand_a_traceback(tmp_path, monkeypatch, capsys):
    def defect(path):
        raise AttributeError("'list' object has no attribute 'items'\nsecond line")

    monkeypatch.setattr("perfsuite.cli.show.read_results", defect)
    assert cli.main(["show", "x"]) == EXIT_USAGE
    told = capsys.readouterr().err
    said = "AttributeError: 'list' object has no attribute 'items' (test_broken_files.py"
    assert told.startswith(f"perfsuite: error: {said}")
    assert told.count("\n") == 1
    monkeypatch.setenv(cli.TRACEBACK, "1")
    with pytest.raises(AttributeError):
        cli.main(["show", "x"])


@pytest.mark.parametrize("text", [b"1" * 301, b"[-" + b"1" * 400 + b"]", b'{"a": ' + b"[" * 50_000, b"9" * 5000])
def test_json_that_nobody_counts_with_is_refused(text):
    with pytest.raises(ValueError, match=r"digits|deep|limit"):
        plain_json(text)


def test_a_text_of_many_digits_is_a_text():
    assert plain_json('["' + "1" * 400 + '", 12]') == ["1" * 400, 12]
