"""Help strings begin with a verb and give the default; output of commands fits the terminal."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import unicodedata
from pathlib import Path

import pytest

from perfsuite.cli import main as cli
from perfsuite.plugin import declarations
from perfsuite.reports.layout import lay_out
from test_correctness.helpers import histories
from test_correctness.helpers.command_line import printed
from test_correctness.helpers.reference_pages import Declared
from test_correctness.test_golden import FOLDER, JOURNALS

VERBS = """
accept add allow answer change check compare confirm double drop estimate exit expect
explain export fail fill flush grow judge keep let limit list merge order pass pin print project
rank read recompute record register replace report run search select set shard skip split start stop
store take time train use warm write
"""
"""First words of a help string."""


def parsers(parser, name):
    """Yield a parser and those of its subcommands, with their names."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child, subparser in action.choices.items():
                yield from parsers(subparser, f"{name} {child}")


def command_arguments():
    """Yield name, help and whether the help must give a default, of each argument and subcommand of ``perfsuite``."""
    for name in cli.COMMANDS:
        subcommands = argparse.ArgumentParser().add_subparsers(parser_class=cli._Parser)
        yield f"perfsuite {name}", cli.find_command(name).help, False
        for path, parser in parsers(cli.add_command(subcommands, name), f"perfsuite {name}"):
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    yield from (
                        (f"{path} {choice.dest}", choice.help or "", False) for choice in action._choices_actions
                    )
                elif not isinstance(action, argparse._HelpAction):
                    is_optional = action.nargs in ("?", "*") or not (action.required or action.nargs == 0)
                    label = action.option_strings[-1] if action.option_strings else str(action.dest)
                    yield f"{path} {label}", str(action.help or ""), is_optional


def plugin_options():
    """Yield name, help and whether the help must give a default, of each option and ini key of the plugin."""
    declared = Declared()
    declarations.declare(declared)  # type: ignore[arg-type] # it has the methods that are used
    for found in declared.groups.values():
        yield from ((name, settings.get("help", ""), "action" not in settings) for name, settings in found)
    yield from ((f"ini {name}", text, True) for name, (text, _) in declared.inis.items())


def test_every_help_begins_with_a_verb_and_gives_the_default():
    wrong = []
    for name, text, has_default in [*command_arguments(), *plugin_options()]:
        first = re.match(r"[A-Za-z]+", text)
        if first is None or first[0] not in VERBS:
            wrong.append(f"{name}: the help does not begin with a verb: {text!r}")
        if has_default and "default" not in text:
            wrong.append(f"{name}: the help gives no default: {text!r}")
    assert not wrong, "\n".join(wrong)


def test_the_example_of_each_command_is_one_of_its_calls():
    for name in cli.COMMANDS:
        subcommands = (parser := argparse.ArgumentParser()).add_subparsers(parser_class=cli._Parser)
        cli.add_command(subcommands, name)
        program, *words = shlex.split(cli.find_command(name).example)
        assert program == "perfsuite"
        assert words[0] == name
        parser.parse_args(words)  # exits if the call is wrong


def test_metavars_are_short_names():
    for name in cli.COMMANDS:
        subcommands = argparse.ArgumentParser().add_subparsers(parser_class=cli._Parser)
        for path, parser in parsers(cli.add_command(subcommands, name), name):
            for action in parser._actions:
                if action.choices is None and action.nargs != 0 and not isinstance(action, argparse._SubParsersAction):
                    assert action.metavar, f"{path} {action.dest} has no metavar"
                    assert len(str(action.metavar)) <= 24, f"{path} {action.dest}: {action.metavar}"


@pytest.fixture
def places(tmp_path):
    """Files for the words of COMMANDS in capital letters."""
    root = Path(__file__).parent
    sessions = [histories.session(number, level=lambda _, number=number: 0.2 * (number > 8)) for number in range(18)]
    return {
        "JOURNAL": str(FOLDER / "kernels.jsonl"),
        "BASELINE": str(root.parent / "baselines" / "examples" / "cpu-example.json"),
        "HISTORY": str(histories.written(tmp_path / "history.jsonl", *sessions)),
        "--out=OUT": f"--out={tmp_path / 'out.json'}",
    }


PROJECT = ("--model=llama3-8b", "--platform=h100", "--global-batch=64")
COMMANDS = (
    "platforms",
    "platforms h100 s4000 oneflow-4x8-v100",
    "env",
    f"project {' '.join(PROJECT)} --layout=dp8 --sharding=parameters --curve=8..64 --mtbf=llama3 --sensitivity",
    f"advise {' '.join(PROJECT)} --world=16 --explain=dp16",
    "published",
    "published 003",
    "published 002/performance --cases --platform=s4000",
    "explain 000/memory --limit=2",
    "audit",
    "calibrate JOURNAL --out=OUT",
    "checklist JOURNAL",
    "baselines list BASELINE",
    "baselines show BASELINE",
    "fleet JOURNAL",
    "history show HISTORY",
    "history list HISTORY",
    "docs",
    "docs --find=busbw",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_output_fits_80_columns(command, monkeypatch, capsys, places):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([places.get(word, word) for word in command.split()]) in (cli.EXIT_OK, cli.EXIT_FOUND)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    # A single word, such as an id, a path or a mesh, is not broken.
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []


def test_a_file_gets_lines_of_any_length(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, printed(capsys, "platforms", "s4000").splitlines())) > 200


SHOWS = (("show",), ("show", "--show=tables"), ("show", "--show=cases"), ("report",), ("report", "--style=all"))


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("command", SHOWS, ids="-".join)
@pytest.mark.parametrize("journal", JOURNALS)
def test_no_line_of_a_run_is_wider_than_the_terminal(journal, command, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if cli.main([command[0], str(FOLDER / f"{journal}.jsonl"), *command[1:]]):
        assert "no report has a table for these results" in capsys.readouterr().err
        return
    lines = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert [] == [line for line in lines if len(line) > columns and len(line.split()) > 1]
    assert lines


def width_of(text):
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def test_chinese_names_take_two_columns_per_letter(tmp_path, monkeypatch, capsys):
    journal = tmp_path / "j.jsonl"
    text = (FOLDER / "kernels.jsonl").read_text(encoding="utf-8")
    journal.write_text(text.replace("test_matmul", "test_矩阵乘法性能测试"), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "60")
    lines = printed(capsys, "show", journal, "--show=tables").splitlines()
    assert [] == [line for line in lines if width_of(line) > 60 and len(line.split()) > 1]
    assert lay_out(("case", "us"), [("带宽", "1"), ("copy", "12")]) == ["case  us", "带宽   1", "copy  12"]
