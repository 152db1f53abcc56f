"""Reading the files under ``baselines/published/``: each slip is a BaselineError that names file, place and reason."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from perfsuite.base.errors import BaselineError
from perfsuite.base.files import content, why
from perfsuite.published.numbers import printed
from perfsuite.published.records import SCHEMA, LabelJudgement, PublishedReport, PublishedRow, PublishedTable
from perfsuite.published.roles import ROLES
from perfsuite.record.codec import from_json, plain_json


def digest(table: PublishedTable) -> str:
    """SHA-256 over the printed cells: columns joined by a bar, rows by a newline; sentences that are not copied count
    as empty.
    """
    lines = ["|".join(_text(raw) for raw in row.cells) for row in table.rows]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _text(raw: Any) -> str:
    return "" if raw is None else raw if isinstance(raw, str) else str(raw[0])


def read_report(path: Path) -> PublishedReport:
    """One report's file; BaselineError names file, place and reason when it is damaged or of a newer schema."""
    try:
        plain = plain_json(content(path).decode())
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({why(error)}); give the path of a file of tables") from None
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: byte {error.start} is not UTF-8; restore the file") from None
    except json.JSONDecodeError as error:
        raise BaselineError(f"{path}:{error.lineno}: not JSON ({error.msg}); restore the file") from None
    except ValueError as error:
        raise BaselineError(f"{path}: {error}; restore the file") from None
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or "tables" not in plain:
        raise BaselineError(f"{path}: no file of published tables (it lacks schema and tables); give one that is")
    if schema > SCHEMA:
        raise BaselineError(f"{path}: schema {schema} is newer than {SCHEMA}; update perfsuite to read it")
    try:
        report = from_json(PublishedReport, plain)
        for table in report.tables:
            _check(table)
    except ValueError as error:
        raise BaselineError(f"{path}: {error}; restore the file") from None
    return report


def _check(table: PublishedTable) -> None:
    """Raise ValueError unless roles, cells, numbers and digest of a table fit together."""
    names = [column.name for column in table.columns]
    for column in table.columns:
        if column.role not in ROLES:
            raise ValueError(f"table {table.id}: column {column.name} has the unknown role {column.role!r}")
        if column.of and column.of not in names:
            raise ValueError(f"table {table.id}: column {column.name} is part of {column.of!r}, which is no column")
    if len(set(names)) != len(names):
        raise ValueError(f"table {table.id}: two columns have one name")
    for stated in (*table.stated, *table.known, *(fact for row in table.rows for fact in row.known)):
        if stated.role not in ROLES:
            raise ValueError(f"table {table.id}: {stated.text!r} is stated for the unknown role {stated.role!r}")
    for row in table.rows:
        _check_row(table, row)
    if table.digest and table.digest != digest(table):
        raise ValueError(f"table {table.id}: the cells do not match their digest")


def _check_row(table: PublishedTable, row: PublishedRow) -> None:
    where = f"table {table.id}, row of line {row.line}"
    if len(row.cells) != len(table.printed_columns):
        raise ValueError(f"{where}: {len(row.cells)} cells for {len(table.printed_columns)} columns")
    for name, judgement in row.cell_judgements.items():
        if name not in {column.name for column in table.columns}:
            raise ValueError(f"{where}: a label for {name!r}, which is no column")
        from_json(LabelJudgement, judgement)
    for column, raw in zip(table.printed_columns, row.cells, strict=True):
        if raw is None or isinstance(raw, str):
            continue
        if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], str):
            raise ValueError(f"{where}: {column.name} is {raw!r:.60}, not null, text or [text, number]")
        numbers = [float(number.value) for number in printed(raw[0]).numbers]
        if raw[1] != (numbers if len(numbers) > 1 else numbers[0] if numbers else None):
            raise ValueError(f"{where}: {column.name} prints {raw[0]!r:.60}, which is not {raw[1]!r:.60}")


def directory() -> Path:
    """Where the shipped files are: in ``baselines`` of a checkout, else in ``share`` of what it was installed into.

    That is a folder above the package, whether an environment, a user's own folder or one named by ``--target``.
    Raises BaselineError when there is none.
    """
    package = Path(__file__).parents[1]
    checkout = package.parent / "baselines" / "published"
    for place in (checkout, *(above / "share" / "perfsuite" / "published" for above in package.parents)):
        if any(place.glob("*.json")):
            return place
    raise BaselineError(
        f"no published tables in {checkout} or in share/perfsuite/published of a folder above {package}; "
        "reinstall perfsuite"
    )


def read_all(place: Path) -> tuple[PublishedReport, ...]:
    """Every report of a directory, by name."""
    return tuple(read_report(path) for path in sorted(place.glob("*.json")))
