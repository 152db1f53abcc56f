"""JSON and CSV: a row per figure."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence

from perfsuite.exports.row import ExportRow
from perfsuite.text import cell_text, json_text

SCHEMA = 1


def as_json(rows: Sequence[ExportRow]) -> str:
    """``{"perfsuite_rows": 1, "rows": [...]}``."""
    plain = {"perfsuite_rows": SCHEMA, "rows": [dataclasses.asdict(row) for row in rows]}
    return json_text(plain)


def as_csv(rows: Sequence[ExportRow]) -> str:
    """A header and a line per figure; a column per part of the environment; no cell is a formula."""
    names = [field.name for field in dataclasses.fields(ExportRow) if field.name != "environment"]
    parts = sorted({part for row in rows for part in row.environment})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(cell_text(f"environment.{part}") for part in parts)])
    for row in rows:
        cells = [getattr(row, name) for name in names]
        writer.writerow([*map(_cell, cells), *(_cell(row.environment.get(part, "")) for part in parts)])
    return text.getvalue()


def _cell(value: object) -> object:
    return cell_text(value) if isinstance(value, str) else value
