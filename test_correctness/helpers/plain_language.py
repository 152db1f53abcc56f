"""Find text that breaks the project's rules of plain English: in documents, docstrings, comments and messages.

Run as ``python -m test_correctness.helpers.plain_language PATH ...`` to print the breaches of files or folders.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

MEAN, LONG = 17.0, 28
"""Words of a sentence on a page: the mean, and the 90th percentile."""
LONGEST = 45
"""Words of one sentence of a docstring or comment."""
NAMES = {"told", "mine", "known", "given", "said", "theirs", "ours", "thing", "things", "whoever", "whatever"}
"""Names of variables, parameters and functions that say nothing."""
STRING_OR_COMMENT = re.compile(
    r'("""|\'\'\')(?:\\.|(?!\1).)*\1|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.S
)
PATTERNS = {
    "'is no X': write 'is not an X', 'has no X' or 'there is no X'": re.compile(
        r"(?<!there )\b(?:is|are|was|were) no "
        r"(?!longer\b|more\b|less\b|fewer\b|later\b|earlier\b|larger\b|smaller\b)\w+",
        re.I,
    ),
    "a sentence begins with a clause: name the thing": re.compile(
        r"(?:^|(?<=[.;:] )|(?<=\n))(?:What|Who|Whose|Whom|Whatever|Whoever|That (?!is\b|was\b|file\b))"
        r"(?:\b|(?<= ))[^?\n]{3}"
    ),
    "'what' for a noun: name the thing": re.compile(r"\bwhat(?:ever)? (?!if\b|to\b)[\w`]+", re.I),
    "'is that of', 'are those of': name the thing": re.compile(r"\b(?:is|are) (?:that|those) of\b", re.I),
    "a house word": re.compile(
        r"\b(?:told|tells?|telling|foretell|foretold|beside|nobody|somebody|whoever|mended?|mends|cries|wolf|feels?|"
        r"rooms?|stands? for|stands? (?:beside|below|there|still)|takes? away|held up|wild|nowhere|cannot be had|"
        r"of one's own|by itself alone|as it is said|no end of|earned)\b",
        re.I,
    ),
}


def sentences_of_page(text: str) -> list[str]:
    """Return the sentences of a Markdown page, without code, tables, headings, links' targets and HTML comments."""
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.S)
    text = re.sub(r"^(```|~~~).*?^\1\s*?$", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"^(?: {4,}(?![-*\d]).*|\|.*|#.*|>.*)$", "\n", text, flags=re.M)
    text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "\n\n", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        found += [part.strip() for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"'(])", joined) if len(part.split()) > 2]
    return found


def figures_of_page(text: str) -> tuple[float, float]:
    """Return mean and 90th percentile of the words per sentence; 0 for a page without sentences."""
    lengths = sorted(len(sentence.split()) for sentence in sentences_of_page(text))
    return (statistics.fmean(lengths), lengths[int(0.9 * (len(lengths) - 1))]) if lengths else (0.0, 0.0)


def breaches_of_text(text: str) -> Iterator[str]:
    """Yield each rule that a piece of prose breaks, with the words that break it."""
    prose = re.sub(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|'[^'\n]{1,40}'(?!\w)|\"[^\"\n]*\"", "CODE", text)
    for rule, pattern in PATTERNS.items():
        for match in pattern.finditer(prose):
            yield f"{rule}: {' '.join(prose[max(0, match.start() - 25) : match.end() + 25].split())!r}"


def breaches_of_page(text: str) -> Iterator[str]:
    """Yield the rules that a Markdown page breaks."""
    mean, long = figures_of_page(text)
    if mean > MEAN:
        yield f"{mean:.1f} words per sentence (at most {MEAN:g})"
    if long > LONG:
        yield f"a tenth of the sentences has more than {long:.0f} words (at most {LONG})"
    for sentence in sentences_of_page(text):
        yield from breaches_of_text(sentence)


def prose_of_code(source: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, comment and message (a string of four words and more) of a module."""
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            text = "".join(part for part in parts if isinstance(part, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = re.sub(r"^\s*>>>.*(?:\n.+)*", "", node.value, flags=re.M)
        else:
            continue
        if len(text.split()) >= 4:
            yield node.lineno, re.sub(r"(?<=[^\n.])\n\s*(?=\S)", " ", text)
    block: list[str] = []
    start = last = 0
    for found in STRING_OR_COMMENT.finditer(source):
        if found[0].startswith("#") and not found[0].startswith(("#!", "# type:", "# noqa", "# mypy")):
            line = source.count("\n", 0, found.start()) + 1
            if line != last + 1 and block:
                yield start, " ".join(block)
                block = []
            start = start if block else line
            block.append(found[0].lstrip("# "))
            last = line
    if block:
        yield start, " ".join(block)


def breaches_of_code(source: str) -> Iterator[str]:
    """Yield the rules that the prose and the names of a module break, each after its line."""
    nodes = list(ast.walk(ast.parse(source)))
    for line, text in prose_of_code(source, nodes):
        yield from (f"{line}: {breach}" for breach in breaches_of_text(text))
        for sentence in re.split(r"(?<=[.;:!?])\s+", text):
            if len(sentence.split()) > LONGEST:
                yield f"{line}: {len(sentence.split())} words in a sentence: {sentence[:60]!r}"
    for node in nodes:
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        if name in NAMES and not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
            yield f"{node.lineno}: a name that says nothing: {name}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            re.sub(r"^test_", "", node.name) in NAMES
        ):
            yield f"{node.lineno}: a name that says nothing: {node.name}"


def breaches(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return list(breaches_of_page(text) if path.suffix == ".md" else breaches_of_code(text))


if __name__ == "__main__":
    total = 0
    for argument in sys.argv[1:]:
        place = Path(argument)
        for path in sorted([*place.rglob("*.py"), *place.rglob("*.md")]) if place.is_dir() else [place]:
            found = breaches(path)
            total += len(found)
            print(*(f"{path}:{line}" for line in found), sep="\n", end="\n" if found else "")
    print(f"{total} breaches")
