"""What the documents name is there: pages, files, and every command that a figure is said to come from."""

import argparse
import ast
import re
import shlex

import pytest

from perfsuite.base.git import GitFailed, git
from perfsuite.cli.main import COMMANDS as COMMAND_LINE
from test_correctness.helpers.command_line import printed, refused, run
from test_correctness.helpers.scripted_driver import ROOT
from tools import docs_site

EXAMPLES = ROOT / "examples"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *EXAMPLES.rglob("*.md"), *EXAMPLES.rglob("*.yml")])
ROOMS = "perfsuite|test_correctness|test_perf|benchmarks|simmusa|tools|examples"
COMMANDS = re.compile(r"python3? (benchmarks/\w+\.py[^`\n]*)")
OPTION = re.compile(r"--[a-z-]+")


def code_of(*folders):
    """Text of the Python files under the folders, each after its name."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return "\n".join(f"{path.stem}\n{path.read_text(encoding='utf-8')}" for path in paths)


COMMAND_LINE_CODE, PLUGIN_CODE = code_of("perfsuite/cli"), code_of("perfsuite/plugin")
TESTS = "\n".join([code_of("test_perf", "test_correctness", "examples"), *ROOMS.split("|")])
"""What has names of tests."""


def pages(text):
    return [page for page in PAGES if re.search(text, page.read_text(encoding="utf-8"))]


def named(page):
    return str(page.relative_to(ROOT))


ANY = "any word"


def parser_of(script):
    """Options of a script's ``add_argument`` calls, and choices of its positional ones: by reading, not running."""
    options, choices = {"-h", "--help"}, set()
    for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = {word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)}
            if node.func.attr == "add_argument":
                options |= words
                named = [keyword.value for keyword in node.keywords if keyword.arg == "choices"]
                choices |= {
                    choice.value for value in named if isinstance(value, ast.Tuple | ast.List) for choice in value.elts
                }
                if not named and not any(word.startswith("-") for word in words):
                    choices |= {ANY}
            elif node.func.attr == "add_parser":
                choices |= words
    return options, choices


@pytest.mark.parametrize("page", pages(COMMANDS), ids=named)
def test_every_benchmark_command_has_its_script_and_its_options(page):
    for command in COMMANDS.findall(page.read_text(encoding="utf-8")):
        script, *words = shlex.split(command.partition("#")[0].replace("[", " ").replace("]", " "))
        assert (ROOT / script).is_file(), command
        options, choices = parser_of(script)
        asked = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert asked <= options, command
        assert words[:1] == [] or words[0].startswith("-") or {words[0], ANY} & choices, command


EVIDENCE = sorted((ROOT / "docs" / "evidence").glob("*.md"))
FIGURES = re.compile(
    r"^Figures: commit ([0-9a-f]{7,40}), (20\d\d-\d\d-\d\d)(?: \(oldest 20\d\d-\d\d-\d\d\))?; "
    r"machine: [^;\n]+; command: [^\n]+\.$",
    re.MULTILINE,
)


@pytest.mark.parametrize("page", EVIDENCE, ids=named)
def test_an_evidence_page_begins_with_commit_date_machine_and_command_of_its_figures(page):
    text = page.read_text(encoding="utf-8")
    (found,) = FIGURES.finditer(text)
    assert text[: found.start()].count("\n\n") <= 2, "the line comes after title and introduction"
    try:
        shallow = git(ROOT, "rev-parse", "--is-shallow-repository") != "false"
    except GitFailed:
        shallow = True  # not a checkout
    if shallow:
        pytest.skip("the history of git is not complete here")
    commit, day = found.groups()
    assert git(ROOT, "log", "-1", "--format=%cs", commit, "--") == day
    git(ROOT, "merge-base", "--is-ancestor", commit, "HEAD")


def test_every_figure_of_the_truth_page_names_its_command():
    rows = [
        re.split(r"(?<!\\)\|", line.strip().strip("|"))
        for line in (ROOT / "docs" / "evidence" / "truth.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and not set(line) <= set("| -")
    ]
    for row in rows:
        command = row[-1].strip()
        assert command == "command" or re.match("the same|`(python benchmarks/|pytest test_|torchrun )", command), row


def test_the_row_of_each_constant_of_the_gate_is_in_a_section_of_its_evidence():
    evidence = (ROOT / "docs" / "evidence" / "gate-evidence.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.*)$", evidence, re.MULTILINE)
    rows = re.findall(r"Row:\s([^\"]+?)\.\"", code_of("perfsuite/gate"))
    assert len(rows) > 15
    for row in rows:
        place = " ".join(row.split()).rpartition(", ")[2] if "silence" not in row else "silence"
        assert place in map(str.lower, sections), row


def test_options_said_of_the_command_above_are_its_own():
    script = ""
    for line in (ROOT / "docs" / "evidence" / "truth.md").read_text(encoding="utf-8").splitlines():
        script = next(iter(COMMANDS.findall(line)), script)
        if "the same with `" in line and script:
            assert set(OPTION.findall(line.partition("the same with")[2])) <= parser_of(script.split()[0])[0], line


PLUGIN_OPTIONS = PLUGIN_CODE + (ROOT / "test_perf" / "conftest.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pages_files_names_options_commands_and_tests_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(rf"`((?:{ROOMS})/[\w/.-]+\.\w+)[`:]", text):
        assert (ROOT / path).exists(), path
    assert {
        option for option in re.findall(r"--perf-[a-z-]+[a-z]", text) if f'"{option}"' not in PLUGIN_OPTIONS
    } == set()
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert set(re.findall(r"(?m)^(?:\$ )?perfsuite ([a-z]+)\b(?!:)", blocks)) <= set(COMMAND_LINE)
    for name in re.findall(r"`(perfsuite(?:\.\w+)+)", text):
        *home, last = name.split(".")
        module = ROOT.joinpath(*home).with_suffix(".py")
        module = module if module.is_file() else ROOT.joinpath(*home, "__init__.py")
        there = ROOT.joinpath(*home, last)
        assert there.is_dir() or there.with_suffix(".py").is_file() or last in module.read_text(encoding="utf-8"), name
    for path in re.findall(r"\btest_perf/\w+\.py(?!::)", text):
        assert (ROOT / path).is_file(), path
    for command, words in re.findall(r"`perfsuite ([a-z]+)( [^`\n]*)`", text):
        if command in COMMAND_LINE and command != "ab":  # what follows in ab are pytest's
            asked = set(re.findall(r"(?<= )--[a-z][a-z-]+", words))
            assert {option for option in asked if f'"{option}"' not in COMMAND_LINE_CODE} == set(), words
    for key in re.findall(r"\bini `(perf_\w+)`", text):
        assert f'"{key}"' in PLUGIN_CODE, key
    if page.name != "CHANGELOG.md":  # which names what was there
        tests = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\btest_\w+", code)}
        assert {word for word in tests if not re.search(rf"\b{word}", TESTS)} == set()


def test_the_command_prints_every_page_and_lists_them(capsys):
    # A log command of a CI is escaped on any screen.
    listed = printed(capsys, "docs")
    for path in (ROOT / "docs").glob("*/*.md"):
        assert f"  {path.stem} " in listed
        shown = printed(capsys, "docs", path.stem)
        assert shown.replace("\\x23", "#") == path.read_text(encoding="utf-8")
    assert "page 'gates' is unknown; did you mean gate " in refused(capsys, "docs", "gates")


def test_the_command_finds_a_word_in_the_pages(capsys):
    found = printed(capsys, "docs", "--find", "busbw").splitlines()
    assert all("busbw" in line.lower() for line in found)
    assert {"metrics", "glossary"} <= {line.partition(":")[0] for line in found}
    code, _, err = run(capsys, "docs", "kernels", "--find", "no such word")
    assert (1, True) == (code, "no such word" in err)


class Page:
    """Replaces mkdocs' page."""

    def __init__(self, path):
        self.file = argparse.Namespace(abs_src_path=str(path), src_uri=path.name)


def test_the_site_has_every_page_and_every_file_that_it_links_to(caplog):
    docs = ROOT / "docs"
    (start, *sections) = docs_site.on_config({"docs_dir": str(docs)})["nav"]
    listed = [name for section in sections for names in section.values() for name in names]
    assert start == {"Start": "index.md"}
    assert sorted(listed) == sorted(path.relative_to(docs).as_posix() for path in docs.glob("*/*.md"))
    for path in docs.rglob("*.md"):
        shown = docs_site.on_page_markdown(path.read_text(encoding="utf-8"), Page(path), {"docs_dir": docs}, None)
        for link in re.findall(r"\]\(([^)#:]+)\)", shown):
            assert (path.parent / link).resolve().is_relative_to(docs), link
    assert caplog.messages == []


def test_the_site_warns_of_a_link_to_a_file_that_is_not_there(caplog):
    page, config = Page(ROOT / "docs" / "how-to" / "musa.md"), {"docs_dir": ROOT / "docs"}
    shown = docs_site.on_page_markdown("[a](../../pytest.ini) [b](../../gone.py)", page, config, None)
    assert shown == "a (`pytest.ini`) b (`gone.py`)"
    assert caplog.messages == ["musa.md links to ../../gone.py, which is not in the repository"]
