"""Read the cells of a user's table: units, suffixes, and other writings of signs, digits and thousands."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from perfsuite.audit.table import AuditColumn
from perfsuite.base.errors import ConfigurationError
from perfsuite.published.numbers import Interval, Number, PrintedCell, printed
from perfsuite.published.records import DEFAULT_UNITS, SCALES, scale

_NOTE = re.compile(r"<su[bp]\b.*?(?:</su[bp]>|$)|(?<=[\d%\w]) ?\[\^?\w{1,3}\](?!\()", re.IGNORECASE)
"""Footnotes behind a figure."""
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|`")
_LINK = re.compile(r"\[([^\[\]]*)\]\([^()]*\)")
_GROUP = re.compile(
    r"(?<=\d)[_'\u2019\u02bc\u066c\u00a0\u2009\u202f](?=\d{3}(?!\d))"
)  # Separators of thousands other than the comma.
_SIGN = str.maketrans("\u2212\u00b5\u03bc\u066b", "-uu.") | {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
"""The minus sign, two letters that are the ``u`` of microseconds, the Arabic point, and wide forms of ASCII."""
_DASH = re.compile(r"^[\u2010-\u2015\ufe63\u2796]\s?(?=\.?\d)")
"""Other characters that are a minus sign before a number."""
_PER = re.compile(r"(?<=[^\W\d_])\s?(?:/|per )\s?(?:it|iter|iteration|step|op|batch|GPU|gpu|device|card|步|卡|次)\b\.?")
"""Text behind a unit that does not change it: ``ms/it``, ``GB/GPU``."""
_AMBIGUOUS = re.compile(
    r"(?<![\d.,])\d+,(?:\d{1,2}|\d{4,})(?![\d,])|\d\.\d+[.,]\d|(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.])"
    r"|\d:\d|\d\s?[hm]\w*\s?\d|\d\s?[x\u00d7\u00b7*]\s?10|\b0[xX]\d"
)
"""Decimal commas, points and spaces between thousands, powers of ten, and times such as 1:30 and 1h20m."""
_LONGEST = 200
"""Most characters of a cell with a number."""
_ONE = r"[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?"
_SPREAD = re.compile(rf"({_ONE})[\s%]*(-|\u2013|\u2014|~|\.\.+|to\b|\u00b1|\+/-)\s*({_ONE})")
"""A range, or a figure with its spread."""
_PRODUCT = re.compile(r"(\d{1,6}) ?[x\u00d7*] ?(\d{1,6})")
_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]")
_REMARK = re.compile(r"(?<=\d)\s*[A-Za-z]*/\s?\d.*|(?<=\d)\s?[x\u00d7] [A-Za-z].*")
"""Text behind the figure: the total of ``44.2/48.0``, the device of ``8x A100 80GB``."""
_MULTIPLE = re.compile(
    r"[(\[,]\s*(?:in )?(?:[x\u00d7*] ?)?(k|K|M|1,?000|1e3|1e6|thousands|millions)\s*[)\]]"
    r"|\b([kKM]) ?(?:tok|samp|im|seq)\w*"
)
"""The multiple in the title of a rate: ``tokens/s (k)``, ``Ktok/s``."""
_FIRST = re.compile(r"(?P<number>\d[\d.,]*)(?:[eE][-+]?\d+)?\s?(?P<unit>[A-Za-z%\u4e00-\u9fff]+(?:/s)?)(?![\w/])")
"""The first number of a cell, directly with a unit or a suffix."""
_SLOW = re.compile(r"(?:/|\bper )\s?(?:min(?:ute)?|h(?:our|r)?|day)s?\b|/\s?(?:分钟|小时|天)")
"""Rates that are not per second."""
_BEFORE = "~≈<>=≤≥+-* "
_HEADER = re.compile(r"[(\[（]\s*([^)\]）]+?)\s*[)\]）]")
_SUFFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "万": 1e4, "亿": 1e8}
_NAMES = {"us": "usec 微秒", "ms": "msec 毫秒", "s": "sec secs seconds 秒", "min": "mins minutes 分钟"}
_NAMES |= {"h": "hr hrs hours 小时", "days": "d 天"}
_NAMES |= {"Gb/s": "Gbps Gbit/s", "GB/s": "GBps GB/sec", "MB/s": "MBps MB/sec"}
_NAMES |= {f"{one}FLOPS": f"{one}FLOPs {one}FLOP/s {one}FLOPs/s {one}FLOPS/s" for one in "GTP"}
_SYNONYMS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
"""Units of the roles by their other names."""


def without_markup(text: str) -> str:
    """Return a cell without tags, links and footnotes, in one line."""
    return re.sub(r"[ \t\r\n]+", " ", _TAG.sub(" ", _LINK.sub(r"\1", _NOTE.sub("", html.unescape(text)))))


def _plain(text: str) -> str:
    """Return a cell without markup and separators of thousands."""
    plain = without_markup(text).translate(_SIGN)
    plain = "".join(one if one.isascii() else str(unicodedata.decimal(one, one)) for one in plain)
    plain = _DASH.sub("-", _GROUP.sub("", plain).strip().strip("_"))
    return re.sub(r"(?<![\w.])\.(?=\d)", "0.", plain)


def with_unit(column: AuditColumn, cells: Sequence[str], place: str) -> AuditColumn:
    """Return a column with a unit: given, in brackets in the title, alone in the first cell, or of the figures.

    A column of several units gets the smallest unit of its role.  Raises ConfigurationError if the first row has no
    unit, or any row of a column of several units; ``place`` begins the message.
    """
    if column.unit or column.meaning.dimension not in DEFAULT_UNITS:
        return column
    header = _HEADER.search(column.name.translate(_SIGN))
    titles = ([header[1].partition("/GPU")[0]] if header else []) + [
        re.sub(r"[()\[\]]", "", text) for text in cells[:1]
    ]
    named = next(filter(None, (_unit(column, title) for title in titles)), "")  # below the title: a row of units
    if not named and column.meaning.dimension != "share":
        units = {text: _unit(column, _suffix(_plain(text))) for text in cells}
        named = next(filter(None, units.values()), "")
        is_mixed = len({*filter(None, units.values())}) > 1
        figures = [text for text in cells if _is_above_zero(text)]
        for text in figures if is_mixed else figures[:1]:  # a unit in the first row is one of the rows below
            if named and not units[text]:
                raise ConfigurationError(
                    f"{place}: {column.name}: {text!r:.40} has no unit, but another cell is in {named}; "
                    "write the unit in the title or in each cell"
                )
        named = next(iter(SCALES[column.meaning.dimension])) if is_mixed else named
    return replace(column, unit=named)


def _is_above_zero(text: str) -> bool:
    number = printed(_plain(text)).number()
    return number is not None and number.value > 0


def _suffix(plain: str) -> str:
    """Return the unit or the suffix of the first number of a cell; empty without one."""
    match = _FIRST.match(_PER.sub("", plain).lstrip(_BEFORE))
    return match["unit"] if match else ""


def cell(text: str, column: AuditColumn, place: str) -> PrintedCell:
    """Return a cell's numbers in the unit of its column; a range is one number with a wide interval.

    Raises ConfigurationError for a number that could be read in two ways; ``place`` begins the message.
    """
    plain = _plain(text)
    if column.meaning.dimension == "text":
        return printed(plain)
    if len(plain) > _LONGEST:
        raise ConfigurationError(f"{place}: {text!r:.40} has {len(plain)} characters; write one number")
    if column.meaning.exact and (product := _PRODUCT.fullmatch(plain)):
        return printed(str(int(product[1]) * int(product[2])))
    bare = _BRACKETS.sub("", plain).strip() or plain
    suffix, figure = _suffix(bare), _REMARK.sub("", bare)
    if column.meaning.dimension == "rate" and (
        _SLOW.search(f"{column.name} {bare}") or _SYNONYMS.get(suffix, suffix) in SCALES["time"]
    ):
        raise ConfigurationError(f"{place}: {text!r} is not a rate per second; convert it")
    spread = _SPREAD.search(figure)
    numbers = printed(_SPREAD.sub("", figure, 1)).numbers
    is_share_of_count = column.meaning.exact and re.search(r"\d\s*[A-Za-z]*\s*/\s*\d", bare)
    if is_share_of_count or _AMBIGUOUS.search(figure) or len(numbers) > (0 if spread else 1):
        why = "can be read in more than one way; write one number, with a decimal point and without other separators"
        raise ConfigurationError(f"{place}: {text!r} {why}")
    factor = _factor(suffix, column, f"{place}: {text!r}")
    read = _range(plain, spread, column) if spread else replace(printed(bare), text=plain)
    return replace(read, numbers=tuple(_times(number, factor) for number in read.numbers)) if factor else read


def _times(number: Number, factor: Interval) -> Number:
    interval = number.interval * factor
    return replace(number, value=interval.middle, last_place=interval.high - interval.low, filler=0)


def _factor(suffix: str, column: AuditColumn, what: str) -> Interval | None:
    """Return the factor from a cell's unit or suffix to its column's unit; None for none.

    Raises ConfigurationError for a unit or suffix that the column cannot have.
    """
    dimension, unit = column.meaning.dimension, _unit(column, suffix)
    own = column.unit or DEFAULT_UNITS.get(dimension, "")
    if unit and unit != own and dimension != "share":
        return scale(dimension, unit).over(scale(dimension, own))
    if not unit and suffix in _SUFFIXES and dimension in ("rate", "number"):
        return Interval.exactly(_SUFFIXES[suffix])
    refused = bool(suffix) if dimension in SCALES else suffix in (*_SUFFIXES, "%")
    if not unit and refused and dimension != "share":
        raise ConfigurationError(f"{what} has a suffix that its column cannot have; write the number in full")
    title = _MULTIPLE.search(column.name) if dimension == "rate" else None
    is_million = title is not None and ((title[1] or title[2])[0] in "Mm" or title[1] == "1e6")
    return Interval.exactly(1e6 if is_million else 1e3) if title else None


def _range(plain: str, spread: re.Match[str], column: AuditColumn) -> PrintedCell:
    """Return a range such as ``10-12``, or a figure with its spread; without a number in a column of settings."""
    first, last = (printed(text.lstrip("+")).numbers for text in (spread[1], spread[3]))
    numbers: tuple[Number, ...] = ()
    if first and last and not column.meaning.exact:
        low, high = first[0].value, last[0].value
        if spread[2] in ("\u00b1", "+/-"):
            low, high = low - high, low + high
        if low <= high:
            numbers = (replace(first[0], value=(low + high) / 2, last_place=high - low, filler=0),)
    return PrintedCell(text=plain, numbers=numbers, bounded=not numbers)


def _unit(column: AuditColumn, text: str) -> str:
    """Return the unit of the column's dimension that a text names; empty for other texts."""
    units = SCALES.get(column.meaning.dimension, {})
    named = text.upper() if column.meaning.dimension == "size" else _SYNONYMS.get(text, text)
    if named not in units and f"{named}B" in units and named in ("K", "M", "G"):
        named = f"{named}B"  # 12G of memory
    return named if named in units else ""
