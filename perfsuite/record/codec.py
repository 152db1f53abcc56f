"""Records as plain JSON values, and back by the types of their fields; nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from perfsuite.base.errors import InvalidParameter, PerfsuiteError

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


def plain_json(text: str | bytes, *, strict: bool = False, once: bool = False) -> Any:
    """Return the value of JSON from any source.

    Raises ValueError for text that is not JSON, for nesting that is too deep, and for numbers that no float can hold;
    with ``strict`` also for NaN and for an object in which a key occurs twice, with ``once`` for the latter alone.
    """
    written = text if isinstance(text, bytes) else text.encode()
    has_long = b"0" * _MOST_DIGITS in written.translate(_AS_ZERO)
    try:
        return json.loads(
            text,
            parse_int=_whole if has_long else None,
            parse_constant=_refuse_constant if strict else None,
            object_pairs_hook=_object if strict or once else None,
        )
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def read_json(
    path: Path, failure: type[PerfsuiteError], remedy: str, *, kind: str = "", most_bytes: int = 1 << 30
) -> Any:
    """Return the value in a JSON file.  Raises ``failure`` with file, line, reason and remedy; ``kind`` begins it."""
    from perfsuite.base.files import content, why  # the gate loads this module and reads no file

    try:
        return plain_json(content(path, most_bytes).decode("utf-8-sig"), once=True)
    except OSError as error:
        reason = f" cannot be read: {why(error)}"
    except UnicodeDecodeError as error:
        reason = f" is not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        reason = f":{error.lineno}: not JSON ({error.msg}): truncated or damaged"
    except ValueError as error:
        reason = f": {error}"
    raise failure(f"{kind}{path}{reason}; {remedy}")


def _whole(written: str) -> int:
    if len(written) > _MOST_DIGITS:
        raise ValueError(f"{written[:12]}... of {len(written)} digits is not a number that perfsuite writes")
    return int(written)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"the key {json.dumps(twice)} occurs twice in one object")
    return plain


def to_json(record: Any) -> Any:
    """Plain JSON values of a record: dataclasses become objects, tuples arrays; defaults stay out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if "columns" in field.metadata and value != usual:
                columns = dataclasses.fields(value[0]) if value else ()
                plain[field.name] = {column.name: [getattr(one, column.name) for one in value] for column in columns}
            elif field.name == "schema" or value != usual:
                plain[field.name] = to_json(value)
        return plain
    if isinstance(record, Mapping):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_json(value) for value in record]
    return record


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


def _misfit(plain: Any, expected: str) -> _Misfit:
    return _Misfit(f" is {plain!r:.60}, not {expected}")


_Reader = Callable[[Any], Any]
_Parts = Iterable[tuple[str | int, Any, tuple[frozenset[type], _Reader]]]


def _each(parts: _Parts) -> list[Any]:
    """Read the values of an object or a list, each with its key or index, and with the accepted types and reader."""
    values: list[Any] = []
    for part, value, (accepted, inner) in parts:
        try:
            values.append(value if type(value) in accepted else inner(value))
        except _Misfit as misfit:
            misfit.path.append(f"[{part}]" if isinstance(part, int) else f".{part}")
            raise
    return values


def _typed(hint: Any) -> tuple[frozenset[type], _Reader]:
    return _SCALARS.get(hint, frozenset()), _reader(hint)


@functools.cache
def _reader(kind: Any) -> _Reader:  # noqa: PLR0911 - one return per kind of type
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
    if origin is not None and origin is not Literal:
        return _mapping_reader(arguments[1])
    if kind is Any:
        return lambda plain: plain
    if origin is None and issubclass(kind, tuple):
        return _row_reader(kind)

    def read(plain: Any) -> Any:
        if origin is Literal:
            if plain not in arguments:
                raise _misfit(plain, f"one of {', '.join(map(repr, arguments))}")
        elif type(plain) not in _SCALARS[kind]:
            raise _misfit(plain, f"a {kind.__name__}")
        return plain

    return read


def _dataclass_reader(kind: type) -> _Reader:
    hints, fields = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        in_columns = "columns" in field.metadata
        fields[field.name] = (frozenset(), _columns_reader(typing.get_args(hint)[0])) if in_columns else _typed(hint)

    def read(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise _misfit(plain, "an object")
        if not plain.keys() <= fields.keys():
            names = ", ".join(sorted(plain.keys() - fields.keys()))
            raise _Misfit(f" has unknown fields {names}; another version of perfsuite may have written it")
        values: dict[str, Any] = {}
        name = ""
        try:  # without _each: most values of a journal pass here
            for name, value in plain.items():
                accepted, inner = fields[name]
                values[name] = value if type(value) in accepted else inner(value)
        except _Misfit as misfit:
            misfit.path.append(f".{name}")
            raise
        try:
            return kind(**values)
        except (TypeError, InvalidParameter) as unusable:
            raise _Misfit(f": {unusable}") from None

    return read


def _columns_reader(kind: type) -> _Reader:
    readers = {name: (frozenset[type](), _tuple_reader(hint)) for name, hint in typing.get_type_hints(kind).items()}

    def read(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise _misfit(plain, "an object")
        if plain and plain.keys() != readers.keys():
            raise _Misfit(f" has the columns {', '.join(plain)}, not {', '.join(readers)}")
        columns = _each((name, plain[name], readers[name]) for name in plain and readers)
        if len(set(map(len, columns))) > 1:
            raise _Misfit(" has columns of different lengths")
        return tuple([kind(**dict(zip(readers, row, strict=True))) for row in zip(*columns, strict=True)])

    return read


def _tuple_reader(kind: Any) -> _Reader:
    accepted, inner = _typed(kind)

    def read(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise _misfit(plain, "a list")
        if accepted.issuperset(map(type, plain)):
            return tuple(plain)
        return tuple(_each((index, value, (accepted, inner)) for index, value in enumerate(plain)))

    return read


def _row_reader(kind: type[tuple[Any, ...]]) -> _Reader:
    """Return the reader of a named tuple, which is a list; fields with a default may be absent at its end."""
    readers = {name: _typed(hint) for name, hint in typing.get_type_hints(kind).items()}
    least = len(readers) - len(getattr(kind, "_field_defaults", ()))

    def read(plain: Any) -> Any:
        if not isinstance(plain, list) or not least <= len(plain) <= len(readers):
            raise _misfit(plain, f"[{', '.join(readers)}]")
        return kind(*_each(zip(readers, plain, readers.values(), strict=False)))

    return read


def _mapping_reader(kind: Any) -> _Reader:
    reader = _typed(kind)

    def read(plain: Any) -> Any:
        if not isinstance(plain, Mapping):
            raise _misfit(plain, "an object")
        if kind is Any:  # records that share an object keep sharing it
            return plain
        return dict(zip(plain, _each((key, value, reader) for key, value in plain.items()), strict=True))

    return read
