"""Read tables to audit: published ones, and a user's CSV or Markdown with a role for each relevant column.

A cell of a user's table may hold a unit, a suffix, or another writing of signs and thousands.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perfsuite.audit.table import AuditColumn, AuditTable, Fact, Row
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import content, decoded, why
from perfsuite.platforms import Catalog
from perfsuite.published.numbers import PrintedCell, printed
from perfsuite.published.records import (
    DEFAULT_UNITS,
    ROLES,
    SCALES,
    PublishedReport,
    PublishedRow,
    PublishedTable,
    Stated,
)

_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|`")
_GROUP = re.compile(r"(?<=\d)[_'\u00a0\u2009\u202f](?=\d{3}(?!\d))")  # Separators of thousands other than the comma.
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


def cell(text: str, column: AuditColumn, place: str) -> PrintedCell:
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
        cells = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), delimiter=delimiter)]
        grids = [(1, [row for row in cells if any(row)])]
    tables = [_grid_table(path, line, grid, roles, facts) for line, grid in grids if grid and set(grid[0]) & set(roles)]
    titles = {title for _, grid in grids for title in grid[0]} if any(grid for _, grid in grids) else set()
    if not titles:
        raise ConfigurationError(f"{path}: no table found; give a CSV file or Markdown tables with a header line")
    missing = [name for name in roles if name not in titles]
    if missing or not tables:
        named = ", ".join(repr(name) for name in missing) or "none named by --roles"
        raise ConfigurationError(
            f"{path}: no column {named}; its columns are {', '.join(sorted(filter(None, titles)))}"
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
    return [cell.strip().replace("**", "") for cell in inner.split("|")]


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
    rows = []
    for index, cells in enumerate(body):
        if len(cells) > len(header):
            raise ConfigurationError(f"{path}: {cells!r:.80} has {len(cells)} cells for {len(header)} columns")
        figures = {
            title: cell(text, columns[title], f"{path}: row {index + 1}, {title}")
            for title, text in zip(header, cells, strict=False)
            if text and title in roles
        }
        rows.append(Row(name=f"row {index + 1} ({cells[0]})", cells=figures, index={name: index}))
    return AuditTable(name=name, columns=tuple(columns.values()), rows=tuple(rows), facts=facts)
