"""How a workload travels to the ranks: by import path and fields, or by file for the code of test modules.

An importable class goes as module and attribute path.  What a test file defines goes as the file relative to the root
directory, the module's name, the attribute path under which the module holds this very object, and the driver's
``sys.path``: so it loads the same way under ``pytest`` and ``python -m pytest``, whatever the import mode.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from perfsuite.errors import InvalidParameter
from perfsuite.runtime.transport import Message
from perfsuite.workload import FunctionWorkload, Workload

_PLAIN = (str, int, float, bool, type(None))


def refer(workload: Workload, rootpath: Path, test_module: str = "") -> Message:
    """The JSON form of ``workload``; raises InvalidParameter when it cannot travel.

    ``test_module`` names the module of the test: a decorator from elsewhere may have given the object its own module.
    """
    carrier: Any = workload.function if isinstance(workload, FunctionWorkload) else type(workload)
    module_name, path = _held_at(carrier, (carrier.__module__, test_module))
    module = sys.modules[module_name]
    reference: Message = {
        "function": isinstance(workload, FunctionWorkload),
        "module": module_name,
        "attribute": path,
        "fields": _plain(workload.parameters(), path),
        "sys_path": [str(Path(entry).resolve()) if entry else str(Path.cwd()) for entry in sys.path],
    }
    file = getattr(module, "__file__", None)
    if file and not _importable(module_name, file):
        reference["file"] = str(Path(file))
        reference["rootpath"] = str(rootpath)
        if module_name == "__main__":  # under its own name a script would run again
            reference["module"] = "perfsuite_main_script"
    return reference


def describe(workload: Workload) -> str:
    """``module:Class`` or ``module:function``, for the record."""
    carrier: Any = workload.function if isinstance(workload, FunctionWorkload) else type(workload)
    return f"{carrier.__module__}:{carrier.__qualname__}"


def resolve(reference: Message) -> Workload:
    """The workload that :func:`refer` described, made anew on a rank."""
    for entry in reference["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    carrier: Any = _module(reference)
    for name in reference["attribute"].split("."):
        carrier = getattr(carrier, name)
    fields = {name: _tuples(value) for name, value in reference["fields"].items()}
    if reference["function"]:
        function: Callable[..., Any] = carrier
        return FunctionWorkload(function=function, arguments=fields)
    workload = carrier(**fields)
    assert isinstance(workload, Workload)
    return workload


def _held_at(carrier: Any, modules: tuple[str, ...]) -> tuple[str, str]:
    """Module and attribute path that hold ``carrier`` itself; a decorator may have hidden it behind its own name."""
    name = getattr(carrier, "__qualname__", repr(carrier))
    for module_name in modules:
        module = sys.modules.get(module_name)
        for candidate in [name, *vars(module)] if module else []:
            found: Any = module
            for part in candidate.split("."):
                found = getattr(found, part, None)
            if found is carrier:
                return module_name, candidate
    raise InvalidParameter(
        f"{name} of {carrier.__module__} is not held by its module under any name, so the ranks cannot find it; "
        "move it to module level"
    )


def _importable(name: str, file: str) -> bool:
    """Whether importing ``name`` anew would load ``file``: true for installed packages, not for test modules."""
    if name.partition(".")[0] == "perfsuite":
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(file).resolve():
        return False
    # pytest puts modules that it imported by path into sys.modules, where find_spec finds them without searching.
    parent = name.rpartition(".")[0]
    search = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else None
    fresh = importlib.machinery.PathFinder.find_spec(name, search)
    return fresh is not None and fresh.origin is not None and Path(fresh.origin).resolve() == Path(file).resolve()


def _module(reference: Message) -> ModuleType:
    name, file = reference["module"], reference.get("file")
    if file is None:
        return importlib.import_module(name)
    path = Path(file)
    if not path.exists():  # another host may keep the checkout elsewhere: the working directory is its root there
        path = Path.cwd() / path.relative_to(reference["rootpath"])
    loaded = sys.modules.get(name)
    if loaded is not None and Path(getattr(loaded, "__file__", "") or "") == path:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _plain(fields: dict[str, Any], owner: str) -> dict[str, Any]:
    for name, value in fields.items():
        _require_plain(value, f"{owner}({name}=...)")
    return fields


def _require_plain(value: Any, where: str) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _require_plain(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            _require_plain(key, where)
            _require_plain(item, where)
    elif not isinstance(value, _PLAIN):
        kind = "a dataclass" if dataclasses.is_dataclass(value) else f"a {type(value).__name__}"
        raise InvalidParameter(
            f"{where} is {kind}, which cannot travel to the ranks; pass numbers, strings, booleans, lists or dicts"
        )


def _tuples(value: Any) -> Any:
    """JSON has no tuples and frozen dataclasses need hashable fields: lists come back as tuples."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
