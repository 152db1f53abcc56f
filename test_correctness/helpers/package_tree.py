"""Modules of the package, their syntax trees and what each imports, read once for all tests of its structure."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "perfsuite"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.glob("**/*.py"))
}
"""Dotted name -> file."""


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@functools.cache
def imported(name: str, *, at_import_time: bool = False) -> frozenset[str]:
    """Modules that a module imports; at import time not those inside functions or under TYPE_CHECKING."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree(name)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif at_import_time and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            pending += node.orelse
        else:
            pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return frozenset(found)
