"""Imports go downward only, and the driver's process never imports torch."""

import ast
import re

from test_correctness.helpers.package_tree import MODULES, PACKAGE, imported, tree
from test_correctness.helpers.processes import run_python

DESIGN = PACKAGE.parent / "docs" / "contributing" / "architecture.md"
LINES = [
    line.split() for line in DESIGN.read_text().partition("<!-- layers -->\n```\n")[2].partition("```")[0].splitlines()
]
"""From the ground up, as the design draws them: each may import those of earlier lines, and modules (not packages)
those of their own.
"""
LEVEL = {name: level for level, names in enumerate(LINES) for name in names}
RANK_SIDE = (
    *("models", "strategies", "runtime.ranks", "workloads.moe_layer_ranks"),
    *(f"workloads.training.{module}" for module in ("on_rank", "builds", "exposed", "memory")),
)
"""Rooms with modules that only ranks load, and such modules."""


def part(name):
    """``runtime`` of ``perfsuite.runtime.driver``; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def wrong_arrows(module):
    """Imports of a module that the design has no place for."""
    own = part(module)
    if not own:
        return  # the front door: it loads nothing before it is asked, see below
    assert own in LEVEL, f"{own} has no place in the design's layers"
    for name in imported(module) & MODULES.keys():
        other = part(name)
        if other and other != own:
            package_on_one_line = (PACKAGE / own).is_dir() or (PACKAGE / other).is_dir()
            if not (LEVEL[other] < LEVEL[own] or (LEVEL[other] == LEVEL[own] and not package_on_one_line)):
                yield f"{module} imports {name}"


def test_imports_go_downward_only():
    assert [] == [arrow for module in MODULES for arrow in wrong_arrows(module)]


def test_no_module_is_above_400_lines_and_no_function_above_120():
    modules = [name for name, path in MODULES.items() if path.read_text().count("\n") > 400]
    functions = [
        f"{name}: {node.name}"
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 120
    ]
    assert ([], []) == (modules, functions)


def loaded_with(name):
    """All that importing a module imports, its parents and what they import included."""
    found, pending = set(), [name]
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending += [".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 1)]
            pending += imported(module, at_import_time=True) if module in MODULES else ()
    return found


def is_of_the_driver(name):
    return not f"{name}.".startswith(tuple(f"perfsuite.{room}." for room in RANK_SIDE))


def test_loading_a_module_of_the_driver_does_not_load_torch():
    driver = filter(is_of_the_driver, MODULES)
    assert [] == [name for name in driver if {"torch", "torch.distributed"} & loaded_with(name)]


def test_the_rank_side_is_what_loads_torch():
    assert "torch" in loaded_with("perfsuite.runtime.ranks.worker")


def run(program):
    done = run_python("-c", program, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_itself_loads_nothing():
    found = "[name for name in sys.modules if name.startswith(('perfsuite.', 'pytest'))]"
    assert run(f"import sys, perfsuite; print({found})") == "[]"


def test_every_name_of_the_package_is_there():
    run("import perfsuite; assert all(hasattr(perfsuite, name) for name in perfsuite.__all__)\nfrom perfsuite import *")


def test_the_whole_plugin_and_the_command_line_load_without_torch():
    program = """
import importlib, pkgutil, sys
import perfsuite.plugin, perfsuite.cli.main
for module in pkgutil.iter_modules(perfsuite.plugin.__path__):
    importlib.import_module(f"perfsuite.plugin.{module.name}")
import perfsuite.runtime.transports.cluster, perfsuite.runtime.transports.agent
for name in perfsuite.cli.main.COMMANDS:
    perfsuite.cli.main.find_command(name)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")))
"""
    assert run(program) == "[]"


AT_START = {
    *("base", "base.errors", "base.units", "record", "record.verdict", "record.workload"),
    *("runtime", "runtime.transports", "runtime.transports.launchers", "suite"),
}
"""What the plugin's hooks and options need of the package in every pytest run."""


def test_a_run_without_perf_cases_loads_little_of_the_package(tmp_path):
    """Whoever installs perfsuite pays for it in each run: import what measures, judges and reports where it is used."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_plain.py").write_text("def test_plain(): pass")
    program = f"""
import sys
import pytest
assert pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", {str(tmp_path)!r}]) == 0
print(*sorted(name for name in sys.modules if name.startswith("perfsuite.") and "plugin" not in name))
"""
    loaded = run(program).splitlines()[-1].split()
    assert set(loaded) <= {f"perfsuite.{name}" for name in AT_START}


def test_what_several_concerns_do_at_one_hook_stands_in_one_module():
    modules = {}
    for name in MODULES:
        room, _, stem = name.removeprefix("perfsuite.").partition(".")
        for node in ast.walk(tree(name)) if room == "plugin" and stem != "hooks" else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("pytest_"):
                modules.setdefault(node.name, set()).add(stem)
    shared = {name: stems for name, stems in modules.items() if len(stems) > 1}
    assert shared == {
        "pytest_sessionfinish": {"order", "launch"},  # an agent leaves before everybody's, a driver's code comes last
        "pytest_runtest_protocol": {"gating", "launch"},  # of perf cases, and of all others
        "pytest_runtestloop": {"order", "turns"},  # around the loop, and the loop of an arm
    }


def test_options_of_ours_are_read_where_another_plugin_may_have_the_name():
    read = re.compile(r"""(getoption|getini)\(f?["'](--)?perf[_-]""")
    found = {path.stem for path in (PACKAGE / "plugin").glob("*.py") if read.search(path.read_text())}
    assert found == set()
