"""Read tables to audit: published ones, and a user's CSV or Markdown with a role for each relevant column.

A cell of a user's table may hold a unit, a suffix, or another writing of signs and thousands.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from perfsuite.audit.table import AuditColumn, AuditTable, Fact, Row
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import content, decoded, why
from perfsuite.platforms import Catalog
from perfsuite.published.numbers import Interval, Number, PrintedCell, printed
from perfsuite.published.records import (
    DEFAULT_UNITS,
    PARTS,
    ROLES,
    SCALES,
    PublishedReport,
    PublishedRow,
    PublishedTable,
    Stated,
    scale,
)

_NOTE = re.compile(r"<su[bp]\b.*?</su[bp]>|(?<=[\d%\w]) ?\[\^?\w{1,3}\](?!\()", re.IGNORECASE)
"""Footnotes behind a figure."""
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|`")
_LINK = re.compile(r"\[([^\[\]]*)\]\([^()]*\)")
_GROUP = re.compile(r"(?<=\d)[_'\u00a0\u2009\u202f](?=\d{3}(?!\d))")  # Separators of thousands other than the comma.
_SIGN = str.maketrans("\u2212\u00b5\u03bc", "-uu")
"""The minus sign, and two letters that are the ``u`` of microseconds."""
_AMBIGUOUS = re.compile(
    r"(?<![\d.,])\d+,(?:\d{1,2}|\d{4,})(?![\d,])|\d\.\d+[.,]\d|(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.])"
    r"|\d:\d|\d\s?[hm]\w*\s?\d"
)
"""Decimal commas, points and spaces between thousands, and times such as 1:30 and 1h20m."""
_LONGEST = 200
"""Most characters of a cell with a number."""
_ONE = r"[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?"
_SPREAD = re.compile(rf"({_ONE})[\s%]*(-|\u2013|\u2014|~|\.\.+|to\b|\u00b1|\+/-)\s*({_ONE})")
"""A range, or a figure with its spread."""
_PRODUCT = re.compile(r"(\d{1,6}) ?[x\u00d7*] ?(\d{1,6})")
_REMARK = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|(?<=\d)\s*[A-Za-z]*/\s?\d.*|(?<=\d)\s?[x\u00d7] [A-Za-z].*")
"""Text behind the figure: brackets, the total of ``44.2/48.0``, the device of ``8x A100 80GB``."""
_MULTIPLE = re.compile(
    r"[(\[,]\s*(?:in )?(?:[x\u00d7*] ?)?(k|K|M|1,?000|1e3|1e6|thousands|millions)\s*[)\]]"
    r"|\b([kKM]) ?(?:tok|samp|im|seq)\w*"
)
"""The multiple in the title of a rate: ``tokens/s (k)``, ``Ktok/s``."""
_FIRST = re.compile(r"(?P<number>\d[\d.,]*)(?:[eE][-+]?\d+)?\s?(?P<unit>[A-Za-z%]+(?:/s)?)(?![\w/])")
"""The first number of a cell, directly with a unit or a suffix."""
_BEFORE = "~≈<>=≤≥+-* "
_WORD = re.compile(r"[^\W\d_]{2}")
"""A text that is a setting or a remark, and not a figure."""
_HEADER = re.compile(r"[(\[（]\s*([^)\]）]+?)\s*[)\]）]")
_SUFFIXES = {"k": "e3", "K": "e3", "M": "e6", "B": "e9", "G": "e9", "T": "e12"}
_NAMES = {"us": "usec", "ms": "msec", "s": "sec secs seconds", "min": "mins minutes", "h": "hr hrs hours", "days": "d"}
_NAMES |= {"Gb/s": "Gbps Gbit/s", "GB/s": "GBps GB/sec", "MB/s": "MBps MB/sec"}
_NAMES |= {f"{one}FLOPS": f"{one}FLOPs {one}FLOP/s {one}FLOPs/s {one}FLOPS/s" for one in "GTP"}
_SYNONYMS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
"""Units of the roles by their other names."""


def _plain(text: str) -> str:
    """Return a cell without markup, footnotes and separators of thousands."""
    return _GROUP.sub("", _TAG.sub(" ", _LINK.sub(r"\1", _NOTE.sub("", text))).translate(_SIGN)).strip()


def with_unit(column: AuditColumn, cells: Sequence[str]) -> AuditColumn:
    """Return a column with a unit: the given one, else the unit in brackets in the title, else the unit of a cell."""
    if column.unit or column.meaning.dimension not in DEFAULT_UNITS:
        return column
    header = _HEADER.search(column.name.translate(_SIGN))
    named = _unit(column, header[1].partition("/GPU")[0]) if header else ""
    if not named and column.meaning.dimension != "share":
        firsts = [match["unit"] for text in cells if (match := _FIRST.match(_plain(text).lstrip(_BEFORE)))]
        named = next(filter(None, (_unit(column, unit) for unit in firsts)), "")
    return replace(column, unit=named)


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
    figure = _REMARK.sub("", plain)
    spread = _SPREAD.search(figure)
    numbers = printed(_SPREAD.sub("", figure, 1)).numbers
    if _AMBIGUOUS.search(plain) or len(numbers) > (0 if spread else 1):
        why = "can be read in more than one way; write one number, with a decimal point and without other separators"
        raise ConfigurationError(f"{place}: {text!r} {why}")
    match = _FIRST.match(plain.lstrip(_BEFORE))
    factor = _factor(match["unit"] if match else "", column, f"{place}: {text!r}")
    if spread:
        return _range(plain, spread, factor, column)
    if factor and (one := re.search(_ONE, figure)):
        plain = plain.replace(one[0], one[0] + factor, 1)
    return printed(plain)


def _factor(suffix: str, column: AuditColumn, what: str) -> str:
    """Return the power of ten from a cell's unit or suffix to its column's unit, such as ``e3``; empty for none.

    Raises ConfigurationError for a unit or suffix that the column cannot have.
    """
    dimension, unit = column.meaning.dimension, _unit(column, suffix)
    own = column.unit or DEFAULT_UNITS.get(dimension, "")
    if unit and unit != own and dimension != "share":
        ratio = scale(dimension, unit).over(scale(dimension, own))
        digits = next((n for n in range(-12, 13) if ratio == Interval.exactly(Fraction(10) ** n)), None)
        if digits is None:
            raise ConfigurationError(f"{what} is in {unit}, but the column in {own}; write one unit in all rows")
        return f"e{digits}"
    if not unit and suffix in _SUFFIXES and dimension in ("rate", "number"):
        return _SUFFIXES[suffix]
    if not unit and suffix in (*_SUFFIXES, "%") and dimension != "share":
        raise ConfigurationError(f"{what} has a suffix that its column cannot have; write the number in full")
    title = _MULTIPLE.search(column.name) if dimension == "rate" else None
    return ("e6" if (title[1] or title[2])[0] in "Mm" or title[1] == "1e6" else "e3") if title else ""


def _range(plain: str, spread: re.Match[str], factor: str, column: AuditColumn) -> PrintedCell:
    """Return a range such as ``10-12``, or a figure with its spread; without a number in a column of settings."""
    first, last = (printed(text.lstrip("+") + factor).numbers for text in (spread[1], spread[3]))
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
    named = _SYNONYMS.get(text, text)
    if named not in units and f"{named}B" in units and named in ("K", "M", "G"):
        named = f"{named}B"  # 12G of memory
    return named if named in units else ""


def tables_of(report: PublishedReport) -> list[AuditTable]:
    """Return every table of a report for the rules; a unit without a dimension (``samples/s``) needs no factor."""
    return [_published(report, table) for table in report.tables]


def _published(report: PublishedReport, table: PublishedTable) -> AuditTable:
    units = {unit for units in SCALES.values() for unit in units}
    name = f"{report.report}/{table.id}"
    columns = [column for column in table.columns if not column.prose]
    rows = []
    for index, row in enumerate(table.rows):
        cells = {column.name: cell for column in columns if (cell := table.cell(row, column))}
        if any(ROLES[column.role].dimension != "text" and column.name in cells for column in columns):
            facts = _facts(row.parameters, row.added_facts)
            rows.append(Row(name=_row_name(table, row), cells=cells, facts=facts, index={name: index}))
    facts = _facts({"model": table.model, **table.parameters}, (*table.stated, *table.added_facts))
    return AuditTable(
        name=name,
        columns=tuple(
            AuditColumn(
                name=column.name,
                role=column.role,
                unit=column.unit_published if column.unit_published in units else "",
                index=column.index,
            )
            for column in columns
        ),
        rows=tuple(rows),
        facts={role: fact for role, fact in facts.items() if fact.text},
        run_set=f"{report.report}/{table.run_set}" if table.run_set else "",
    )


def _row_name(table: PublishedTable, row: PublishedRow) -> str:
    cells = [(column, cell) for column in table.printed_columns[:2] if (cell := table.cell(row, column))]
    words = [cell.text.strip() for column, cell in cells if ROLES[column.role].dimension == "text" and not cell.blank]
    if not words and cells:
        words = [f"{cells[0][0].name} {cells[0][1].text.strip()}"]
    return f"line {row.line} ({' '.join(words)})"


def _facts(parameters: Mapping[str, object], stated: Sequence[Stated]) -> dict[str, Fact]:
    facts = {role: Fact(text=str(value)) for role, value in parameters.items() if role in ROLES}
    return facts | {fact.role: Fact(text=fact.text, unit=fact.unit) for fact in stated}


_ROLE = re.compile(r"(?P<name>.+)=(?P<role>[a-z_0-9]+)(?::(?P<unit>\S+))?")
_FACT = re.compile(r"(?P<role>[a-z_0-9]+)=(?P<text>.+?)(?::(?P<unit>\S+))?")


def parse_roles(texts: Sequence[str]) -> dict[str, AuditColumn]:
    """Parse ``COLUMN=ROLE[:UNIT]`` into columns by name. Raises ConfigurationError for other text.

    >>> roles = parse_roles(["step (ms)=latency", "mem=memory:GiB"])
    >>> roles["step (ms)"].role, roles["mem"].unit
    ('latency', 'GiB')
    """
    columns = []
    for text in texts:
        match = _ROLE.fullmatch(text.strip())
        if not match:
            raise ConfigurationError(f"--roles {text!r} is not COLUMN=ROLE[:UNIT]; write 'time=latency:ms'")
        _require(match["role"], match["unit"] or "", f"--roles {text!r}")
        columns.append(AuditColumn(name=match["name"].strip(), role=match["role"], unit=match["unit"] or ""))
    return {column.name: column for column in columns}


def parse_facts(texts: Sequence[str]) -> dict[str, Fact]:
    """Parse ``ROLE=VALUE[:UNIT]``, facts of every row. Raises ConfigurationError for other text.

    >>> parse_facts(["peak_tflops=312"])["peak_tflops"]
    Fact(text='312', unit='')
    """
    facts = {}
    for text in texts:
        match = _FACT.fullmatch(text.strip())
        if not match:
            raise ConfigurationError(f"--fact {text!r} is not ROLE=VALUE[:UNIT]; write 'peak_tflops=312'")
        _require(match["role"], match["unit"] or "", f"--fact {text!r}")
        if ROLES[match["role"]].dimension != "text" and not printed(match["text"]).numbers:
            raise ConfigurationError(f"--fact {text!r}: {match['role']} is a number; write one, for example 312")
        facts[match["role"]] = Fact(text=match["text"], unit=match["unit"] or "")
    return facts


def _require(role: str, unit: str, what: str) -> None:
    if role not in ROLES:
        raise ConfigurationError(f"{what}: {role!r} is not a role; choose from {', '.join(ROLES)}")
    units = SCALES.get(ROLES[role].dimension, {})
    if unit and unit not in units:
        choice = f"choose from {', '.join(unit for unit in units if unit)}" if units else "leave the unit out"
        raise ConfigurationError(f"{what}: {unit!r} is not a unit of {role}; {choice}")


def read_tables(path: Path, roles: Mapping[str, AuditColumn], facts: Mapping[str, Fact]) -> list[AuditTable]:
    """Return the tables of a CSV, TSV or Markdown file with at least one of the named columns.

    Raises ConfigurationError for an unreadable file, a file without a table, a missing column, and rows longer than
    their header.
    """
    try:
        text = decoded(content(path, pipe=True), "strict")
    except (OSError, UnicodeDecodeError) as error:
        reason = why(error) if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path}: cannot be read ({reason}); give a CSV, Markdown or JSON file") from None
    delimiter = {".csv": ",", ".tsv": "\t"}.get(path.suffix.lower())
    grids = list(_markdown(text))
    if delimiter:
        header = text.partition("\n")[0]
        if delimiter == "," and ";" in header and header.count(";") >= header.count(","):
            delimiter = ";"
        cells = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), delimiter=delimiter)]
        grids = [(1, [row for row in cells if any(row)])]
    named = [(line, grid) for line, grid in grids if grid and set(grid[0]) & set(roles)]
    tables = [one for line, grid in named for one in _side_by_side(_grid_table(path, line, grid, roles, facts))]
    titles = {title for _, grid in grids for title in grid[0]} if any(grid for _, grid in grids) else set()
    if not titles:
        raise ConfigurationError(f"{path}: no table found; give a CSV file or Markdown tables with a header line")
    missing = [name for name in roles if name not in titles]
    if missing or not tables:
        absent = ", ".join(repr(name) for name in missing) or "none named by --roles"
        raise ConfigurationError(
            f"{path}: no column {absent}; its columns are {', '.join(sorted(filter(None, titles)))}"
        )
    return tables


def with_peaks(tables: Sequence[AuditTable], catalog: Catalog) -> list[AuditTable]:
    """Add the dense peak of the device that each row names.

    Without a dtype it is the peak in 16 bits, which is compared with stated peaks only.
    """
    return [replace(table, rows=tuple(_with_peak(table, row, catalog) for row in table.rows)) for table in tables]


def _with_peak(table: AuditTable, row: Row, catalog: Catalog) -> Row:
    device, dtype = catalog.called(table.text(row, "device")), table.text(row, "dtype").lower()
    peak = device.tflops.get(dtype or "bf16", device.tflops.get("fp16") if not dtype else None) if device else None
    if peak is None:
        return row
    roles = ["dense_peak_tflops", *(["peak_tflops"] if dtype else [])]
    peaks = {role: Fact(text=f"{peak.value:g}") for role in roles if not table.says(role)}
    return replace(row, facts={**row.facts, **peaks})


Grid = list[list[str]]


def _markdown(text: str) -> Iterator[tuple[int, Grid]]:
    """Yield (line of the header, header and rows) of each pipe table."""
    lines = text.splitlines()
    for number in range(1, len(lines)):
        if not re.fullmatch(r"\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*", lines[number]) or "|" not in lines[number - 1]:
            continue
        end = next((at for at in range(number + 1, len(lines)) if "|" not in lines[at]), len(lines))
        body = [_pipe_cells(line) for line in (lines[number - 1], *lines[number + 1 : end])]
        yield number, [row for row in body if any(row)]


def _pipe_cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|") if line.lstrip().startswith("|") else line
    cells = re.split(r"(?<!\\)\|", inner)
    return [cell.strip().replace("**", "").replace("\\|", "|") for cell in cells]


def _grid_table(
    path: Path, line: int, grid: Grid, roles: Mapping[str, AuditColumn], facts: Mapping[str, Fact]
) -> AuditTable:
    header, *body = grid
    if len(set(filter(None, header))) < len([title for title in header if title]):
        raise ConfigurationError(f"{path}:{line}: two columns have one name; rename one")
    name = f"{path.name}:{line}"
    columns = {
        title: with_unit(roles[title], [row[at] for row in body if at < len(row)])
        for at, title in enumerate(header)
        if title in roles
    }
    for column in columns.values():
        _require_one_share(column, [row[header.index(column.name)] for row in body if len(row) == len(header)], path)
    rows = []
    for index, cells in enumerate(body):
        if len(cells) > len(header):
            raise ConfigurationError(f"{path}: {cells!r:.80} has {len(cells)} cells for {len(header)} columns")
        for at, title in enumerate(header[: len(cells)] if index else []):  # cells that were merged downwards
            if cells[at] or title not in roles or roles[title].meaning.kind != "configuration":
                break
            cells[at] = body[index - 1][at]
        figures = {
            title: cell(text, columns[title], f"{path}: row {index + 1}, {title}")
            for title, text in zip(header, cells, strict=False)
            if text and title in roles
        }
        aside = [text for title, text in zip(header, cells, strict=False) if title not in roles and _WORD.search(text)]
        rows.append(
            Row(
                name=f"row {index + 1} ({cells[0]})",
                cells=figures,
                facts={"note": Fact(text=" ".join(aside))} if aside else {},
                index={name: index},
            )
        )
    return AuditTable(name=name, columns=tuple(columns.values()), rows=tuple(rows), facts=facts)


def _side_by_side(table: AuditTable) -> Iterator[AuditTable]:
    """Yield a table for each run that a row holds: two columns with the role mfu are of two runs."""
    count = Counter(column.role for column in table.columns if _is_of_a_run(column))
    most = max(count.values(), default=0)
    if most < 2:
        yield table
        return
    for run in range(most):
        nth: Counter[str] = Counter()
        columns: list[AuditColumn] = []
        for column in table.columns:
            if count[column.role] < 2 or nth[column.role] == run:
                columns.append(column)
            nth[column.role] += 1
        own = next(column.name for column in columns if count[column.role] > 1)
        name = f"{table.name} {own}"
        rows = tuple(replace(row, index={name: index}) for index, row in enumerate(table.rows))
        yield replace(table, name=name, columns=tuple(columns), rows=rows)


def _is_of_a_run(column: AuditColumn) -> bool:
    is_figure = column.meaning.kind in ("measured", "derived")
    return is_figure and column.role not in PARTS and not column.role.startswith("memory")


def _require_one_share(column: AuditColumn, cells: Sequence[str], path: Path) -> None:
    """Raise ConfigurationError if some shares have a percent sign, and others are fractions of 1."""
    if column.meaning.dimension == "share" and not column.unit and any("%" in text for text in cells):
        for text in cells:
            number = printed(text).number()
            if "%" not in text and number and 0 < number.value <= 1:
                raise ConfigurationError(
                    f"{path}: {column.name} is {text!r} without a percent sign, other rows have one; write one form"
                )
