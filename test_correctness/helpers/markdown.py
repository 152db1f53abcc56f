"""Docstrings, help texts and class bodies as Markdown: cells, tables and quotations."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page that are in this language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def cell(text: object) -> str:
    """Return a docstring or a help text as one cell of a Markdown table."""
    words = " ".join(re.sub(r"^\s*>>>.*(?:\n.+)*", "", str(text), flags=re.M).split())
    words = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", words).replace("``", "`")
    parts = re.split(r"(`[^`]*`)", words)
    parts[::2] = [re.sub(r"([<>*\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as code in a cell; empty stays empty."""
    return f"`{' '.join(text.split())}`".replace("|", "\\|") if text else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty one; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *lines, ""] if lines else []


def attributes(kind: type) -> dict[str, tuple[str, str]]:
    """Return the public fields, properties and methods of a class: name -> (type or signature, text)."""
    found: dict[str, tuple[str, str]] = {}
    source = textwrap.dedent(inspect.getsource(kind))
    lines, body = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        value = after.value if isinstance(after, ast.Expr) else None
        text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = text or lines[(node.end_lineno or 1) - 1].partition("  # ")[2]
            default = f" = {ast.unparse(node.value)}" if node.value and "field(" not in ast.unparse(node.value) else ""
            found[node.target.id] = (ast.unparse(node.annotation) + default, text)
        elif isinstance(node, ast.FunctionDef):
            plain = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
            returned = ast.unparse(node.returns) if node.returns else ""
            arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
            found[node.name] = (
                returned if plain else f"({arguments})" + f" -> {returned}" * bool(returned),
                ast.get_docstring(node) or "",
            )
    return {name: entry for name, entry in found.items() if not name.startswith("_")}


def quoted(text: str) -> list[str]:
    """Return a docstring as a quotation, without the headings of its sections."""
    paragraphs = [shown for part in re.split(r"\n\s*\n", text) if (shown := cell(part))]
    return [*"\n>\n".join(f"> {part}" for part in paragraphs).splitlines(), ""]
