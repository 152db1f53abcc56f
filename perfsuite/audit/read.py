"""Read tables to audit: published ones, and a user's CSV or Markdown with a role for each relevant column."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perfsuite.audit.cells import cell, with_unit, without_markup
from perfsuite.audit.table import TOTAL_NAMES, AuditColumn, AuditTable, Fact, Row
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import content, decoded, why
from perfsuite.platforms import Catalog
from perfsuite.published.numbers import PrintedCell, printed
from perfsuite.published.records import (
    PARTS,
    ROLES,
    SCALES,
    PublishedReport,
    PublishedRow,
    PublishedTable,
    Stated,
)

_SUMMARY = re.compile(
    r"(?:overall |geo\w*[ -]?)?(?:averages?|avg|means?|medians?|total|sum|max(?:imum)?|min(?:imum)?"
    r"|std(?:err|\.? ?dev(?:iation)?|ev)?|standard deviation|p(?:50|75|90|95|99))\b[.:]?"
    r"(?:\s?\(.*\)| (?:of|over) .*)?|平均.{0,2}|总计|合计|最大.?|最小.?|中位数|标准差",
    re.IGNORECASE,
)
"""The first cell of a row that summarises other rows; a P40 and an STDiT are names of runs."""


def tables_of(report: PublishedReport) -> list[AuditTable]:
    """Return every table of a report for the rules; a unit without a dimension (``samples/s``) needs no factor."""
    return [_published(report, table) for table in report.tables]


def _published(report: PublishedReport, table: PublishedTable) -> AuditTable:
    units = {unit: unit for units in SCALES.values() for unit in units}
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
            AuditColumn(name=one.name, role=one.role, unit=units.get(one.unit_published, ""), index=one.index)
            for one in columns
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

    >>> parse_facts(["peak_tflops=312", "sequence_length=4K", "parameters=7B"])
    {'peak_tflops': Fact(text='312', unit=''), 'sequence_length': Fact(text='4096', unit=''), 'parameters': \
Fact(text='7B', unit='B')}
    """
    facts = {}
    for text in texts:
        match = _FACT.fullmatch(text.strip())
        if not match:
            raise ConfigurationError(f"--fact {text!r} is not ROLE=VALUE[:UNIT]; write 'peak_tflops=312'")
        _require(match["role"], match["unit"] or "", f"--fact {text!r}")
        column = AuditColumn(name=match["role"], role=match["role"], unit=match["unit"] or "")
        column, _ = with_unit(column, [match["text"]])
        read = cell(match["text"], column, f"--fact {match['role']}")
        if column.meaning.dimension != "text" and not read.numbers:
            raise ConfigurationError(f"--fact {text!r}: {match['role']} is a number; write one, for example 312")
        is_changed = [one.value for one in read.numbers] != [one.value for one in printed(match["text"]).numbers[:1]]
        value = f"{float(read.numbers[0].value):.12g}" if is_changed else match["text"]
        is_percent = column.meaning.dimension == "share" and "%" in match["text"]
        facts[match["role"]] = Fact(text=value, unit=column.unit or "%" * is_percent)
    return facts


def _require(role: str, unit: str, what: str) -> None:
    if role not in ROLES:
        raise ConfigurationError(f"{what}: {role!r} is not a role; choose from {', '.join(ROLES)}")
    units = SCALES.get(ROLES[role].dimension, {})
    if unit and unit not in units:
        choice = f"choose from {', '.join(unit for unit in units if unit)}" if units else "leave the unit out"
        raise ConfigurationError(f"{what}: {unit!r} is not a unit of {role}; {choice}")


def read_tables(path: Path, roles: Mapping[str, AuditColumn], facts: Mapping[str, Fact]) -> list[AuditTable]:
    """Return the tables of a CSV, TSV, Markdown or HTML file; those without a named column have no columns and rows.

    Cells that cannot be read are listed, and left out; a row without one of its settings is left out too.  Raises
    ConfigurationError for an unreadable file, a file without a table, and a missing column.
    """
    try:
        text = decoded(content(path, pipe=True), "strict")
    except (OSError, UnicodeDecodeError) as error:
        reason = why(error) if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path}: cannot be read ({reason}); give a CSV, Markdown or JSON file") from None
    delimiter = {".csv": ",", ".tsv": "\t"}.get(path.suffix.lower())
    grids = [*_markdown(text), *_html(text)]
    if delimiter:
        header = text.partition("\n")[0]
        if delimiter == "," and ";" in header and header.count(";") >= header.count(","):
            delimiter = ";"
        try:
            cells = [[text.strip() for text in row] for row in csv.reader(text.splitlines(), delimiter=delimiter)]
        except csv.Error as error:
            raise ConfigurationError(f"{path} is not CSV: {error}; correct or remove that row") from None
        grids = [(1, [row for row in cells if any(row)])]
    named = [(line, grid) for line, grid in grids if grid and set(grid[0]) & set(roles)]
    lines = text.splitlines()
    read = [
        _grid_table(path, line, grid, roles, facts=facts, caption=_caption(lines[: line - 1])) for line, grid in named
    ]
    tables = [one for table in read for one in _side_by_side(table)]
    others = [f"{path.name}:{line}" for line, grid in grids if grid and not set(grid[0]) & set(roles)]
    tables += [AuditTable(name=name, columns=(), rows=()) for name in others]
    titles = {title for _, grid in grids if grid for title in grid[0] if title}
    if not titles:
        raise ConfigurationError(f"{path}: no table found; give a CSV file, or Markdown or HTML tables with a header")
    missing = [name for name in roles if name not in titles]
    if missing or not named:
        absent = ", ".join(repr(name) for name in missing) or "none named by --roles"
        raise ConfigurationError(f"{path}: no column {absent}; its columns are {', '.join(sorted(titles))}")
    return tables


def _caption(lines: Sequence[str]) -> str:
    """Return the headings above a table and the last line before it, which may state a setting of its rows."""
    before = [one for one in lines if one.strip() and "|" not in one]
    headings: dict[int, str] = {}  # By level; a heading ends those of deeper levels.
    for one in (one for one in before if one.startswith("#")):
        level = len(one) - len(one.lstrip("#"))
        headings = {depth: text for depth, text in headings.items() if depth < level} | {level: one}
    return " ".join([*headings.values(), *before[-1:]])


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


_HTML = re.compile(r"(?sim)<!--.*?(?:-->|\Z)|<table\b.*?(?:</table>|\Z)|^[ >]*\+[-=+]+\+ *$.*?(?=^\s*$|\Z)")
_HTML_CELL = re.compile(r"(?si)<t[dh]\b[^<>]*>(.*?)(?=</?t[dhr]\b|</table|$)")


def _html(text: str) -> Iterator[tuple[int, Grid]]:
    """Yield (line, grid) of each HTML table; one with merged cells, or drawn with +---+, has no title and row."""
    for table in _HTML.finditer(text):
        is_merged = re.search(r"(?i)<t[dh][^<>]*span\W+([2-9]|\d\d)|^[ >]*\+", table[0])
        parts = re.split(r"(?i)<tr\b", re.sub(r"(?s)<!--.*?(?:-->|\Z)", "", table[0]))
        rows = [[without_markup(one).strip() for one in _HTML_CELL.findall(part)] for part in parts]
        yield text.count("\n", 0, table.start()) + 1, [[""]] if is_merged else [row for row in rows if any(row)]


def _pipe_cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|") if line.lstrip().startswith("|") else line
    cells = re.split(r"(?<!\\)\|", inner)
    return [cell.strip().replace("**", "").replace("\\|", "|") for cell in cells]


def _grid_table(
    path: Path, line: int, grid: Grid, roles: Mapping[str, AuditColumn], *, facts: Mapping[str, Fact], caption: str
) -> AuditTable:
    header, *body = grid
    if len(set(filter(None, header))) < len([title for title in header if title]):
        raise ConfigurationError(f"{path}:{line}: two columns have one name; rename one")
    table = f"{path.name}:{line}"
    columns: dict[str, AuditColumn] = {}
    unclear: dict[str, dict[str, str]] = {}  # By column and text: why the unit of a cell is not known.
    for at, title in enumerate(header):
        if title in roles:
            texts = [row[at] for row in body if at < len(row)]
            columns[title], unclear[title] = with_unit(roles[title], texts)
            unclear[title] |= _fractions(columns[title], texts)
    rows, summaries, unread = [], [], list[str]()
    has_totals = any(column.role in (*PARTS, "whole", "share") for column in columns.values())  # rules check them
    for index, cells in enumerate(body):
        if len(cells) > len(header):
            unread.append(f"row {index + 1}: {cells!r:.80} has {len(cells)} cells for {len(header)} columns")
            continue
        first = next(filter(None, cells))
        if _SUMMARY.fullmatch(first) and not (has_totals and first.lower() in TOTAL_NAMES):
            summaries.append(f"row {index + 1} ({first})")
            continue
        for at, title in enumerate(header[: len(cells)] if index else []):  # cells that were merged downwards
            if cells[at] or title not in roles or roles[title].meaning.kind != "configuration":
                break
            cells[at] = body[index - 1][at]
        name = f"row {index + 1} ({cells[0]})"
        figures, faults = _figures(name, dict(zip(header, cells, strict=False)), columns, unclear)
        unread += faults.values()
        if any(columns[title].meaning.kind == "configuration" for title in faults):  # the row may look like another
            unread[-1] += "; the row is left out"
            continue
        aside = [text for title, text in zip(header, cells, strict=False) if title not in roles]
        note = {"note": Fact(text=" | ".join([caption, *aside]))}
        rows.append(Row(name=name, cells=figures, facts=note, index={table: index}))
    return AuditTable(
        name=table,
        columns=tuple(columns.values()),
        rows=tuple(rows),
        facts=facts,
        summaries=tuple(summaries),
        unread=tuple(unread),
    )


def _figures(
    row: str, cells: Mapping[str, str], columns: Mapping[str, AuditColumn], unclear: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, PrintedCell], dict[str, str]]:
    """Return the cells of a row by column, and why others cannot be read; ``unclear`` is by column and text."""
    figures: dict[str, PrintedCell] = {}
    faults: dict[str, str] = {}
    for title, text in cells.items():
        if not text or title not in columns:
            continue
        try:
            if why := unclear[title].get(text):
                raise ConfigurationError(f"{row}, {title}: {text!r:.40} {why}")
            figures[title] = cell(text, columns[title], f"{row}, {title}")
        except ConfigurationError as error:
            faults[title] = str(error)
            figures[title] = PrintedCell(text=text, numbers=(), bounded=True)
    return figures, faults


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
        rows = []
        for at, row in enumerate(table.rows):
            note = Fact(text=f"{own} {row.facts['note'].text}")
            rows.append(replace(row, index={name: at}, facts={"note": note}))
        yield replace(table, name=name, columns=tuple(columns), rows=tuple(rows))


def _is_of_a_run(column: AuditColumn) -> bool:
    is_figure = column.meaning.kind in ("measured", "derived")
    return is_figure and column.role not in PARTS and not column.role.startswith("memory")


def _fractions(column: AuditColumn, cells: Sequence[str]) -> dict[str, str]:
    """Return shares that are fractions of 1 without a percent sign, although others have one, with the reason."""
    if column.meaning.dimension != "share" or column.unit or not any("%" in text for text in cells):
        return {}
    numbers = {text: printed(text).number() for text in cells if "%" not in text}
    why = "has no percent sign, other rows have one; write one form"
    return {text: why for text, number in numbers.items() if number and 0 < number.value <= 1}
