"""The package stays small: how much a room may hold, what an import may load, one home per noun.

Raising a number here is a change of its own, with its reason in the commit message.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "perfsuite"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.glob("**/*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
LINES = {name: path.read_text().count("\n") for name, path in MODULES.items()}

ROOMS = {
    "audit": 2_480,
    "base": 1_500,
    "baselines": 1_850,
    "cli": 3_910,
    "expectations": 620,
    "exports": 325,
    "fleet": 1_350,
    "gate": 4_200,
    "history": 1_280,
    "imports": 4_510,
    "metrics": 1_690,
    "models": 3_730,
    "platforms": 3_740,
    "plugin": 5_980,
    "projection": 5_200,
    "published": 1_890,
    "record": 2_570,
    "reports": 10_200,
    "run": 1_460,
    "runtime": 8_090,
    "schedules": 1_155,
    "statistics": 770,
    "strategies": 4_840,
    "suite": 60,
    "workloads": 5_970,
}
"""Lines that a package may have: those of November 2026 and 1 %."""
LOADS = {"perfsuite.cli.show": 7_800, "perfsuite.record.journal": 2_580, "perfsuite.gate.gate": 7_650}
"""Lines of the package that importing a module may load."""
TWICE = {
    *("Answer", "Arrival", "Attention", "Child", "Clock", "Control", "Copies", "Core", "Job"),
    *("Matmul", "Printed", "Refused", "Replay", "Share", "Split", "Traffic", "Transformer", "Watch"),
}
"""Names that more than one class has; no name is added."""


SMALL = {"perfsuite.plugin.hooks", "perfsuite.plugin.turns", "perfsuite.strategies.pipeline.emulated"}
"""Modules of fewer than sixty lines with one importer, or none where another process loads the file; none is added."""
CIRCULAR = {"workloads"}
"""Rooms whose modules import each other in a circle; none is added."""


def imported(name: str, *, at_import_time: bool = False) -> set[str]:
    """Modules of the package that a module imports, those inside functions and under TYPE_CHECKING included or not."""
    found: set[str] = set()
    pending: list[ast.AST] = [TREES[name]]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typed = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (at_import_time and (late or typed)):
            pending += ast.iter_child_nodes(node)
    return found & set(MODULES)


def loaded_with(name: str) -> set[str]:
    found: set[str] = set()
    pending = [name]
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending += imported(module, at_import_time=True)
    return found


def test_no_room_grows():
    rooms: Counter[str] = Counter()
    for name, lines in LINES.items():
        if MODULES[name].parent != PACKAGE:
            rooms[name.split(".")[1]] += lines
    assert sorted(rooms) == sorted(ROOMS)
    assert {} == {room: lines for room, lines in rooms.items() if lines > ROOMS[room]}


def test_an_import_loads_what_it_needs():
    loads = {name: sum(LINES[module] for module in loaded_with(name)) for name in LOADS}
    assert {} == {name: lines for name, lines in loads.items() if lines > LOADS[name]}


def test_a_name_is_that_of_one_class():
    names = Counter(node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1 and not name.startswith("_")} <= TWICE


def test_a_module_earns_its_file():
    """It has sixty lines, or two that import it; what is run or found by its name has none."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name in MODULES:
        for other in imported(name):
            importers[other].add(name)
    by_name = {name for name in MODULES if name.endswith("__main__") or MODULES[name].name == "__init__.py"}
    small = {name for name, lines in LINES.items() if lines < 60 and len(importers[name]) < 2}
    assert SMALL == small - by_name


def test_modules_of_other_rooms_do_not_import_in_a_circle():
    circles = []
    depends = {name: imported(name) for name in MODULES}
    for name in MODULES:
        reached: set[str] = set()
        pending = set(depends[name])
        while pending:
            module = pending.pop()
            if module not in reached:
                reached.add(module)
                pending |= depends[module]
        if name in reached:
            circles.append(name)
    assert CIRCULAR == {name.split(".")[1] for name in circles}
