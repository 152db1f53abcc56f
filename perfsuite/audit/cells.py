"""Read the cells of a user's table: units, suffixes, and other writings of signs, digits and thousands."""

from __future__ import annotations

import html
import math
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
    r"|\d:\d|\d\s?[hm]\w*\s?\d|\d\s?[x\u00d7\u00b7*]\s?\d|\b0[xX]\d|^[-+]?\d{1,2}\)"
)
"""Decimal commas, points and spaces between thousands, products, times such as 1:30 and 1h20m, and the note ``-1)``."""
_LONGEST = 200
"""Most characters of a cell with a number."""
_ONE = r"[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?"
_LETTERS = r"(?!to\b)[A-Za-z%\u4e00-\u9fff]+(?:/s)?"
_SPREAD = re.compile(
    rf"(?P<first>{_ONE})\s?(?P<unit>{_LETTERS})?\s?(?P<sign>-|\u2013|\u2014|~|\.\.+|to\b|\u00b1|\+/-)"
    rf"\s?(?P<last>{_ONE})\s?(?P<end>{_LETTERS})?"
)
"""A range, or a figure with its spread."""
_PRODUCT = re.compile(r"\d{1,6}(?:(?: (?:node|host)s?)? ?[x\u00d7*] ?\d{1,6})+(?=$| [A-Za-z])")
_IN_BRACKETS = re.compile(r"(?<=\()\d{1,6} ?[x\u00d7*] ?\d{1,6}(?=\))")
"""Nodes x devices behind a name, as FlagPerf prints them."""
_PAIR = re.compile(rf"{_ONE} ?/ ?{_ONE}\s?(?P<end>{_LETTERS})")
"""The used and the whole memory, with one unit behind both."""
_NO_RESULT = re.compile(
    r"\W*(?:oom|out of mem|n/?a\b|n\.a\.|not |un\w|fail|err|crash|time ?out|killed|hang|diverge|skip|dnf|dnr|tb[da]\b)",
    re.IGNORECASE,
)
"""Begin of a cell without a result; numbers behind it are of the reason, such as ``OOM at 8``."""
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
_TOKENS = {"k": 2**10, "K": 2**10, "m": 2**20, "M": 2**20}
"""Suffixes of sequence lengths: 4K is 4096."""
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


def with_unit(column: AuditColumn, cells: Sequence[str]) -> tuple[AuditColumn, dict[str, str]]:
    """Return a column with a unit: given, in brackets in the title, alone in the first cell, or of the figures.

    A column of several units gets the smallest unit of its role.  Also return the cells whose unit is unknown, with
    the reason: those without a unit if the first row has none and another one has, or if the units differ.
    """
    if column.unit or column.meaning.dimension not in DEFAULT_UNITS:
        return column, {}
    header = _HEADER.search(column.name.translate(_SIGN))
    titles = ([header[1].partition("/GPU")[0]] if header else []) + [
        re.sub(r"[()\[\]]", "", text) for text in cells[:1]
    ]
    named = next(filter(None, (_unit(column, title) for title in titles)), "")  # below the title: a row of units
    unknown: dict[str, str] = {}
    if not named and column.meaning.dimension != "share":
        units = {text: _unit(column, _suffix(_plain(text))) for text in cells}
        named = next(filter(None, units.values()), "")
        is_mixed = len({*filter(None, units.values())}) > 1
        figures = [text for text in cells if _is_above_zero(text)]
        if named and (is_mixed or not all(units[text] for text in figures[:1])):  # a unit in the first row is of all
            why = f"has no unit, but another cell is in {named}; write the unit in the title or in each cell"
            unknown = {text: why for text in figures if not units[text]}
        named = next(iter(SCALES[column.meaning.dimension])) if is_mixed else named
    return replace(column, unit=named), unknown


def _is_above_zero(text: str) -> bool:
    number = printed(_plain(text)).number()
    return number is not None and number.value > 0


def _suffix(plain: str) -> str:
    """Return the unit or the suffix of the first number of a cell, or behind a range or pair; empty without one."""
    text = _PER.sub("", plain).lstrip(_BEFORE)
    if match := _FIRST.match(text):
        return match["unit"]
    match = _SPREAD.match(text) or _PAIR.match(text)
    return (match["end"] or "").rstrip("%") if match else ""


def cell(text: str, column: AuditColumn, place: str) -> PrintedCell:
    """Return a cell's numbers in the unit of its column; a range is one number with a wide interval.

    A cell that begins with a reason such as ``OOM at 8`` has no number.  Raises ConfigurationError for a number that
    could be read in two ways; ``place`` begins the message.
    """
    plain = _plain(text)
    if column.meaning.dimension == "text":
        return printed(plain)
    if len(plain) > _LONGEST:
        raise ConfigurationError(f"{place}: {text!r:.40} has {len(plain)} characters; write one number")
    bare = _BRACKETS.sub("", plain).strip() or plain
    if _NO_RESULT.match(plain):
        return replace(printed(plain), numbers=())
    product = _PRODUCT.match(bare) or _IN_BRACKETS.search(plain)
    count = str(math.prod(int(factor) for factor in re.findall(r"\d+", product[0]))) if product else ""
    if column.meaning.exact and product and (not bare.isdigit() or bare == count):
        return printed(count)
    suffix, figure = _suffix(bare), _REMARK.sub("", _PER.sub("", bare))
    if column.meaning.dimension == "rate" and (
        _SLOW.search(f"{column.name} {bare}") or _SYNONYMS.get(suffix, suffix) in SCALES["time"]
    ):
        raise ConfigurationError(f"{place}: {text!r} is not a rate per second; convert it")
    spread = _SPREAD.search(figure)
    numbers = printed(_SPREAD.sub("", figure, 1)).numbers
    is_pair = column.meaning.dimension != "memory" and re.search(r"\d\s*[A-Za-z]*\s*/\s*\d", bare)
    is_one = column.meaning.exact * bool(product) + len(numbers) <= (0 if spread else 1) and (
        spread is None or _has_one_unit(spread, column)
    )
    if is_pair or _AMBIGUOUS.search(figure) or not is_one:
        why = "can be read in more than one way; write one number, with a decimal point and without other separators"
        raise ConfigurationError(f"{place}: {text!r} {why}")
    factor = _factor(suffix, column, f"{place}: {text!r}")
    read = printed(bare)
    read = _range(plain, spread, column) if spread else replace(read, text=bare if read.numbers else plain)
    read = replace(read, numbers=tuple(_times(number, factor) for number in read.numbers)) if factor else read
    if column.role == "sequence_length" and any(number.value.denominator > 1 for number in read.numbers):
        raise ConfigurationError(f"{place}: {text!r} is not a whole number of tokens; write the number in full")
    return read


def _has_one_unit(spread: re.Match[str], column: AuditColumn) -> bool:
    """Return whether both numbers of a range or spread have one unit, or the spread is a percentage of the first."""
    unit, end = (spread[name] or "" for name in ("unit", "end"))
    is_spread = spread["sign"] in ("\u00b1", "+/-")
    if is_spread and (end == "%" or not end):
        return unit not in _SUFFIXES or end == "%"
    return unit == end or not unit or (unit == "%" and column.meaning.dimension == "share")


def _times(number: Number, factor: Interval) -> Number:
    interval = number.interval * factor
    return replace(number, value=interval.middle, last_place=interval.high - interval.low, filler=0)


def _factor(suffix: str, column: AuditColumn, what: str) -> Interval | None:
    """Return the factor from a cell's unit or suffix to its column's unit; None for none.

    Raises ConfigurationError for a unit or suffix that the column cannot have.
    """
    dimension, unit = column.meaning.dimension, _unit(column, suffix)
    title = _MULTIPLE.search(column.name) if column.role == "sequence_length" or dimension == "rate" else None
    multiple = (title[1] or title[2]) if title else ""
    if column.role == "sequence_length" and (suffix or multiple) in _TOKENS:
        return Interval.exactly(_TOKENS[suffix or multiple])
    own = column.unit or DEFAULT_UNITS.get(dimension, "")
    if unit and unit != own and dimension != "share":
        return scale(dimension, unit).over(scale(dimension, own))
    if not unit and suffix in _SUFFIXES and dimension in ("rate", "number"):
        return Interval.exactly(_SUFFIXES[suffix])
    refused = bool(suffix) if dimension in SCALES else suffix in (*_SUFFIXES, "%")
    if not unit and refused and dimension != "share":
        raise ConfigurationError(f"{what} has a suffix that its column cannot have; write the number in full")
    is_million = bool(multiple) and (multiple[0] in "Mm" or multiple == "1e6")
    return Interval.exactly(1e6 if is_million else 1e3) if multiple else None


def _range(plain: str, spread: re.Match[str], column: AuditColumn) -> PrintedCell:
    """Return a range such as ``10-12``, or a figure with its spread; without a number in a column of settings."""
    first, last = (printed(spread[name].lstrip("+")).numbers for name in ("first", "last"))
    numbers: tuple[Number, ...] = ()
    if first and last and not column.meaning.exact:
        low, high = first[0].value, last[0].value
        if spread["sign"] in ("\u00b1", "+/-"):
            is_relative = spread["end"] == "%" and column.meaning.dimension != "share"
            by = abs(low) * high / 100 if is_relative else high
            low, high = low - by, low + by
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
