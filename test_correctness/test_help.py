"""Help strings begin with a verb and give the default; output of commands fits the terminal."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from perfsuite.cli import main as cli
from perfsuite.plugin import declarations
from test_correctness.helpers import histories

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


class _Recorder:
    """Takes the declarations of the plugin in place of pytest's parser."""

    def __init__(self):
        self.found: list[tuple[str, str, bool]] = []

    def getgroup(self, *_):
        return self

    def addoption(self, name, **settings):
        self.found.append((name, str(settings.get("help", "")), "action" not in settings))

    def addini(self, name, text, **_):
        self.found.append((f"ini {name}", text, True))


def plugin_options():
    """Return name, help and whether the help must give a default, of each option and ini key of the plugin."""
    recorder = _Recorder()
    declarations.declare(recorder)  # type: ignore[arg-type] # it has the methods that are used
    return recorder.found


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
        "JOURNAL": str(root / "golden" / "kernels.jsonl"),
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
    assert cli.main(["platforms", "s4000"]) == cli.EXIT_OK
    assert max(map(len, capsys.readouterr().out.splitlines())) > 200
