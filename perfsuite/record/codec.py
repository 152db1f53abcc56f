"""Records as plain JSON values, and back by the types of their fields; nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from perfsuite.base.errors import InvalidParameter

R = TypeVar("R")


def plain_json(text: str | bytes) -> Any:
    """The value of JSON that anybody may have written; ValueError for what is none, and for what nobody counts with.

    Those are nesting that no program follows, and whole numbers that no float can hold.
    """
    try:
        return json.loads(
            text, parse_int=_whole if _LONG.search(text if isinstance(text, bytes) else text.encode()) else None
        )
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


_LONG = re.compile(rb"\d{300}")


def _whole(written: str) -> int:
    if len(written) > 300:
        raise ValueError(f"{written[:12]}... of {len(written)} digits is not a number that perfsuite writes")
    return int(written)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def decode(kind: Any, plain: Any, where: str) -> Any:  # noqa: PLR0911 - one return per kind of type
    """The value of type ``kind`` that ``plain`` stands for; ValueError says what does not fit, and ``where``."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, plain, where)
    if origin in (types.UnionType, typing.Union):
        if plain is None and type(None) in typing.get_args(kind):
            return None
        choices = [choice for choice in typing.get_args(kind) if choice is not type(None)]
        return decode(choices[0], plain, where)
    if origin is tuple:
        if not isinstance(plain, list):
            raise ValueError(f"{where} is {plain!r:.60}, not a list")
        inner = typing.get_args(kind)[0]
        return tuple(decode(inner, value, f"{where}[{index}]") for index, value in enumerate(plain))
    if origin is Literal:
        if plain not in typing.get_args(kind):
            raise ValueError(f"{where} is {plain!r:.60}, not one of {', '.join(map(repr, typing.get_args(kind)))}")
        return plain
    if origin is not None:
        if not isinstance(plain, Mapping):
            raise ValueError(f"{where} is {plain!r:.60}, not an object")
        inner = typing.get_args(kind)[1]
        return {key: decode(inner, value, f"{where}.{key}") for key, value in plain.items()}
    if kind is Any:
        return plain
    accepted = (int, float) if kind is float else kind
    if not isinstance(plain, accepted) or (isinstance(plain, bool) and kind is not bool):
        raise ValueError(f"{where} is {plain!r:.60}, not a {kind.__name__}")
    return plain


def _decode_dataclass(kind: type, plain: Any, where: str) -> Any:
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where} is {plain!r:.60}, not an object")
    hints = _hints(kind)
    unknown = set(plain) - set(hints)
    if unknown:
        raise ValueError(
            f"{where} has unknown fields {', '.join(sorted(unknown))}; a newer perfsuite may have written it"
        )
    values = {name: decode(hints[name], value, f"{where}.{name}") for name, value in plain.items()}
    try:
        return kind(**values)
    except (TypeError, InvalidParameter) as unusable:
        raise ValueError(f"{where}: {unusable}") from None


def to_json(record: Any) -> Any:
    """Plain JSON values of a record: dataclasses become objects, tuples arrays; defaults stay out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        plain = {}
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if field.name == "schema" or not _is_default(field, value):
                plain[field.name] = to_json(value)
        return plain
    if isinstance(record, Mapping):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_json(value) for value in record]
    return record


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False


def from_json(kind: type[R], plain: Any) -> R:
    """The record of ``kind`` that :func:`to_json` made ``plain`` of; ValueError says what does not fit."""
    try:
        return typing.cast(R, _reader(typing.cast(Any, kind))(plain))
    except (TypeError, KeyError, ValueError, InvalidParameter):
        return typing.cast(R, decode(kind, plain, kind.__name__))  # once more, to say where it does not fit


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 - one return per kind of type
    """What :func:`decode` does for one type, five times as fast because it does not know where it is."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_reader(kind)
    if origin in (types.UnionType, typing.Union) and arguments[1:] == (type(None),):
        inner = _reader(arguments[0])
        return lambda plain: None if plain is None else inner(plain)
    if origin is tuple:
        inner = _reader(arguments[0])
        return lambda plain: tuple([inner(value) for value in _exactly(list, plain)])
    if origin in (dict, Mapping):
        inner = _reader(arguments[1])
        if inner is _unchanged:
            return lambda plain: dict(_exactly(dict, plain))
        return lambda plain: {key: inner(value) for key, value in _exactly(dict, plain).items()}
    if kind is Any:
        return _unchanged
    if origin is Literal:
        return lambda plain: plain if plain in arguments else _refuse()
    if kind in _SCALARS:
        scalars = _SCALARS[kind]
        return lambda plain: plain if type(plain) in scalars else _exactly(kind, plain)
    return lambda plain: decode(kind, plain, "")


def _exactly(kind: type, plain: Any) -> Any:
    if type(plain) is not kind:
        raise ValueError
    return plain


def _refuse() -> Any:
    raise ValueError


_SCALARS: Mapping[Any, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
}


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    fields: dict[str, tuple[frozenset[type] | None, Callable[[Any], Any]]] = {}
    for name, hint in _hints(kind).items():
        fields[name] = (_SCALARS.get(hint), _unchanged if hint is Any or hint in _SCALARS else _reader(hint))
    made = _maker(kind)

    def read(plain: Any) -> Any:
        values = {}
        for name, value in _exactly(dict, plain).items():
            scalars, inner = fields[name]
            if scalars is None:
                values[name] = inner(value)
            elif type(value) in scalars:
                values[name] = value
            else:
                raise ValueError
        return made(values)

    return read


def _maker(kind: Any) -> Callable[[dict[str, Any]], Any]:
    """What makes a record of the values of its fields: those that only hold them are not sent through ``__init__``.

    That sets the fields of a frozen record one by one, which takes three times as long.
    """
    fields = dataclasses.fields(kind)
    if hasattr(kind, "__post_init__") or "__slots__" in vars(kind) or not all(field.init for field in fields):
        return lambda values: kind(**values)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    late = [(field.name, field.default_factory) for field in fields if field.default_factory is not dataclasses.MISSING]
    required = {field.name for field in fields} - defaults.keys() - {name for name, _ in late}
    new = object.__new__

    def made(values: dict[str, Any]) -> Any:
        if not required <= values.keys():
            raise ValueError
        record = new(kind)
        held = record.__dict__
        held.update(defaults)
        held.update(values)
        for name, factory in late:
            if name not in held:
                held[name] = factory()
        return record

    return made


def _unchanged(plain: Any) -> Any:
    return plain
