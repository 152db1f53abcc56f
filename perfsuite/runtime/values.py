"""How a workload is sent to the ranks, and which values its parameters may have: on the wire, in records and in ids.

Numbers, strings, booleans, None, and lists, tuples and dicts of these are sent by value; keys need not be strings. Enum
members, dataclasses, named tuples, torch's dtypes, functions and classes are sent by module and name. A rank gets an
equal value of the same type. Any other value raises InvalidParameter.

On the wire every JSON object has one tag::

    {"tuple": [...]}                     {"mapping": [[key, value], ...]}
    {"held": where}                      an enum member, a dtype, a function, a class
    {"made": where, "fields": {...}}     a dataclass, a named tuple, a combination of flags
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.workload import FunctionWorkload, Workload
from perfsuite.runtime.transports.base import Message


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Names objects of modules, so that a rank finds them again.

    An importable object has a module and an attribute path. An object of a test file has the file relative to the root
    directory, the module's name and the attribute path of this very object: it loads in the same way under ``pytest``
    and ``python -m pytest``, in any import mode.
    """

    rootpath: Path  # pytest's root directory; another host may have it in another place.
    test_module: str = ""  # Module of the test, for objects that a decorator of another module made.

    def name(self, carrier: Any) -> Message:
        """Return the place of ``carrier``; raise InvalidParameter if no module has it as an attribute."""
        module_name, path = _held_at(carrier, (carrier.__module__, self.test_module))
        where: Message = {"module": module_name, "attribute": path}
        file = getattr(sys.modules[module_name], "__file__", None)
        if file and not _importable(module_name, file):
            where["file"] = str(Path(file))
            where["rootpath"] = str(self.rootpath)
            if module_name == "__main__":  # importing it by its own name would run the script again
                where["module"] = "perfsuite_main_script"
        return where


def find(where: Message) -> Any:
    """Return the object that :meth:`Holder.name` described; load its module if necessary."""
    held: Any = _module(where)
    for name in where["attribute"].split("."):
        held = getattr(held, name)
    return held


def _held_at(carrier: Any, modules: tuple[str, ...]) -> tuple[str, str]:
    """Return module and attribute path of ``carrier`` itself; a decorator may have replaced it under its own name."""
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
        f"{name} of {carrier.__module__} is not an attribute of its module, so the ranks cannot find it; "
        "move it to module level"
    )


def _importable(name: str, file: str) -> bool:
    """Return whether ``import name`` loads ``file``: true for installed packages, not for test modules."""
    if name.partition(".")[0] == "perfsuite":
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(file).resolve():
        return False
    # pytest adds modules that it imported by path to sys.modules, where find_spec finds them without a search.
    parent = name.rpartition(".")[0]
    search = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else None
    fresh = importlib.machinery.PathFinder.find_spec(name, search)
    return fresh is not None and fresh.origin is not None and Path(fresh.origin).resolve() == Path(file).resolve()


def _module(where: Message) -> ModuleType:
    name, file = where["module"], where.get("file")
    if file is None:
        return importlib.import_module(name)
    path = Path(file)
    if not path.exists():  # another host may keep the checkout in another folder: its working directory is the root
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


_PLAIN = (str, int, float, bool, type(None))
_RULE = (
    "pass numbers, strings, booleans, lists, tuples, dicts, enum members, dataclasses, torch dtypes, "
    "or functions and classes at module level"
)


def encode(value: Any, holder: Holder, where: str) -> Any:  # noqa: PLR0911 - one return per kind of value
    """Return the JSON of ``value`` for the wire; raise InvalidParameter, with ``where``, if it cannot be sent."""
    kind = type(value)
    if kind in _PLAIN:  # not a subclass, which would become its base class
        return value
    if kind is list:
        return [encode(item, holder, where) for item in value]
    if kind is tuple:
        return {"tuple": [encode(item, holder, where) for item in value]}
    if kind is dict:
        pairs = [[encode(key, holder, where), encode(item, holder, where)] for key, item in value.items()]
        return {"mapping": pairs}
    constant = _torch_constant(value)
    if constant:
        return {"held": {"module": "torch", "attribute": constant}}
    by_name = inspect.isfunction(value) or isinstance(value, type)
    fields = None if by_name else _fields(value)
    if not by_name and fields is None:
        raise InvalidParameter(f"{where} is a {kind.__name__}, which cannot be sent to the ranks; {_RULE}")
    try:
        held = holder.name(value if by_name else kind)
    except InvalidParameter as error:
        raise InvalidParameter(f"{where}: {error}") from None
    if by_name:
        return {"held": held}
    if isinstance(value, enum.Enum) and kind.__members__.get(value.name) is value:
        return {"held": {**held, "attribute": f"{held['attribute']}.{value.name}"}}
    plain = {name: encode(item, holder, f"{where}.{name}") for name, item in (fields or {}).items()}
    _require_made_of_fields(value, fields or {}, where)
    return {"made": held, "fields": plain}


def decode(plain: Any) -> Any:
    """Return the value of which :func:`encode` made ``plain``."""
    if isinstance(plain, list):
        return [decode(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "tuple" in plain:
        return tuple(decode(item) for item in plain["tuple"])
    if "mapping" in plain:
        return {decode(key): decode(item) for key, item in plain["mapping"]}
    if "held" in plain:
        return find(plain["held"])
    return find(plain["made"])(**{name: decode(item) for name, item in plain["fields"].items()})


def recorded(value: Any) -> Any:  # noqa: PLR0911 - one return per kind of value
    """Return ``value`` as readable JSON for results, journals and baselines; different values differ in it.

    >>> recorded({"shape": (2, 3), "by_stage": {1: "a"}, "nothing": None})
    {'shape': [2, 3], 'by_stage': [[1, 'a']], 'nothing': None}
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}" if value.name else str(value)
    if _torch_constant(value):
        return str(value)
    if inspect.isfunction(value) or isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    fields = _fields(value)
    if fields is not None:
        return {type(value).__name__: {name: recorded(item) for name, item in fields.items()}}
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {key: recorded(item) for key, item in value.items()}
        return [[recorded(key), recorded(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [recorded(item) for item in value]
    return value


def recorded_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that every reader of a record understands."""
    plain = {}
    for name, value in defaults.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(item := recorded(value))
            plain[name] = item
    return plain


def token(value: Any) -> str | None:
    """Return ``value`` in the id of a case; None if pytest's own text is right, or if no stable text exists.

    pytest numbers dataclasses, named tuples and dtypes: a new one would rename the cases after it.
    """
    constant = _torch_constant(value)
    if constant:
        return constant
    fields = None if isinstance(value, enum.Enum) else _fields(value)
    if fields is None:
        return None
    defaults = {field.name: field.default for field in dataclasses.fields(value)} if _is_dataclass(value) else {}
    parts = []
    for name, item in fields.items():
        short = _short(item)
        if short is None:
            return None
        if item != defaults.get(name, dataclasses.MISSING):
            parts.append(f"{name}={short}")
    return f"{type(value).__name__}({','.join(parts)})"


def _short(value: Any) -> str | None:
    """Return the text of a field in an id; None if its text is not the same in every run."""
    if type(value) in _PLAIN:
        return str(value).replace(" ", "")
    if isinstance(value, enum.Enum):
        return str(value.name)
    if inspect.isfunction(value) or isinstance(value, type):
        return value.__name__
    if type(value) in (list, tuple, dict):
        try:
            return json.dumps(recorded(value), separators=(",", ":"))
        except TypeError:
            return None
    return token(value)


def _torch_constant(value: Any) -> str:
    """Return the torch name of a dtype, layout or memory format; empty for other values. Never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or type(value).__module__ != "torch":
        return ""
    name = str(value).removeprefix("torch.")
    return name if name.isidentifier() and getattr(torch, name, None) is value else ""


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields that make an equal value of the same class; None if there are none."""
    if isinstance(value, enum.Enum):
        return {"value": value.value}
    if _is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None


def _require_made_of_fields(value: Any, fields: dict[str, Any], where: str) -> None:
    kind = type(value)
    try:
        same = kind(**fields) == value
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        if same:
            return
        reason = "the new one is not equal"
    raise InvalidParameter(
        f"{where} is a {kind.__name__} that cannot be rebuilt from its fields ({reason}); "
        "use a frozen dataclass whose fields hold its whole state"
    )


def refer(workload: Workload, rootpath: Path, test_module: str = "") -> Message:
    """Return the JSON form of ``workload`` of this test module; raise InvalidParameter if it cannot be sent."""
    holder = Holder(rootpath=rootpath, test_module=test_module)
    where = holder.name(_carrier(workload))
    path = where["attribute"]
    return {
        "function": isinstance(workload, FunctionWorkload),
        **where,
        "fields": {name: encode(value, holder, f"{path}({name}=...)") for name, value in workload.parameters().items()},
        "sys_path": list(_resolved(tuple(sys.path), os.getcwd())),
    }


@functools.lru_cache(maxsize=1)
def _resolved(search_path: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """Return the import path for another process; cached, as links take 1 ms. Entries without a file stay."""
    return tuple(str(Path(entry).resolve()) if os.path.exists(entry or folder) else entry for entry in search_path)


def describe(workload: Workload) -> str:
    """Return ``module:Class`` or ``module:function``, for the record."""
    carrier = _carrier(workload)
    return f"{carrier.__module__}:{carrier.__qualname__}"


def resolve(reference: Message) -> Workload:
    """Return the workload that :func:`refer` described, made again on a rank."""
    for entry in reference["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    carrier = find(reference)
    fields = {name: decode(value) for name, value in reference["fields"].items()}
    if reference["function"]:
        return FunctionWorkload(function=carrier, arguments=fields)
    workload = carrier(**fields)
    assert isinstance(workload, Workload)
    return workload


def _carrier(workload: Workload) -> Any:
    return workload.function if isinstance(workload, FunctionWorkload) else type(workload)
