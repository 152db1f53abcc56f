"""Write the reference pages that follow from the code: options, commands, Python interface, tables of other pages.

Run ``python -m test_correctness.helpers.reference_pages`` after a change of an option, a command, a help text or a
public docstring.  A page is generated as a whole, or between ``<!-- NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import perfsuite
from perfsuite import metrics
from perfsuite.audit.audit import RULES
from perfsuite.base.collectives import TRAFFIC, busbw_factor
from perfsuite.base.units import percent
from perfsuite.baselines.runs import MetricMeaning, RunSummary
from perfsuite.cli import main as command_line
from perfsuite.cli.audit import label_lines
from perfsuite.expectations.rows import Expectation
from perfsuite.gate.quantity import rule_for
from perfsuite.history.file import CasePoint, HistorySession
from perfsuite.imports.formats import FORMATS
from perfsuite.metrics import flop_conventions as flops
from perfsuite.models.program import Program
from perfsuite.platforms import load_catalog
from perfsuite.platforms.base import DeviceModel
from perfsuite.plugin import declarations, fixtures, gate_options, hooks, options
from perfsuite.published import records
from perfsuite.published.lookup import shipped
from perfsuite.record import result, run
from perfsuite.reports.tables.spec import TableSpec
from perfsuite.runtime.failures import UPSTREAM
from test_correctness.helpers.markdown import attributes, cell, code, quoted, table

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "reference"
COMMAND = "python -m test_correctness.helpers.reference_pages"
NOTE = f"<!-- Generated from the code. Do not edit: run {COMMAND} -->"
VARIABLES = {
    "PERFSUITE_FAMILIES": "Device families that are not installed as packages: `name=module:Class`, with commas.",
    "PERFSUITE_FORKSERVER": "Set by perfsuite in rank processes, so that it finds those that are left. Do not set it.",
    "PERFSUITE_KEY": "Key of a launch on several hosts, as text.",
    "PERFSUITE_KEY_FILE": "File with that key, mode 0600, on every host: `perfsuite docs clusters`.",
    "PERFSUITE_NO_PEAKS": "Set by perfsuite in the runs of an A/B comparison, which need no measured peak.",
    "PERFSUITE_SEEDS": "Folder with the five published reports; tests then compare every figure with the text.",
    "PERFSUITE_TRACEBACK": "`1` prints the traceback of an unexpected error of a command, for a bug report.",
    "PERFSUITE_TREE": "Set by perfsuite in the runs of an A/B comparison: the checkout under test.",
    "PERFSUITE_TURNS": "Set by perfsuite in the runs of an A/B comparison: the pipe for its commands.",
    "PERFSUITE_WRAPPER": "Command put before the rank processes, such as `nsys profile -o ranks`.",
    "GITHUB_STEP_SUMMARY": "Set by GitHub Actions: the file that also gets the summary of `--perf-summary`.",
}
"""Variables that perfsuite reads -> their effect."""


def head(title: str, text: str) -> list[str]:
    return [f"# {title}", "", NOTE, "", *textwrap.dedent(text).strip().splitlines(), ""]


class Declared:
    """Replaces pytest's parser and keeps the declared options by group."""

    def __init__(self) -> None:
        self.groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.inis: dict[str, tuple[str, dict[str, Any]]] = {}
        self._options: list[tuple[str, dict[str, Any]]] = []

    def getgroup(self, name: str, description: str = "", **more: Any) -> Declared:
        self._options = self.groups.setdefault(description.removeprefix("perfsuite: "), [])
        return self

    def addoption(self, *names: str, **settings: Any) -> None:
        self._options.append((", ".join(names), settings))

    def addini(self, name: str, help: str, **settings: Any) -> None:
        self.inis[name] = (help, settings)


def options_page() -> list[str]:
    declared = Declared()
    declarations.declare(declared)  # type: ignore[arg-type]
    lines = head(
        "Options of a pytest run",
        """
        This page lists every option that perfsuite adds to pytest, every ini key and every environment variable.
        Use it to look up a default. An option on the command line counts before its ini key.

        ```
        pytest test_perf -k all_reduce --perf-scale=small --perf-show=tables
        ```

        pytest's own options and those of pytest-benchmark work as usual. `--benchmark-max-time` and
        `--benchmark-min-rounds` limit the samples, and `--benchmark-disable` runs every case once without timing.
        """,
    )
    for title, found in declared.groups.items():
        lines += [f"## {title[:1].upper()}{title[1:]}", ""]
        lines += table(
            ("option", "effect", "default", "ini key"),
            ((code(_called(name, settings)), *_effect(settings)) for name, settings in found),
        )
    lines += ["## Ini keys", "", "Write them below `[pytest]` of `pytest.ini` or `[tool.pytest.ini_options]`.", ""]
    lines += table(
        ("key", "effect", "default"),
        ((code(name), *_effect({"help": text})[:2]) for name, (text, _) in sorted(declared.inis.items())),
    )
    lines += ["## Environment variables", ""]
    return lines + table(("variable", "effect"), ((code(name), text) for name, text in sorted(VARIABLES.items())))


def _called(name: str, settings: dict[str, Any]) -> str:
    """Return an option with its value, as it is written."""
    value = settings.get("metavar", "")
    return name + (f"[={value}]" if settings.get("nargs") == "?" else f"={value}" if value else "")


def _effect(settings: dict[str, Any]) -> tuple[str, str, str]:
    """Return effect, default and ini key of an option, from its help ``EFFECT (default: VALUE; ini: KEY)``."""
    effect, found, rest = settings["help"].partition(" (default: ")
    if not found:
        return cell(effect), "off", ""
    inside, _, after = rest.partition(")")
    default, _, key = inside.partition("; ini: ")
    return cell(effect + after), cell(default), code(key)


def commands_page() -> list[str]:
    lines = head(
        "Commands",
        """
        This page lists every command of `perfsuite` with its arguments. Use it to look up an option; `perfsuite`
        alone prints the commands in the same groups, and `perfsuite COMMAND --help` prints one. Exit code 0 means done,
        4 wrong usage or an unreadable file.

        ```
        perfsuite show                                  # the screen of the newest run again
        perfsuite report JOURNAL --html run.html        # one page with charts
        ```

        ## Common options

        | option | effect |
        | --- | --- |
        | `--json` | print JSON instead of text |
        | `--platform-file FILE` | add the platforms and `[environment]` of a TOML file; repeatable (default: none) |
        """,
    )
    for group, names in command_line.GROUPS.items():
        lines += [f"## {group[:1].upper()}{group[1:]}", ""]
        for name in names:
            command = command_line.find_command(name)
            parser = argparse.ArgumentParser(prog=f"perfsuite {name}")
            command.arguments(parser)
            lines += [f"### perfsuite {name}", "", f"> {cell(command.help)}", "", "```", command.example, "```", ""]
            lines += _arguments(parser)
            found = f"Exit code 1: {command.found}." if command.found else ""
            notes = [*(line for line in (parser.epilog or "").splitlines() if "exit codes" not in line), found]
            shown = [f"- {cell(note)}" for note in notes if note.strip()]
            lines += [*shown, ""] if shown else []
    return lines


_COMMON = ("--json", "--platform-file")
"""Options that the page explains once."""
_OF_PROJECT = ("training step", "devices and their rates")
"""Groups of options that other commands share with ``perfsuite project``."""


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the arguments of a command as a table, and those of its subcommands."""
    formatter, rows, common = parser._get_formatter(), [], []
    below: dict[str, argparse.ArgumentParser] = {}
    plain = (parser._positionals, parser._optionals)
    for group in sorted(parser._action_groups, key=lambda group: group not in plain):
        if group not in plain and group._group_actions:
            is_shared = group.title in _OF_PROJECT and parser.prog != "perfsuite project"
            rows.append(
                (f"*{group.title}*", "as [perfsuite project](#perfsuite-project), without --recipe" * is_shared)
            )
            if is_shared:
                continue
        for action in group._group_actions:
            if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
                continue
            if isinstance(action, argparse._SubParsersAction):
                below.update(action.choices)
                rows += [(code(each.dest), cell(each.help or "")) for each in action._choices_actions]
                continue
            value = action.metavar if isinstance(action.metavar, str) else ""
            value = value or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
            value = "" if action.nargs == 0 else f"{value} ..." if action.nargs in ("*", "+") else value
            called = ", ".join(action.option_strings)
            row = (code(f"{called} {value}" if called else value), cell(formatter._expand_help(action)))
            (common if called in _COMMON else rows).append(row)
    if common:
        rows.append((", ".join(sorted(name for name, _ in common)), "see [common options](#common-options)"))
    yield from table(("argument", "effect"), rows)
    for name, parser_below in below.items():
        yield from (f"#### {parser.prog} {name}", "")
        yield from _arguments(parser_below)


def _function(name: str, function: Callable[..., Any]) -> list[str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(body, ast.FunctionDef)
    called = textwrap.fill(f"{name}({ast.unparse(body.args)})", 100, subsequent_indent=" " * (len(name) + 1))
    return [f"### {name}", "", "```python", called, "```", "", *quoted(inspect.getdoc(function) or "")]


def _fixtures(module: ModuleType) -> dict[str, str]:
    return {
        name: inspect.getdoc(getattr(each, "_fixture_function", None) or inspect.unwrap(each)) or ""
        for name, each in sorted(vars(module).items())
        if type(each).__name__ == "FixtureFunctionDefinition" or hasattr(each, "_pytestfixturefunction")
        if not name.startswith("_")
    }


def markers() -> list[str]:
    """Return the lines ``name(arguments): effect`` of all markers."""
    config = mock.MagicMock()
    with mock.patch.object(gate_options, "_read", return_value=mock.Mock(fresh=False)):
        gate_options.configure(config)
    with mock.patch.object(options, "read_settings"), mock.patch.object(options, "short_names", return_value=True):
        options.configure(config)
    return sorted(call.args[1] for call in config.addinivalue_line.call_args_list)


def platforms_page() -> list[str]:
    lines = head(
        "Platforms",
        """
        This page lists the device models whose peaks perfsuite has. Use it to look up a name for `-k` and
        `--perf-platform`, or a peak. `perfsuite platforms NAME` also prints the source of each number:

        ```
        perfsuite platforms h100
        pytest test_perf -k h100
        ```

        Peaks are dense figures per device, in TFLOPS (integers: TOPS). `~` marks a nominal peak: devices exceed it.
        A row of your own: [add-a-platform.md](../how-to/add-a-platform.md).
        """,
    )
    dtypes = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
    rows = (
        (
            *(code(name), model.title, model.family, *(_peak(model.tflops.get(dtype)) for dtype in dtypes)),
            *(_peak(peak) for peak in (model.memory, model.memory_bandwidth, model.link)),
        )
        for name, model in load_catalog().models.items()
    )
    heads = ("name", "device", "family", *dtypes, "memory GiB", "memory GB/s", "link GB/s, one direction")
    return lines + table(heads, rows)


def _peak(peak: result.Peak | None) -> str:
    return f"{'~' * (peak.kind == 'nominal')}{peak.value:g}" if peak else ""


def api_page() -> list[str]:
    """Fixtures, markers, decorators, hooks and classes for a test author."""
    public = {name: getattr(perfsuite, name) for name in perfsuite.__all__ if not name.startswith("_")}
    errors = {name: each for name, each in public.items() if isinstance(each, type) and issubclass(each, Exception)}
    classes = [each for name, each in public.items() if inspect.isclass(each) and name not in errors]
    functions = {name: each for name, each in public.items() if not inspect.isclass(each)}
    lines = head(
        "Python interface",
        """
        This page lists the fixtures, markers, decorators, hooks and classes for your own performance tests. See
        [add-a-workload.md](../how-to/add-a-workload.md) first: it explains how to use them.

        ```python
        import torch

        from perfsuite import world_sizes


        def double(rank, elements):
            x = torch.ones(elements, device=rank.device)
            return lambda: x.mul_(2)


        @world_sizes(1, 2)
        def test_double(perf, perf_ranks):
            result = perf(double, on=perf_ranks, elements=1 << 20)
            assert result.median_s < 1
        ```

        All names come from `perfsuite`: `from perfsuite import Workload, world_sizes`.
        """,
    )
    named = ((code(name), cell(text)) for name, text in _fixtures(fixtures).items())
    marked = (
        (code(name), cell(text))
        for name, _, text in (line.partition(": ") for line in markers())
        if not text.startswith(("set by", "set on"))  # for perfsuite alone
    )
    lines += ["## Fixtures", "", *table(("fixture", "meaning"), named)]
    lines += ["## Markers", "", *table(("marker", "effect"), marked), "## Decorators", ""]
    for name, function in functions.items():
        lines += _function(name, function)
    lines += ["## Classes", ""]
    for kind in [*classes, result.RankFacts, result.Peak]:
        fields = ((code(name), code(form), cell(text)) for name, (form, text) in attributes(kind).items())
        lines += [f"### {kind.__name__}", "", *quoted(inspect.getdoc(kind) or "")]
        lines += table(("name", "type", "meaning"), fields)
    lines += ["## Exceptions", ""]
    raised = ((code(name), cell((inspect.getdoc(each) or "").partition("\n\n")[0])) for name, each in errors.items())
    lines += table(("exception", "meaning"), raised)
    lines += ["## Hooks", "", "Write them in a `conftest.py` or an installed pytest plugin.", ""]
    for name, function in vars(hooks).items():
        if name.startswith("pytest_") and callable(function):
            lines += _hook(name, function)
    return lines


def _hook(name: str, function: Callable[..., Any]) -> list[str]:
    """Return a hook with its docstring, whose example after ``::`` is code."""
    prose, _, example = (inspect.getdoc(function) or "").partition("::\n")
    lines = [f"### {name}", "", *quoted(prose.rstrip() + "." * (bool(example) and not prose.rstrip().endswith(".")))]
    shown, _, after = textwrap.dedent(example.strip("\n")).partition("\n\n\n")
    return lines + (["```python", shown, "```", "", *quoted(after)] if shown else [])


def metric_lines(family: ModuleType) -> Callable[[], list[str]]:
    """Return a function that returns the table of a family of metrics."""
    heads = ("metric", "unit", "better", "convention", "one run decides", "meaning")
    rows = [
        (code(each.name), each.unit, each.better, cell(each.convention), _exact_rule(each), cell(each.doc))
        for each in family.METRICS
    ]
    return lambda: table(heads, rows)


def _exact_rule(spec: metrics.MetricSpec) -> str:
    """Return the change that one run may have, or nothing for a metric that scatters."""
    rule = rule_for(spec.name, MetricMeaning(unit=spec.unit, better=spec.better), metrics.REGISTRY)
    return "" if rule is None else f"{rule[1]:g}" if rule[1] else percent(rule[0])


def field_lines(*kinds: type) -> Callable[[], Iterator[str]]:
    """Return a function that yields the fields of classes of a file, a table each."""

    def lines() -> Iterator[str]:
        for kind in kinds:
            fields = ((name, *entry) for name, entry in attributes(kind).items() if name in kind.__annotations__)
            yield from (f"**{kind.__name__}**", "")
            yield from table(
                ("field", "type", "meaning"), ((code(name), code(form), cell(text)) for name, form, text in fields)
            )

    return lines


def factor_lines() -> list[str]:
    rows = ((code(name), *(f"{busbw_factor(name, ranks):g}" for ranks in (2, 4, 8))) for name in TRAFFIC)
    return table(("factor", "n = 2", "n = 4", "n = 8"), rows)


def convention_lines() -> list[str]:
    """Return the conventions of counted operations as a table, from the first lines of their functions."""
    named = zip(
        flops.count_all(flops.LLAMA2_7B),
        (flops.exact, flops.executed, flops.six_n, flops.palm, flops.megatron, flops.colossalai),
        strict=True,
    )
    rows = ((name, cell((inspect.getdoc(counted) or "").partition("\n\n")[0])) for name, counted in named)
    return table(("convention", "operations of a sample"), rows)


def import_lines() -> list[str]:
    return table(("format", "input"), ((code(each.name), cell(each.about)) for each in FORMATS))


def upstream_lines() -> list[str]:
    rows = ((code(text), fault.replace("NCCL_ALGO", "`NCCL_ALGO`")) for text, fault in UPSTREAM.items())
    return table(("phrase", "fault"), rows)


def audit_lines() -> list[str]:
    rows = (
        (rule.name, rule.severity, f"{rule.label} ({rule.reach})" if rule.label else "none", cell(rule.checks))
        for rule in RULES
    )
    return table(("rule", "severity", "label", "checks"), rows)


def exit_lines() -> list[str]:
    found = {name: command_line.find_command(name).found for name in command_line.COMMANDS}
    rows = ((code(f"perfsuite {name}"), cell(text)) for name, text in found.items() if text)
    return table(("command", "exit code 1"), rows)


PAGES: dict[str, Callable[[], list[str]]] = {
    "options": options_page,
    "commands": commands_page,
    "api": api_page,
    "platforms": platforms_page,
}
PARTS: dict[tuple[str, str], Callable[[], Iterable[str]]] = {
    **{("metrics", family.__name__.rpartition(".")[2]): metric_lines(family) for family in metrics._FAMILIES},
    ("metrics", "factors"): factor_lines,
    ("metrics", "conventions"): convention_lines,
    ("../how-to/imports", "formats"): import_lines,
    ("../how-to/add-a-table", "fields"): field_lines(TableSpec),
    ("../how-to/add-a-platform", "keys"): field_lines(DeviceModel),
    ("../how-to/acceptance", "keys"): field_lines(Expectation),
    ("published", "program"): field_lines(Program),
    ("../contributing/upstream", "phrases"): upstream_lines,
    ("published", "labels"): lambda: label_lines(shipped()),
    ("published", "rules"): audit_lines,
    ("published", "files"): field_lines(
        records.PublishedReport, records.PublishedTable, records.PublishedColumn, records.PublishedRow
    ),
    ("verdicts", "exit codes"): exit_lines,
    ("files", "journal"): field_lines(run.Header, run.Revision, run.GateRecord, run.RunEnd),
    ("files", "runs"): field_lines(RunSummary),
    ("files", "history"): field_lines(HistorySession, CasePoint),
}
"""(page, name of the part) -> its lines."""


def generated(page: str, text: str) -> str:
    """Return the new text of a page of docs/reference, from its present ``text``."""
    if page in PAGES:
        return "\n".join(PAGES[page]()).rstrip("\n") + "\n"
    for (name, part), lines in PARTS.items():
        if name == page:
            body = "\n".join(lines()).rstrip("\n")
            pattern = rf"(?s)(<!-- {part} -->\n).*?(<!-- end of {part} -->)"
            text, count = re.subn(pattern, lambda at, body=body: f"{at[1]}{body}\n{at[2]}", text)
            assert count == 1, f"{page} has no place <!-- {part} --> ... <!-- end of {part} -->"
    return text


def main() -> None:
    for page in [*PAGES, *dict.fromkeys(name for name, _ in PARTS)]:
        path = FOLDER / f"{page}.md"
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        new = generated(page, old)
        path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'unchanged' if new == old else 'written'}")


if __name__ == "__main__":
    sys.exit(main())
