"""Text of others does nothing but be read: every command and file over journals whose every text is an attack."""

import dataclasses
import json
import re
import time

import pytest

from benchmarks.store_torture import HARDWARE, case_of, run_of
from perfsuite.base.text import code_text, json_text, screen_text, without_paths
from perfsuite.baselines import store
from perfsuite.baselines.draft import NewRuns
from perfsuite.cli.main import EXIT_USAGE
from perfsuite.record.run import Revision
from perfsuite.reports.document import Grid
from perfsuite.reports.tables.grids import markdown
from test_correctness.helpers import hostile
from test_correctness.helpers.histories import session, written
from test_correctness.helpers.hostile import ACTIVE, COMMAND, TEXT, printed
from test_correctness.helpers.pages import Read

VARIANTS = ({}, {"keys": True}, {"only": "name"}, {"only": "platform"}, {"only": "started_at"})
PAGES = (".html", ".svg")


def require_harmless(command, code, out, err):
    assert code in (0, 1, EXIT_USAGE), command
    for text in (out, err):
        assert not ACTIVE.search(text.replace("\r\n", "\n")), (command, ACTIVE.search(text))
        assert not COMMAND.search(text), (command, COMMAND.search(text))
    if code == EXIT_USAGE:
        assert err.startswith("perfsuite: error: "), (command, err)
        assert err.count("\n") == 1, (command, err)


def require_harmless_file(path):
    text = path.read_bytes().decode()  # UTF-8, or it fails
    assert not ACTIVE.search(text), (path.name, ACTIVE.search(text))
    if path.suffix == ".md":
        prose = re.sub(r"(`+)[^`].*?[^`]\1(?!`)", "", text)
        assert not re.search(r"(?<!\\)<(script|img)|(?<!\\)\]\(javascript", prose), path.name
    if path.suffix in PAGES:
        tags = Read(text).tags
        assert "img" not in [tag for tag, _ in tags], path.name
        assert not [name for _, attributes in tags for name in attributes if name.startswith("on")], path.name
        assert text.count("<script") <= 1, path.name  # the page's own
    if path.name.startswith(("json", "bencher", "github", "calibration")):
        json.loads(text)


@pytest.mark.extended
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: next(iter(map(str, variant.values())), "texts"))
def test_no_command_and_no_file_of_a_journal_acts(variant, tmp_path):
    journal = hostile.hostile_journal(tmp_path / "j.jsonl", **variant)
    out = tmp_path / "out"
    out.mkdir()
    worked = 0
    for command in hostile.commands(journal, out):
        code, told, err = printed(command)
        require_harmless(command, code, told, err)
        worked += code == 0
    for path in out.rglob("*.*"):
        if path.is_file():
            require_harmless_file(path)
    assert worked >= (20 if variant in ({}, {"keys": True}) else 5)


@pytest.mark.parametrize("text", [TEXT, "\x1b[2J\x1b[31mowned\x1b[0m\n\x1b]52;c;aGk=\x07"])
def test_colours_are_the_only_escapes_that_reach_the_terminal(text, tmp_path, monkeypatch):
    monkeypatch.setattr(hostile, "TEXT", text)
    for number, variant in enumerate(VARIANTS):
        path = hostile.hostile_journal(tmp_path / f"{number}.jsonl", **variant)
        code, out, err = printed(["show", str(path), "--color=yes"])
        plain = re.sub(r"(?m)^\x1b\[3[123]m(.*)\x1b\[0m$", r"\1", out)
        require_harmless("show", code, plain, err)
        assert code or plain != out


def test_no_command_of_a_history_acts(tmp_path):
    revision = Revision(commit=TEXT, branch=TEXT, subject=TEXT)
    sessions = [session(number, cases=(TEXT, "b"), revision=revision) for number in range(3)]
    sessions = [dataclasses.replace(one, platform=TEXT, fingerprint=TEXT) for one in sessions]
    path = written(tmp_path / "h.jsonl", *sessions)
    for command in (
        ["history", "list", str(path)],
        ["history", "show", str(path), "--html", str(tmp_path / "h.html")],
        ["history", "prune", str(path), "--session", "s0000"],
        ["history", "merge", str(tmp_path / "two.jsonl"), str(path)],
        ["export", str(path), "--format", "csv"],
        ["show", str(path)],
    ):
        require_harmless(command, *printed(command))
    for name in ("h.html", "h.jsonl", "two.jsonl"):
        require_harmless_file(tmp_path / name)


def test_no_command_of_a_baseline_acts(tmp_path):
    case = dataclasses.replace(case_of(1), node=TEXT, workload=TEXT, parameters={TEXT: TEXT})
    hardware = dataclasses.replace(HARDWARE, key={TEXT: TEXT})
    run = dataclasses.replace(run_of("s1", 1), environment={TEXT: TEXT})
    path = store.update(tmp_path, hardware, [NewRuns(case=case, runs=(run,))], mode="append").path
    for command in (
        *([*words, str(path)] for words in (["baselines", "list"], ["baselines", "show"], ["baselines", "verify"])),
        ["baselines", "show", str(path), "--json"],
        ["baselines", "prune", str(path), "--case", "x"],
        ["show", str(path)],
        ["show", str(path), "--show", "cases"],
        ["report", str(path), "--html", str(tmp_path / "b.html")],
        ["export", str(path), "--format", "csv"],
    ):
        require_harmless(command, *printed(command))
    require_harmless_file(tmp_path / "b.html")


@pytest.mark.parametrize("command", ["show", "report", "history list", "baselines show", "audit", "import", "trace"])
def test_a_file_name_does_not_act_either(command, tmp_path):
    name = TEXT.replace("/", "").replace("\x00", "").replace("\ud800", "")
    for path in (tmp_path / name, tmp_path / f"{name}.jsonl"):
        path.write_text(f"{TEXT!a} {{")
        words = [*command.split(), str(path), *(["--out", str(tmp_path / "t")] if command == "trace" else [])]
        require_harmless(words, *printed(words))


def test_an_option_does_not_act(tmp_path):
    for command in (["show", "--no-such" + TEXT], [TEXT], ["published", TEXT], ["platforms", TEXT]):
        code, out, err = printed(command)
        assert code == EXIT_USAGE
        assert not ACTIVE.search(out + err)
        assert not COMMAND.search(out + err)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a::b", "a::b"),
        ("::error::x", r"\x3a:error::x"),
        ("a\n  ::group::x", "a\n  \\x3a:group::x"),
        ("see ##[endgroup]", r"see \x23#[endgroup]"),
        ("## heading", "## heading"),
        ("##vso[task.complete]", r"\x23#vso[task.complete]"),
        ("##teamcity[buildStop]", r"\x23#teamcity[buildStop]"),
        ("section_start:1:x\r\x1b[0Kx", r"section_start:1:x\r\x1b[0Kx"),  # of GitLab
        ("one\r\ntwo\n", "one\r\ntwo\n"),
        ("µs, 中文, ±", "µs, 中文, ±"),
    ],
)
def test_lines_are_no_commands_of_a_ci_service(text, shown):
    assert screen_text(text) == shown


def test_json_means_the_same():
    value = {"\u202e\x9b##[x]\x7f": ["\u00b5 \u4e2d\ud800", 1, None]}
    text = json_text(value)
    assert json.loads(text) == value
    assert not ACTIVE.search(text)
    assert "\u00b5 \u4e2d" in text


def test_a_cell_of_markdown_is_neither_a_tag_nor_a_link():
    grid = Grid(title="<b>", columns=("a|b",), rows=(("<img src=x>![a](b)",),), notes=("</td>a < b [x](y)",))
    assert markdown(grid) == [
        "### &lt;b>",
        "",
        "| a\\|b                   |",
        "| ---------------------- |",
        "| &lt;img src=x>![a]\\(b) |",
        "",
        "- &lt;/td>a < b [x]\\(y)",
        "",
    ]
    assert code_text("a`b") == "``a`b``"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("open ~/secret/m.bin", "open .../m.bin"),
        (r"open C:\Users\x\m.bin", r"open .../m.bin"),
        (r"C:\Users\Ann Lee\x.bin is gone", ".../x.bin is gone"),
        (r"at C:\\Users\\ann\\x.bin", "at .../x.bin"),
        (r"\\nas01\share\ann\m.bin", ".../m.bin"),
        ("PATH=/usr/lib:/home/ann/lib", "PATH=.../lib:.../lib"),
        ("No such file: '/home/ann lee/x y.json'", "No such file: '.../x y.json'"),
        ("in /home/ann: denied, C:\\Users\\ann", "in ~: denied, ~"),
        ("file:///home/ann/x.py", ".../x.py"),
        ("ENOENT:/home/ann/x.py, --log=~ann/y", "ENOENT:.../x.py, --log=.../y"),
        ("c++ -I/home/ann/venv/include '-L/home/ann/lib' -c x", "c++ -I.../include '-L.../lib' -c x"),
        (r"RuntimeError('a\n/home/ann/x.py: b\n\t/home/ann/y.py')", r"RuntimeError('a\n.../x.py: b\n\t.../y.py')"),
        ("无法打开文件/home/ann/x.py", "无法打开文件.../x.py"),
    ],
)
def test_no_folder_of_an_absolute_path_is_told(text, told):
    assert without_paths(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "https://github.com/a/b/c, s3://bucket/a/b",
        "test_perf/test_x.py::test_a[cpu/ws2]",
        "10 GB/s, 3/4, and/or, ../x/y, ~5 GB/s, 1/2/3, ~12GB/s, ~3/4, x-y/a/b",
        "a\nb and 'a\\nb\\nc'",
        "C: drive",
    ],
)
def test_what_is_no_absolute_path_stays(text):
    assert without_paths(text) == text


def test_paths_of_a_long_message_are_cut_in_time_that_grows_with_its_length():
    began_s = time.process_time()
    without_paths("'" + "/a" * 100_000)  # a quote that nobody closes: minutes where the time grows with the square
    assert time.process_time() - began_s < 10


def test_a_long_name_of_others_does_not_hide_the_message(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_text(f'{{"{"9" * 5000}": 1}}\n')
    code, _, err = printed(["history", "list", str(path)])
    assert (EXIT_USAGE, True) == (code, len(err) < 1000)
