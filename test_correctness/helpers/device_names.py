"""Which names of a device module perfsuite uses, found in the syntax trees of its sources.

A small data flow: an expression *is* a device module where it is ``torch.get_device_module(...)``, ``torch.musa``, or a
name, attribute, parameter or return value that one was given to; what it hands out (events, streams, device properties)
is followed in the same way.  So ``self._memory = torch.get_device_module(device)`` and, three methods later,
``self._memory.memory_stats()`` is a use of ``torch.musa.memory_stats``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULE = "torch.musa"
EVENT = "torch.musa.Event"
_HANDED_OUT: Mapping[str, str] = {
    "torch.musa.memory": "torch.musa.memory",
    "torch.musa.amp": "torch.musa.amp",
    "torch.musa.mccl": "torch.musa.mccl",
    "torch.musa.Event": "class torch.musa.Event",
    "torch.musa.Stream": "class torch.musa.Stream",
    "torch.musa.current_stream()": "torch.musa.Stream",
    "torch.musa.default_stream()": "torch.musa.Stream",
    "torch.musa.get_device_properties()": "device properties",
    "torch.backends.mudnn": "torch.backends.mudnn",
    "torch.accelerator": "torch.accelerator",
    "torch.cuda": "torch.cuda",
    "torch.musa": MODULE,
    "torch.backends": "torch.backends",
}
"""What an attribute, or with ``()`` the answer of a call, is."""
_OWNERS = frozenset(
    {MODULE, EVENT, "torch.musa.Stream", "torch.musa.memory", "torch.musa.amp", "torch.musa.mccl"}
    | {"device properties", "torch.backends.mudnn", "torch.accelerator", "torch.cuda"}
)


_ROOTS = r"get_device_module|torch_musa|\b(?:musa|cuda|accelerator|backends)\b"
"""Words without one of which no device module is made: of torch's names and of the keys above."""


@dataclass(frozen=True, kw_only=True)
class Use:
    place: str
    """``perfsuite/platforms/musa.py:120``."""
    owner: str
    """What has the name: torch.musa, torch.musa.Event, torch.backends.mudnn, ..."""
    name: str
    positional: int | None = None
    """Arguments given by position; None where it is not called, or called with a star."""
    keywords: tuple[str, ...] = ()
    optional: bool = False
    """Asked for with a default, ``getattr(x, "name", None)``: it may be missing."""
    optional_owner: bool = False
    """Its owner was asked for with a default: where there is no owner, nothing is missed."""

    @property
    def full(self) -> str:
        return f"{self.owner}.{self.name}"


@dataclass(kw_only=True)
class _Known:
    """What is known of values so far, over all files."""

    attributes: dict[tuple[str, str], str] = field(default_factory=dict)
    """(class, attribute of self) -> kind."""
    returns: dict[tuple[str, str], str] = field(default_factory=dict)
    """(class or file, function) -> kind."""
    parameters: dict[tuple[str, str], str] = field(default_factory=dict)
    """(class, parameter of its constructor) -> kind."""
    given: set[str] = field(default_factory=set)
    """Classes that were made with a module, or with what one handed out."""
    bases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constructors: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, table: dict[tuple[str, str], str], owner: str, name: str) -> str:
        """The entry of a class or of one that it derives from."""
        for each in (owner, *self.bases.get(owner, ())):
            if (each, name) in table:
                return table[each, name]
        return next((found for base in self.bases.get(owner, ()) if (found := self.of(table, base, name))), "")


class _Reader(ast.NodeVisitor):
    """One pass over one file: learns kinds of values into ``known`` and notes uses."""

    def __init__(self, place: str, known: _Known) -> None:
        self.place = place
        self.known = known
        self.uses: list[Use] = []
        self._owner = place  # the class, else the file
        self._scopes: list[dict[str, str]] = [{}]
        self._noted: set[int] = set()
        self._opaque: set[str] = set()  # parameters of the function at hand

    def kind(self, node: ast.expr) -> str:
        """The kind of a value; empty where it is none of ours.  A trailing ``?`` says that it may be None."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), "")
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.IfExp):
            return self.kind(node.body) or self.kind(node.orelse)
        if isinstance(node, ast.BoolOp):
            return next((found for value in node.values if (found := self.kind(value))), "")
        return ""

    def _attribute(self, node: ast.Attribute) -> str:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.known.of(self.known.attributes, self._owner, node.attr)
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            return _HANDED_OUT.get(f"torch.{node.attr}", "")
        return self._handed(self.kind(node.value), node.attr)

    @staticmethod
    def _handed(owner: str, name: str) -> str:
        found = _HANDED_OUT.get(f"{owner.rstrip('?')}.{name}", "")
        return f"{found}?" if found and owner.endswith("?") else found

    def _call(self, node: ast.Call) -> str:
        called = dotted(node.func)
        if called == "torch.get_device_module":
            return MODULE
        if called.endswith("import_module") and node.args and getattr(node.args[0], "value", "") == "torch_musa":
            return MODULE
        if called == "cast" and len(node.args) == 2:
            stamp = dotted(node.args[1]) in self._opaque and self._hands_out_events()
            return EVENT if stamp else self.kind(node.args[1])
        if called == "getattr" and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
            found = self._named(node.args[0], str(node.args[1].value))
            return f"{found.rstrip('?')}?" if found and len(node.args) == 3 else found
        return self._answer(node.func)

    def _answer(self, function: ast.expr) -> str:
        if isinstance(function, ast.Attribute):
            if dotted(function.value) in ("self", "super()"):
                return self.known.of(self.known.returns, self._owner, function.attr)
            if found := self._handed(self.kind(function.value), f"{function.attr}()"):
                return found
        kind = self.kind(function)
        return kind.removeprefix("class ") if kind.startswith("class ") else ""

    def _named(self, value: ast.expr, name: str) -> str:
        if dotted(value) == "torch":
            return _HANDED_OUT.get(f"torch.{name}", "")
        return self._handed(self.kind(value), name)

    def _hands_out_events(self) -> bool:
        """Whether the class at hand has a method that returns an event: its opaque stamps are events."""
        return any(owner == self._owner and kind == EVENT for (owner, _), kind in self.known.returns.items())

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._owner = self._owner, node.name
        self.known.bases[node.name] = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        self.generic_visit(node)
        self._owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        names = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        if node.name == "__init__":
            self.known.constructors[self._owner] = names[1:]
        given = {name: self.known.parameters.get((self._owner, name), "") for name in names}
        scope = given if node.name == "__init__" else {}
        self._scopes.append({name: kind for name, kind in scope.items() if kind})
        before, self._opaque = self._opaque, set(names[1:])
        self.generic_visit(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Return) and each.value is not None and (kind := self.kind(each.value)):
                self.known.returns[self._owner, node.name] = kind
        self._opaque = before
        self._scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._learn(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._learn(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._learn(node.target, node.value)
        self.generic_visit(node)

    def _learn(self, target: ast.expr, value: ast.expr) -> None:
        kind = self.kind(value)
        if isinstance(target, ast.Name) and (kind or target.id in self._scopes[-1]):
            self._scopes[-1][target.id] = kind
        elif kind and isinstance(target, ast.Attribute) and dotted(target.value) == "self":
            self.known.attributes[self._owner, target.attr] = kind

    def visit_Call(self, node: ast.Call) -> None:
        name = dotted(node.func).rpartition(".")[2]
        for index, argument in enumerate(node.args):
            if name[:1].isupper() and (kind := self.kind(argument)):
                self.known.given.add(name)
                parameters = self.known.constructors.get(name, ())
                if index < len(parameters):
                    self.known.parameters[name, parameters[index]] = kind
        if dotted(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            self._note(node, node.args[0], str(node.args[1].value), optional=len(node.args) == 3)
        starred = any(isinstance(each, ast.Starred) for each in node.args) or any(k.arg is None for k in node.keywords)
        if isinstance(node.func, ast.Attribute):
            keywords = tuple(str(each.arg) for each in node.keywords)
            self._noted.add(id(node.func))
            self._note(
                node,
                node.func.value,
                node.func.attr,
                positional=None if starred else len(node.args),
                keywords=() if starred else keywords,
            )
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if id(node) not in self._noted:
            self._note(node, node.value, node.attr)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname and (kind := _HANDED_OUT.get(alias.name, "")):
                self._scopes[-1][alias.asname] = kind

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        owner = _HANDED_OUT.get(node.module or "", "")
        for alias in node.names:
            if owner in _OWNERS:
                self.uses.append(Use(place=f"{self.place}:{node.lineno}", owner=owner, name=alias.name))
            if kind := _HANDED_OUT.get(f"{node.module}.{alias.name}", ""):
                self._scopes[-1][alias.asname or alias.name] = kind

    def _note(self, node: ast.expr, value: ast.expr, name: str, *, optional: bool = False, **how: Any) -> None:
        owner = self.kind(value)
        if owner.rstrip("?") in _OWNERS:
            place, perhaps = f"{self.place}:{node.lineno}", owner.endswith("?")
            owner = owner.rstrip("?")
            self.uses.append(Use(place=place, owner=owner, name=name, optional=optional, optional_owner=perhaps, **how))


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of names and attributes, ``super()`` of that call; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := dotted(node.value)) else ""
    return "super()" if isinstance(node, ast.Call) and dotted(node.func) == "super" else ""


def uses(sources: Mapping[str, str]) -> tuple[Use, ...]:
    """Every use in these sources (text by place), in order; read again until nothing new is learnt.

    A source without a word of _ROOTS, that names no class known to hold, answer or be given a module, has none.
    """
    known = _Known()
    trees: dict[str, ast.Module] = {}
    while True:
        before = (dict(known.attributes), dict(known.returns), dict(known.parameters), set(known.given))
        owners = {owner for table in before[:3] for owner, _ in table} | known.given
        names = re.compile("|".join([_ROOTS, *(rf"\b{re.escape(owner)}\b" for owner in sorted(owners))]))
        for place, text in sources.items():
            if place not in trees and names.search(text):
                trees[place] = ast.parse(text)
        readers = [_Reader(place, known) for place in sources if place in trees]
        for reader in readers:
            reader.visit(trees[reader.place])
        if before == (known.attributes, known.returns, known.parameters, known.given):
            return tuple(use for reader in readers for use in reader.uses)


def device_layer(package: Path, *, without: tuple[str, ...] = ("cuda.py",)) -> dict[str, str]:
    """Every source of the package that may drive a device, by its path; other vendors' own files are left out."""
    return {
        str(path.relative_to(package.parent)): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
        if not (path.parent.name == "platforms" and path.name in without)
    }


def complaints(found: tuple[Use, ...], version: Mapping[str, Any], avoid: tuple[str, ...] = ()) -> Iterator[str]:
    """What of these uses would fail in this version, one line each; ``avoid`` are names that must not be used."""
    label = f"torch_musa {version['version']}"
    for use in found:
        if use.owner == "torch.cuda":
            yield f"{use.place}: {use.full} is another vendor's; use torch.get_device_module"
        elif use.full in avoid or use.owner in avoid:
            yield f"{use.place}: {use.full} is to be avoided (quirks.toml)"
        elif use.full in version["broken"]:
            yield f"{use.place}: {use.full} is broken in {label}: {version['broken'][use.full]}"
        elif use.name in version["names"].get(use.owner, {}):
            if wrong := _misfit(use, version["names"][use.owner][use.name], version["names"]):
                yield f"{use.place}: {use.full} {wrong} in {label}"
        elif not (use.optional or (use.optional_owner and use.owner not in version["names"])):
            yield f"{use.place}: {use.full} does not exist in {label}"


def _misfit(use: Use, signature: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Why this call does not fit ``(device, priority=, **kwargs)``; empty when it does or nothing is known."""
    if signature == "class":
        signature = names.get(use.full, {}).get("__init__", "")
    if use.positional is None or not signature.startswith("("):
        return ""
    parts = [part for part in signature.strip("()").split(", ") if part]
    by_position = parts[: next((index for index, part in enumerate(parts) if part.startswith("*")), len(parts))]
    plain = [part.rstrip("=") for part in parts if not part.startswith("*")]
    if use.positional > len(by_position) and not any(re.fullmatch(r"\*\w+", part) for part in parts):
        return f"takes {signature} and is given {use.positional} arguments"
    unknown = [keyword for keyword in use.keywords if keyword not in plain]
    if unknown and not any(part.startswith("**") for part in parts):
        return f"takes {signature} and is given {unknown[0]}="
    missing = [part for part in by_position[use.positional :] if not part.endswith("=") and part not in use.keywords]
    return f"takes {signature} and is not given {missing[0]}" if missing else ""
