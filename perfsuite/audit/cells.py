"""Read the cells of a user's table: units and suffixes within cells, signs and separators of other writings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from perfsuite.audit.table import AuditColumn
from perfsuite.base.errors import ConfigurationError
from perfsuite.published.numbers import Printed, printed
from perfsuite.published.roles import DEFAULT_UNITS, SCALES

_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|`")
_GROUP = re.compile(r"(?<=\d)[_'\u00a0\u2009\u202f](?=\d{3}(?!\d))")
"""Separators of thousands other than the comma."""
_SIGN = str.maketrans("\u2212\u00b5\u03bc", "-uu")
"""The minus sign, and two letters that are the ``u`` of microseconds."""
_AMBIGUOUS = re.compile(
    r"(?<![\d.,])\d+,(?:\d{1,2}|\d{4,})(?![\d,])|\d\.\d+[.,]\d|(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.])"
    r"|\d:\d|\d\s?[hm]\w*\s?\d"
)
"""Decimal commas, points and spaces between thousands, and times such as 1:30 and 1h20m."""
_FIRST = re.compile(r"(?P<number>\d[\d.,]*)(?:[eE][-+]?\d+)?\s?(?P<unit>[A-Za-z%]+(?:/s)?)(?![\w/])")
"""The first number of a cell, directly with a unit or a suffix."""
_BEFORE = "~≈<>=≤≥+-* "
_HEADER = re.compile(r"[(\[（]\s*([^)\]）]+?)\s*[)\]）]")
_SUFFIXES = {"k": "e3", "K": "e3", "M": "e6", "B": "e9", "G": "e9", "T": "e12"}
_NAMES = {"us": "usec", "ms": "msec", "s": "sec secs seconds", "min": "mins minutes", "h": "hr hrs hours", "days": "d"}
_NAMES |= {"Gb/s": "Gbps Gbit/s", "GB/s": "GBps GB/sec", "MB/s": "MBps MB/sec"}
_NAMES |= {f"{one}FLOPS": f"{one}FLOPs {one}FLOP/s {one}FLOPs/s {one}FLOPS/s" for one in "GTP"}
_SYNONYMS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
"""Units of the roles by their other names."""


def _suffix(text: str) -> str:
    match = _FIRST.match(_TAG.sub("", text).translate(_SIGN).lstrip(_BEFORE))
    return match["unit"] if match else ""


def with_unit(column: AuditColumn, cells: Sequence[str]) -> AuditColumn:
    """Return a column with a unit: the given one, else the unit in brackets in the title, else the unit of a cell."""
    if column.unit or column.meaning.dimension not in DEFAULT_UNITS:
        return column
    header = _HEADER.search(column.name.translate(_SIGN))
    named = _unit(column, header[1].partition("/GPU")[0]) if header else ""
    if not named and column.meaning.dimension != "share":
        named = next((unit for cell in cells if (unit := _unit(column, _suffix(cell)))), "")
    return replace(column, unit=named)


def cell(text: str, column: AuditColumn, place: str) -> Printed:
    """Return a cell's numbers in the unit of its column.

    Raises ConfigurationError for a number that could be read in two ways; ``place`` begins the message.
    """
    plain = _GROUP.sub("", _TAG.sub("", text).translate(_SIGN)).strip()
    if column.meaning.dimension == "text":
        return printed(plain)
    if _AMBIGUOUS.search(plain):
        why = "can be read in more than one way; write one number, with a decimal point and without other separators"
        raise ConfigurationError(f"{place}: {text!r} {why}")
    match = _FIRST.match(plain.lstrip(_BEFORE))
    if not match:
        return printed(plain)
    suffix, unit = match["unit"], _unit(column, match["unit"])
    own = column.unit or DEFAULT_UNITS.get(column.meaning.dimension, "")
    if unit and unit != own and column.meaning.dimension != "share":
        raise ConfigurationError(f"{place}: {text!r} is in {unit}, but the column in {own}; write one unit in all rows")
    if not unit and suffix in _SUFFIXES and column.meaning.dimension in ("rate", "number"):
        return printed(plain.replace(match[0], match["number"] + _SUFFIXES[suffix], 1))
    if not unit and suffix in (*_SUFFIXES, "%") and column.meaning.dimension != "share":
        raise ConfigurationError(
            f"{place}: {text!r} has a suffix that its column cannot have; write the number in full"
        )
    return printed(plain)


def _unit(column: AuditColumn, text: str) -> str:
    """Return the unit of the column's dimension that a text names; empty for other texts."""
    units = SCALES.get(column.meaning.dimension, {})
    named = _SYNONYMS.get(text, text)
    if named not in units and f"{named}B" in units and named in "KMG":
        named = f"{named}B"  # 12G of memory
    return named if named in units else ""
