"""The text of a baseline file: one line per run, sorted keys, and the lines of its values.

The layout is JSON that pytest-benchmark loads.  A git diff shows added and dropped runs as whole lines.  Changes by
hand are detected: each case has a check over its content, and the rest of the file has another one.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

CASE_LISTS = ("benchmarks", "unmeasured")
"""Keys of the lists of cases: with a time, which pytest-benchmark reads, and without, because they never fitted."""
TABLES = ("environments", "sessions")
"""Keys of the tables of runs, with a line per row."""
CONFLICT_MARKERS = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")
_SPACE = " \t\r\n"
_MOST_DIGITS = 300
"""Most characters of a whole number that a float can hold."""
_TOKEN = re.compile(
    r'(?P<key>"(?:[^"\\]|\\.)*")(?=[ \t\r\n]*:)|"(?:[^"\\]|\\.)*"|[{}]|(?P<number>NaN|-?Infinity|-?\d[\d.eE+-]*)'
)
"""The tokens that _first_refused checks, and the texts that it skips."""

Where = tuple[str | int, ...]
"""Path to a value inside a document: keys and indices from the top."""


class Fault(ValueError):
    """An error in a document; ``line`` counts from 1."""

    def __init__(self, reason: str, *, line: int = 0, where: Where = ()) -> None:
        """``where`` gives the place if the line is unknown."""
        super().__init__(reason)
        self.line = line
        self.where = where


def canonical(value: Any) -> str:
    """Return a value as JSON with sorted keys and without spaces.  Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def check_of(plain: Mapping[str, Any]) -> str:
    """Return the check of a case or a header: CRC-32 of its canonical form without ``check``, eight hex digits."""
    content = canonical({name: value for name, value in plain.items() if name != "check"})
    return f"{zlib.crc32(content.encode()):08x}"


def header_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document without its cases, flattened so that its check can be left out."""
    outside = {name: value for name, value in document.items() if name not in (*CASE_LISTS, "perfsuite")}
    return {**dict(document["perfsuite"]), "outside": outside}


def dump(document: Mapping[str, Any]) -> str:
    """Return the text of a document: a line per top-level value, row of a table, case field and run."""
    parts = []
    for name in sorted(document):
        value = document[name]
        if name in CASE_LISTS:
            text = _block("[", [_case(case) for case in value], "]", 0)
        elif name in TABLES:
            lines = [f"{json.dumps(key)}: {canonical(value[key])}" for key in sorted(value)]
            text = _block("{", lines, "}", 0)
        else:
            text = canonical(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _block(opening: str, lines: Sequence[str], closing: str, indent: int) -> str:
    if not lines:
        return opening + closing
    margin = " " * (indent + 1)
    body = ",\n".join(margin + line for line in lines)
    return f"{opening}\n{body}\n{' ' * indent}{closing}"


def _case(case: Mapping[str, Any]) -> str:
    lines = []
    for name in sorted(case):
        value = case[name]
        text = _block("[", [canonical(run) for run in value], "]", 2) if name == "runs" else canonical(value)
        lines.append(f"{json.dumps(name)}: {text}")
    return _block("{", lines, "}", 1)


def parse(data: bytes) -> dict[str, Any]:
    """Return the document of a file's bytes.  Raises Fault with line and reason unless it is a JSON object."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Fault(f"byte 0x{data[error.start]:02x} is not UTF-8: the file is damaged or binary", line=line) from None
    if not text.strip():
        raise Fault("the file is empty", line=1)
    try:
        document = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_float, parse_int=_whole
        )
    except json.JSONDecodeError as error:
        raise Fault(_syntax_reason(text, error), line=error.lineno) from None
    except RecursionError:
        raise Fault("brackets are nested too deep for a baseline", line=1) from None
    except _Refused:
        raise _first_refused(text) from None
    if not isinstance(document, dict):
        raise Fault(f"the file holds a JSON {_kind(document)}, not an object", line=1)
    return document


class _Refused(ValueError):
    """JSON that is not allowed in a baseline."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) < len(pairs):
        raise _Refused("a key occurs twice")
    return plain


def _refuse_number(written: str) -> float:
    shown = written if len(written) <= 24 else f"{written[:12]}... of {len(written)} characters"
    raise _Refused(f"{shown} is not a number that a baseline may hold")


def _float(written: str) -> float:
    value = float(written)
    return value if math.isfinite(value) else _refuse_number(written)


def _whole(written: str) -> float:
    return int(written) if len(written) <= _MOST_DIGITS else _refuse_number(written)


def _first_refused(text: str) -> Fault:
    keys: list[set[str]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            keys.append(set())
        elif token[0] == "}":
            keys.pop()
        elif token["key"] is not None:
            key = json.loads(token["key"])
            if key in keys[-1]:
                reason = f"the key {token['key']} occurs twice in one object"
                return Fault(reason, line=_line_at(text, token.start()))
            keys[-1].add(key)
        elif token["number"] is not None:
            try:
                (_whole if token[0].lstrip("-").isdigit() else _float)(token[0])
            except _Refused as refused:
                return Fault(str(refused), line=_line_at(text, token.start()))
    raise AssertionError("something in the text was refused")


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _syntax_reason(text: str, error: json.JSONDecodeError) -> str:
    for line in text.splitlines():
        if line.startswith(CONFLICT_MARKERS):
            return "a git conflict marker; restore both sides to files and use perfsuite baselines merge"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return f"the file ends inside a value ({error.msg}): it is truncated"
    return f"not JSON ({error.msg}, column {error.colno})"


def _kind(value: object) -> str:
    names = {list: "array", str: "string", int: "number", float: "number", bool: "truth value", type(None): "null"}
    return names.get(type(value), "value")


def line_of(text: str, where: Where) -> int:
    r"""Return the line, from 1, on which the value at ``where`` starts; without the value that of its nearest parent.

    The text must be valid JSON.

    >>> line_of('{\n "a": 1,\n "b": [\n  10,\n  20]}', ("b", 1))
    5
    """
    decoder = json.JSONDecoder()
    position = _skip(text, 0)
    for step in where:
        inner = _descend(text, position, step, decoder)
        if inner is None:
            break
        position = inner
    return _line_at(text, position)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _descend(text: str, position: int, step: str | int, decoder: json.JSONDecoder) -> int | None:
    """Return the start of the value of a key, or of the item of an index, in the container at ``position``."""
    opening = text[position]
    if opening != ("{" if isinstance(step, str) else "["):
        return None
    position = _skip(text, position + 1)
    index = 0
    while text[position] not in "]}":
        here: str | int = index
        if opening == "{":
            here, position = decoder.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)
        if here == step:
            return position
        _, position = decoder.raw_decode(text, position)
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
        index += 1
    return None
