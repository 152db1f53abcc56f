"""Imported figures as a file of their own (``perfsuite import --out``), and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfsuite.base.errors import ImportFailed
from perfsuite.base.files import content, why, write_file
from perfsuite.base.text import json_text
from perfsuite.imports.formats import read_file
from perfsuite.imports.row import Imported, Told
from perfsuite.record.codec import from_json, plain_json, to_json

SCHEMA = 1
_KEY = "perfsuite_imported"


def write_imported(path: Path, files: Sequence[Imported]) -> None:
    """Write what files gave; ConfigurationError where that cannot be."""
    plain = {_KEY: SCHEMA, "files": [to_json(imported) for imported in files]}
    write_file(path, json_text(plain), option="--out")


def read_imported(path: Path) -> tuple[Imported, ...]:
    """What ``perfsuite import --out`` wrote, or what another tool did, if that is unambiguous.  Raises ImportFailed."""
    try:
        plain = plain_json(content(path).decode())
    except OSError as error:
        raise ImportFailed(f"{path} cannot be read: {why(error)}; give what perfsuite import --out wrote") from None
    except ValueError:
        plain = None
    if not isinstance(plain, dict) or _KEY not in plain:
        return (read_file(path, Told()),)
    if plain[_KEY] != SCHEMA:
        raise ImportFailed(f"{path}:1: schema {plain[_KEY]} is not {SCHEMA}; update perfsuite, or import again")
    try:
        return tuple(from_json(Imported, imported) for imported in plain["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise ImportFailed(f"{path}: {error}; import again") from None
