"""How an object that a module holds is named here and found again on a rank.

An importable object goes as module and attribute path.  What a test file defines goes as the file relative to the root
directory, the module's name and the attribute path under which the module holds this very object: so it loads the same
way under ``pytest`` and ``python -m pytest``, whatever the import mode.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.runtime.transports.base import Message


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Names what modules hold."""

    rootpath: Path
    """pytest's root directory, which another host may have elsewhere."""
    test_module: str = ""
    """Module of the test: a decorator from elsewhere may have given an object of it its own module."""

    def name(self, carrier: Any) -> Message:
        """Where ``carrier`` is held; raises InvalidParameter when no module holds it."""
        module_name, path = _held_at(carrier, (carrier.__module__, self.test_module))
        where: Message = {"module": module_name, "attribute": path}
        file = getattr(sys.modules[module_name], "__file__", None)
        if file and not _importable(module_name, file):
            where["file"] = str(Path(file))
            where["rootpath"] = str(self.rootpath)
            if module_name == "__main__":  # under its own name a script would run again
                where["module"] = "perfsuite_main_script"
        return where


def find(where: Message) -> Any:
    """The object that :meth:`Holder.name` described; its module is loaded when it is not yet."""
    held: Any = _module(where)
    for name in where["attribute"].split("."):
        held = getattr(held, name)
    return held


def _held_at(carrier: Any, modules: tuple[str, ...]) -> tuple[str, str]:
    """Module and attribute path that hold ``carrier`` itself; a decorator may have hidden it behind its own name."""
    name = getattr(carrier, "__qualname__", repr(carrier))
    for module_name in modules:
        module = sys.modules.get(module_name)
        for candidate in [name, *vars(module)] if module else []:
            held: Any = module
            for part in candidate.split("."):
                held = getattr(held, part, None)
            if held is carrier:
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


def _module(where: Message) -> ModuleType:
    name, file = where["module"], where.get("file")
    if file is None:
        return importlib.import_module(name)
    path = Path(file)
    if not path.exists():  # another host may keep the checkout elsewhere: the working directory is its root there
        path = Path.cwd() / path.relative_to(where["rootpath"])
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
