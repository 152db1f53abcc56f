"""Writes what torch_musa offers, per version, from a clone of its repository; nothing of it is imported or run.

    git clone https://github.com/MooreThreads/torch_musa
    python -m tools.derive_torch_musa_names torch_musa v2.7.1
    pip download --no-deps mthreads-ml-py==2.4.3
    python -m tools.derive_torch_musa_names --telemetry mthreads_ml_py-2.4.3-py3-none-any.whl

writes ``test_correctness/torch_musa_names/2.7.1.json`` and ``pymtml-2.4.3.json`` beside it.

Names come from the syntax trees of the Python files, members of C++ classes from the tables that pybind and CPython
read.  What C++ adds to a module at run time is not seen, so a name may be missing here that exists there, never the
other way round.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import hashlib
import json
import re
import symtable
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.git import git

REPOSITORY = "https://github.com/MooreThreads/torch_musa"
FOLDER = Path(__file__).parents[1] / "test_correctness" / "torch_musa_names"
_PACKAGE = "torch_musa"
_SUBMODULES = ("memory", "amp", "mccl")
_CLASSES = ("Event", "Stream")
Read = Callable[[str], "str | None"]


class Package:
    """The modules of the package as a reader of files gives them; a module is read when first asked for."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._names: dict[str, dict[str, str]] = {}
        self._trees: dict[str, ast.Module] = {}
        self.home: dict[str, str] = {}
        """Dotted path of the file that defines a function, by ``module.name`` of where it is offered."""

    def path(self, module: str) -> str | None:
        """The file of a module; None where there is none."""
        base = module.replace(".", "/")
        return next((path for path in (f"{base}/__init__.py", f"{base}.py") if self._read(path) is not None), None)

    def tree(self, module: str) -> ast.Module:
        """The syntax tree of a module."""
        if module not in self._trees:
            path = self.path(module)
            assert path is not None, module
            self._trees[module] = ast.parse(self._read(path) or "")
        return self._trees[module]

    def names(self, module: str) -> dict[str, str]:
        """Name -> its parameters, ``class``, ``module`` or ``value``, as the module binds them from top to bottom."""
        if module not in self._names:
            found = self._names[module] = {}
            for statement in flat(self.tree(module).body):
                self._bind(module, statement, found)
        return self._names[module]

    def replaces_itself(self, module: str) -> bool:
        """Whether the module puts an object of its own into ``sys.modules``: a star import sees that object."""
        return any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "sys.modules[__name__]"
            for node in self.tree(module).body
        )

    def _bind(self, module: str, statement: ast.stmt, found: dict[str, str]) -> None:
        if isinstance(statement, ast.FunctionDef):
            found[statement.name] = parameters(statement.args)
            self.home[f"{module}.{statement.name}"] = module
        elif isinstance(statement, ast.ClassDef):
            found[statement.name] = "class"
            self.home[f"{module}.{statement.name}"] = module
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found.update({target.id: "value" for target in targets if isinstance(target, ast.Name)})
        elif isinstance(statement, ast.ImportFrom):
            self._import(module, statement, found)
        elif isinstance(statement, ast.Expr):
            self._set(statement.value, found)

    def _import(self, module: str, statement: ast.ImportFrom, found: dict[str, str]) -> None:
        source = self._absolute(module, statement)
        inside = source.partition(".")[0] == _PACKAGE and self.path(source) is not None
        for alias in statement.names:
            if not inside:  # somebody else's name, or a file that the build writes
                found.update({"__version__": "value"} if alias.name == "__version__" else {})
            elif alias.name == "*":
                for name in self._starred(source):
                    self._take(module, name, source, name, found)
            elif alias.name in self.names(source):
                self._take(module, alias.asname or alias.name, source, alias.name, found)
            elif self.path(f"{source}.{alias.name}"):
                self.names(f"{source}.{alias.name}")
                found[alias.asname or alias.name] = "module"
        if inside and source.startswith(f"{module}."):
            found.setdefault(source[len(module) + 1 :].partition(".")[0], "module")

    def _take(self, module: str, name: str, source: str, original: str, found: dict[str, str]) -> None:
        found[name] = self.names(source).get(original, "value")
        self.home[f"{module}.{name}"] = self.home.get(f"{source}.{original}", source)

    def _starred(self, source: str) -> Iterator[str]:
        names = self.names(source)
        if self.replaces_itself(source):
            return
        for node in self.tree(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from ast.literal_eval(node.value)
                return
        yield from (name for name in list(names) if not name.startswith("_"))

    def _set(self, call: ast.expr, found: Mapping[str, str]) -> None:
        """``setattr(torch_musa, "name", value)`` in any module of the package."""
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "setattr" and len(call.args) == 3:
            owner, name, value = call.args
            if ast.unparse(owner) == _PACKAGE and isinstance(name, ast.Constant):
                self.names(_PACKAGE).setdefault(str(name.value), found.get(ast.unparse(value), "value"))

    @staticmethod
    def _absolute(module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        # A package's own __init__ counts as one level; only packages import with one dot from below here.
        base = parts[: len(parts) - statement.level + 1]
        return ".".join([*base, *([statement.module] if statement.module else [])])


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order, those inside ``try``, ``if`` and ``with`` too."""
    for statement in body:
        if isinstance(statement, (ast.Try, ast.If, ast.With)):
            yield from flat(statement.body)
            yield from flat(getattr(statement, "orelse", []))
        else:
            yield statement


def parameters(arguments: ast.arguments) -> str:
    """``(device, priority=, *, flag=, **kwargs)``: an ``=`` after what may be left out."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parts = [each.arg + ("" if index < required else "=") for index, each in enumerate(positional)]
    if arguments.vararg or arguments.kwonlyargs:
        parts.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(each.arg + ("" if default is None else "="))
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(parts)})"


def members(package: Package, name: str, tables: str) -> dict[str, str]:
    """Methods and properties of a class that the package offers, those of its C++ base by ``tables`` too."""
    module = package.home[f"{_PACKAGE}.{name}"]
    (node,) = (each for each in package.tree(module).body if isinstance(each, ast.ClassDef) and each.name == name)
    rows = r'^\s*\{\s*(?:\(char\*\)\s*)?"(\w+)",'  # of a PyMethodDef or PyGetSetDef table
    found = dict.fromkeys(re.findall(rows, tables, re.MULTILINE), "method")
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            each.args.args = each.args.args[1:]  # self or cls
            found["__init__" if each.name == "__new__" else each.name] = parameters(each.args)
    return {key: value for key, value in sorted(found.items()) if not key.startswith("_") or key == "__init__"}


def undefined(source: str, function: str) -> tuple[str, ...]:
    r"""Names that a function of a module uses and that neither the module nor Python binds: it raises NameError.

    >>> undefined("def f():\n    warnings.warn('x')\n", "f")
    ('warnings',)
    """
    module = symtable.symtable(source, "<module>", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= {child.get_name() for child in module.get_children()} | set(dir(builtins)) | {"__file__", "__name__"}
    table = next(child for child in module.get_children() if child.get_name() == function)
    missing = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.get_name() not in known
    }
    return tuple(sorted(missing))


def broken(package: Package, read: Read) -> dict[str, str]:
    """Functions of ``torch.musa`` that cannot run: what each of them uses and nothing defines."""
    found = {}
    for name, kind in public(package.names(_PACKAGE)).items():
        home = package.home.get(f"{_PACKAGE}.{name}")
        if kind.startswith("(") and home and name in package.names(home):
            path = package.path(home) or ""
            source = read(path) or ""
            if "import *" in source:
                continue  # what a star binds is not known without running it
            if missing := undefined(source, name):
                found[f"torch.musa.{name}"] = f"{', '.join(missing)} is not defined in {path}"
    return dict(sorted(found.items()))


def facts(read: Read) -> dict[str, Any]:
    """What perfsuite's table of quirks rests on, as the sources say it."""
    context = read("torch_musa/csrc/aten/utils/Context.h") or ""
    guard = read("torch_musa/csrc/core/GuardImpl.h") or ""
    overlap = re.search(r"_get_musa_arch\(\) < (\d+)", read("torch_musa/distributed/_composable/fsdp/patch.py") or "")
    default = re.search(r"bool allow_tf32_ = (true|false);", context)
    return {
        "tf32_default": default[1] == "true" if default else None,
        "counts_devices_when_imported": "torch.musa.device_count()" in (read("torch_musa/_dynamo/__init__.py") or ""),
        "guard_has_synchronizeDevice": "synchronizeDevice" in guard,
        "fsdp2_overlaps_from_architecture": int(overlap[1]) if overlap else None,
    }


def operators(read: Read) -> dict[str, str]:
    """Operators that torch_musa patches into torch's own and computes, each with its signature."""
    patch = read("torch_patches/aten_src_ATen_native_native_functions.yaml.patch") or ""
    computed = set(
        re.findall(r"^- func: (\w+)$", read("torch_musa/csrc/aten/ops/musa_functions.yaml") or "", re.MULTILINE)
    )
    added = re.findall(r"^\+- func: (\w+)(\(.*\) -> .*)$", patch, re.MULTILINE)
    return {f"aten::{name}": signature for name, signature in sorted(added) if name in computed}


def entry_points(setup: str) -> dict[str, list[str]]:
    """The ``entry_points`` of a setup.py that are written out in it."""
    for node in ast.walk(ast.parse(setup)):
        if isinstance(node, ast.keyword) and node.arg == "entry_points":
            return {key: list(value) for key, value in ast.literal_eval(node.value).items()}
    return {}


def derive(read: Read) -> dict[str, Any]:
    """All of a version's JSON except its source."""
    package = Package(read)
    top = package.names(_PACKAGE)
    register = read("torch_musa/csrc/distributed/Register.cpp") or ""
    tables = {name: read(f"torch_musa/csrc/core/{name}.cpp") or "" for name in _CLASSES}
    mudnn = package.names("torch_musa.core.mudnn")
    (properties,) = (
        node for node in package.tree("torch_musa.core.mudnn").body if isinstance(node, ast.ClassDef)
    )  # the object that stands for the module: its class's values come first, then the module's own names
    switches = {ast.unparse(node.targets[0]): "value" for node in properties.body if isinstance(node, ast.Assign)}
    names: dict[str, Mapping[str, str]] = {"torch.musa": public(top)}
    for name in _SUBMODULES:
        if top.get(name) == "module":
            names[f"torch.musa.{name}"] = public(package.names(f"torch_musa.core.{name}"))
    for name in _CLASSES:
        names[f"torch.musa.{name}"] = members(package, name, tables[name])
    fields = re.findall(r'\.def_readonly\(\s*"(\w+)"', read("torch_musa/csrc/core/Module.cpp") or "")
    names["device properties"] = dict.fromkeys(sorted(fields), "value")
    names["torch.backends.mudnn"] = public({**mudnn, **switches})
    least = re.search(r'TORCH_MIN_VERSION = Version\("([\d.]+)"\)', read("torch_musa/__init__.py") or "")
    return {
        "version": (read("version.txt") or "").strip(),
        "torch": least[1] if least else "unknown",
        "entry_points": entry_points(read("setup.py") or ""),
        "distributed_backends": re.findall(r'register_backend\(\s*"(\w+)"', register),
        "facts": facts(read),
        "broken": broken(package, read),
        "operators": operators(read),
        "names": names,
    }


def public(names: Mapping[str, str]) -> dict[str, str]:
    """Names without a leading underscore, and the version; sorted."""
    return {key: value for key, value in sorted(names.items()) if not key.startswith("_") or key == "__version__"}


def from_git(repository: Path, tag: str) -> dict[str, Any]:
    """A version's JSON with its source: the commit of the tag and the git blob of every file that was read."""
    asked = functools.partial(git, repository)
    tree = {}
    for line in asked("ls-tree", "-r", tag).splitlines():
        about, _, path = line.partition("\t")
        tree[path] = about.split()[2]
    used: dict[str, str | None] = {}

    def read(path: str) -> str | None:
        if path not in used and path in tree:
            used[path] = asked("cat-file", "blob", tree[path])
        return used.get(path)

    found = derive(read)
    source = {
        "repository": REPOSITORY,
        "tag": tag,
        "commit": asked("rev-parse", f"{tag}^{{commit}}"),
        "files": {path: tree[path] for path in sorted(used)},
    }
    return {"version": found.pop("version"), "source": source, **found}


def from_wheel(wheel: Path) -> dict[str, Any]:
    """The functions of mthreads-ml-py's own layer (``mtml*``), from the wheel as PyPI has it."""
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read("pymtml.py"))
    functions = {node.name: parameters(node.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {
        "version": version,
        "source": {
            "package": f"mthreads-ml-py=={version}",
            "file": wheel.name,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        },
        "names": {name: each for name, each in sorted(functions.items()) if name.startswith("mtml")},
    }


def write(name: str, found: Mapping[str, Any]) -> None:
    """One file of :data:`FOLDER`."""
    (FOLDER / name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{FOLDER / name}: {len(found['names'])} names or owners of names, broken: {found.get('broken') or 'none'}")


def main() -> None:
    """Write one file per tag or wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("repository", type=Path, nargs="?", help="a clone of torch_musa, bare or not")
    parser.add_argument("tag", nargs="*", help="v2.7.1")
    parser.add_argument("--telemetry", type=Path, nargs="*", default=[], help="wheels of mthreads-ml-py")
    arguments = parser.parse_args()
    for tag in arguments.tag:
        found = from_git(arguments.repository, tag)
        write(f"{found['version']}.json", found)
    for wheel in arguments.telemetry:
        found = from_wheel(wheel)
        write(f"pymtml-{found['version']}.json", found)


if __name__ == "__main__":
    main()
