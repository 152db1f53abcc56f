"""The package stays small: how much a room may hold, what an import may load, one home per noun.

Raising a number here is a change of its own, with its reason in the commit message.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

from test_correctness.helpers.package_tree import MODULES, PACKAGE, imported, tree

LINES = {name: path.read_text().count("\n") for name, path in MODULES.items()}

ROOMS = {
    "audit": 2_810,
    "base": 1_590,
    "baselines": 1_750,
    "cli": 3_840,
    "expectations": 600,
    "exports": 300,
    "fleet": 1_240,
    "gate": 3_860,
    "history": 1_230,
    "imports": 4_730,
    "metrics": 1_550,
    "models": 3_500,
    "platforms": 3_640,
    "plugin": 6_020,
    "projection": 4_970,
    "published": 1_850,
    "record": 2_380,
    "reports": 9_630,
    "run": 1_440,
    "runtime": 8_300,
    "schedules": 1_000,
    "statistics": 760,
    "strategies": 4_370,
    "suite": 50,
    "workloads": 5_380,
}
"""Lines that a package may have: those of November 2026 and 1 %."""
LOADS = {"perfsuite.cli.show": 7_880, "perfsuite.record.journal": 1_940, "perfsuite.gate.gate": 4_940}
"""Lines of the package that importing a module may load."""
SMALL = {"perfsuite.plugin.hooks", "perfsuite.plugin.turns"}
"""Modules of fewer than sixty lines with one importer, or none where another process loads the file; none is added."""
CIRCULAR: set[str] = set()
"""Rooms whose modules import each other in a circle; none is added."""


def imports(name: str, *, at_import_time: bool = False) -> set[str]:
    """Modules of the package that a module imports."""
    return set(imported(name, at_import_time=at_import_time) & MODULES.keys())


def loaded_with(name: str) -> set[str]:
    found: set[str] = set()
    pending = [name]
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending += imports(module, at_import_time=True)
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
    names = Counter(node.name for name in MODULES for node in tree(name).body if isinstance(node, ast.ClassDef))
    assert [] == [name for name, count in names.items() if count > 1 and not name.startswith("_")]


def test_a_module_earns_its_file():
    """It has sixty lines, or two that import it; what is run or found by its name has none."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name in MODULES:
        for other in imports(name):
            importers[other].add(name)
    by_name = {name for name in MODULES if name.endswith("__main__") or MODULES[name].name == "__init__.py"}
    small = {name for name, lines in LINES.items() if lines < 60 and len(importers[name]) < 2}
    assert SMALL == small - by_name


def test_modules_of_other_rooms_do_not_import_in_a_circle():
    circles = []
    depends = {name: imports(name) for name in MODULES}
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
