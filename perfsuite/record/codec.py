"""Records as plain JSON values, and back by the types of their fields; nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from perfsuite.base.errors import InvalidParameter

R = TypeVar("R")

_MOST_DIGITS = 300
_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")
_SCALARS: Mapping[Any, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
}
"""The types that a field of a type accepts."""
COLUMNS = {"columns": True}
"""Metadata of a field with many small records: it is written as one list per field of theirs."""


def plain_json(text: str | bytes) -> Any:
    """Return the value of JSON from any source.

    Raises ValueError for text that is not JSON, for nesting that is too deep, and for numbers that no float can hold.
    """
    written = text if isinstance(text, bytes) else text.encode()
    has_long = b"0" * _MOST_DIGITS in written.translate(_AS_ZERO)
    try:
        return json.loads(text, parse_int=_whole if has_long else None)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def _whole(written: str) -> int:
    if len(written) > _MOST_DIGITS:
        raise ValueError(f"{written[:12]}... of {len(written)} digits is not a number that perfsuite writes")
    return int(written)


def to_json(record: Any) -> Any:
    """Plain JSON values of a record: dataclasses become objects, tuples arrays; defaults stay out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        plain = {}
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if field.name == "schema" or not _is_default(field, value):
                plain[field.name] = _columns(value) if "columns" in field.metadata else to_json(value)
        return plain
    if isinstance(record, Mapping):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_json(value) for value in record]
    return record


def _columns(records: Sequence[Any]) -> dict[str, list[Any]]:
    names = [field.name for field in dataclasses.fields(records[0])] if records else []
    return {name: [getattr(record, name) for record in records] for name in names}


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False


def from_json(kind: type[R], plain: Any) -> R:
    """Return the record of ``kind`` from the output of :func:`to_json`; ValueError names a misfit."""
    try:
        return typing.cast(R, _reader(typing.cast(Any, kind))(plain))
    except _Misfit as misfit:
        raise ValueError(f"{kind.__name__}{''.join(reversed(misfit.path))}{misfit.reason}") from None


class _Misfit(Exception):
    """A value does not fit its type; ``path`` leads to it, its innermost part first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def inside(self, part: str) -> _Misfit:
        """Add the part of the path that leads to this value."""
        self.path.append(part)
        return self


def _misfit(plain: Any, expected: str) -> _Misfit:
    return _Misfit(f" is {plain!r:.60}, not {expected}")


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 - one return per kind of type
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_reader(kind)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(choice for choice in arguments if choice is not type(None)))
        if type(None) not in arguments:
            return inner
        return lambda plain: None if plain is None else inner(plain)
    if origin is tuple:
        return _tuple_reader(arguments[0])
    if origin is Literal:
        return _literal_reader(arguments)
    if origin is not None:
        return _mapping_reader(_reader(arguments[1]))
    if kind is Any:
        return lambda plain: plain
    accepted = _SCALARS[kind]

    def read(plain: Any) -> Any:
        if type(plain) not in accepted:
            raise _misfit(plain, f"a {kind.__name__}")
        return plain

    return read


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints, fields = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        reader = _columns_reader(typing.get_args(hint)[0]) if "columns" in field.metadata else _reader(hint)
        fields[field.name] = (_SCALARS.get(hint, frozenset()), reader)

    def read(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise _misfit(plain, "an object")
        if not plain.keys() <= fields.keys():
            names = ", ".join(sorted(plain.keys() - fields.keys()))
            raise _Misfit(f" has unknown fields {names}; another version of perfsuite may have written it")
        values = {}
        try:
            for name, value in plain.items():
                accepted, inner = fields[name]
                values[name] = value if type(value) in accepted else inner(value)
        except _Misfit as misfit:
            raise misfit.inside(f".{name}") from None
        try:
            return kind(**values)
        except (TypeError, InvalidParameter) as unusable:
            raise _Misfit(f": {unusable}") from None

    return read


def _columns_reader(kind: type) -> Callable[[Any], Any]:
    readers = {name: _tuple_reader(hint) for name, hint in typing.get_type_hints(kind).items()}

    def read(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise _misfit(plain, "an object")
        if plain and plain.keys() != readers.keys():
            raise _Misfit(f" has the columns {', '.join(plain)}, not {', '.join(readers)}")
        columns: list[tuple[Any, ...]] = []
        for name in plain and readers:
            try:
                columns.append(readers[name](plain[name]))
            except _Misfit as misfit:
                raise misfit.inside(f".{name}") from None
        if len(set(map(len, columns))) > 1:
            raise _Misfit(" has columns of different lengths")
        return tuple([kind(**dict(zip(readers, row, strict=True))) for row in zip(*columns, strict=True)])

    return read


def _tuple_reader(kind: Any) -> Callable[[Any], Any]:
    accepted, inner = _SCALARS.get(kind, frozenset()), _reader(kind)

    def read(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise _misfit(plain, "a list")
        if accepted.issuperset(map(type, plain)):
            return tuple(plain)
        values: list[Any] = []
        try:
            for value in plain:
                values.append(inner(value))
        except _Misfit as misfit:
            raise misfit.inside(f"[{len(values)}]") from None
        return tuple(values)

    return read


def _literal_reader(choices: tuple[Any, ...]) -> Callable[[Any], Any]:
    def read(plain: Any) -> Any:
        if plain not in choices:
            raise _misfit(plain, f"one of {', '.join(map(repr, choices))}")
        return plain

    return read


def _mapping_reader(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(plain: Any) -> Any:
        if not isinstance(plain, Mapping):
            raise _misfit(plain, "an object")
        values = {}
        try:
            for key, value in plain.items():
                values[key] = inner(value)
        except _Misfit as misfit:
            raise misfit.inside(f".{key}") from None
        return values

    return read
