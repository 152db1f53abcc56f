"""The list of formats, and reading of files.

To add a format, add a module and a row to :data:`FORMATS`. Files of ``perfsuite import --out`` are read here too.
"""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perfsuite.base.errors import ImportFailed, did_you_mean
from perfsuite.base.files import content, decoded, why
from perfsuite.base.text import json_text
from perfsuite.base.units import plural
from perfsuite.base.writing import write_file
from perfsuite.imports import (
    deepspeed,
    flagperf,
    flagperf_pretraining,
    hccl,
    megatron,
    nccl_tests,
    nvbandwidth,
    osu,
    perftest,
    superbench,
    trainers,
)
from perfsuite.imports.row import Format, Imported, ImportedRow, ImportOptions, Refused, Source
from perfsuite.record.codec import from_json, plain_json, to_json


def _is_benchmark(source: Source) -> bool:
    plain = source.json
    return isinstance(plain, dict) and {"machine_info", "benchmarks"} <= set(plain)


def _read_benchmark(source: Source) -> Imported:
    """Read pytest-benchmark's JSON storage: seconds and names, without ranks and devices."""
    if not _is_benchmark(source):
        reason = "no JSON with machine_info and benchmarks: it is cut, or of another tool"
        raise source.fault(1, reason, "give all of it")
    plain = source.json
    if "perfsuite" in plain:
        line = source.line_of('"perfsuite"')
        raise source.fault(line, "this is a baseline of perfsuite", "show it: perfsuite report FILE")
    entries = plain["benchmarks"]
    if not isinstance(entries, list):
        raise source.fault(source.line_of('"benchmarks"'), "benchmarks is not a list", "give all of the file")
    machine = plain["machine_info"] if isinstance(plain["machine_info"], dict) else {}
    rows: list[ImportedRow] = []
    for entry in entries:
        name = str(entry.get("fullname") or entry.get("name", "")) if isinstance(entry, dict) else ""
        line = source.line_of(f'"{name}"')
        stats = entry.get("stats") if name else None
        if not isinstance(stats, dict) or "median" not in stats:
            raise source.fault(line, f"{name or 'an entry'} has no median", "give a file that pytest-benchmark wrote")
        rows.append(
            source.row(
                line,
                name,
                ("median_s", "s", "lower"),
                source.number(line, stats["median"], "median"),
                printed=str(stats["median"]),
                convention="pytest-benchmark: median of its rounds, on one process",
                settings={
                    "rounds": str(stats.get("rounds", "")),
                    "machine": f"{machine.get('processor', '')} {machine.get('system', '')}".strip(),
                },
            )
        )
    if not rows:
        raise source.fault(1, "no benchmark", "give a file of a run that measured something")
    version = str(plain.get("version", "unknown"))
    return source.imported(rows, notes=[f"{plural(len(rows), 'benchmark')}, version {version}"])


FORMATS: tuple[Format, ...] = (
    nccl_tests.FORMAT,
    superbench.FORMAT,
    flagperf.FORMAT,
    flagperf_pretraining.FORMAT,
    megatron.MEGATRON,
    megatron.GPT_NEOX,
    megatron.PRIMUS,
    *trainers.TRAINERS,
    deepspeed.FORMAT,
    osu.FORMAT,
    perftest.FORMAT,
    nvbandwidth.FORMAT,
    hccl.FORMAT,
    Format(name="pytest-benchmark", about="pytest-benchmark's JSON", recognises=_is_benchmark, read=_read_benchmark),
)
_WITH_DEEPSPEED = (megatron.MEGATRON, megatron.GPT_NEOX, megatron.PRIMUS)  # Formats that read DeepSpeed's lines too.
MAX_BYTES = 256 << 20  # Size limit of a file.
_STANDARD_INPUT = Path("-")


def find_format(name: str) -> Format:
    """Return the format of this name. Raises ImportFailed with the existing names."""
    for form in FORMATS:
        if form.name == name:
            return form
    raise ImportFailed(f"{name!r} is not a format; {did_you_mean(name, [form.name for form in FORMATS])}")


def read_file(path: Path, options: ImportOptions, form: Format | None = None) -> Imported:
    """Return the figures of a file.

    ``form`` is the format; by default the only one that recognises the file. Raises ImportFailed.
    """
    shown = Path("standard input") if path == _STANDARD_INPUT else path
    source = Source(path=shown, text=_text(path), options=options)
    note = ""
    if form is None:
        fits = [each for each in FORMATS if each.recognises(source)]
        if len(fits) > 1 and deepspeed.FORMAT in fits:  # its lines stand in the logs of programs that use it
            fits.remove(deepspeed.FORMAT)
            note = "" if fits[0] in _WITH_DEEPSPEED else f"DeepSpeed's own lines: perfsuite import deepspeed {path}"
        names = ", ".join(each.name for each in fits or FORMATS)
        if len(fits) != 1:
            many = "is of several formats" if fits else "has an unknown format"
            raise ImportFailed(f"{shown} {many}; say which: perfsuite import FORMAT {path}, one of {names}")
        form = fits[0]
    for field in ("collective", "ranks", "ranks_per_node", "run"):
        if getattr(options, field) and field not in form.options:
            option, takers = f"--{field.replace('_', '-')}", [each.name for each in FORMATS if field in each.options]
            raise ImportFailed(f"{shown}: {option} does not apply to {form.name}, only to {', '.join(takers)}; omit it")
    source = replace(source, tool=form.name)
    imported = form.read(source)
    return _checked(source, replace(imported, notes=(*imported.notes, note)) if note else imported)


def _checked(source: Source, imported: Imported) -> Imported:
    """Add the dtype option to rows without a dtype, and refuse negative figures."""
    dtype = source.options.dtype
    rows: list[ImportedRow] = []
    refused = list(imported.refused)
    for row in imported.rows:
        if dtype and row.dtype not in ("", dtype):
            reason = f"the figure is of {row.dtype}, --dtype says {dtype}"
            raise source.fault(row.line, reason, "leave the option out")
        if row.unit and row.value < 0:
            why = f"{row.metric} is {row.printed!r:.40}, below 0 {row.unit}; remove the line, or run again"
            refused.append(Refused(line=row.line, text=row.printed, why=why))
        else:
            rows.append(replace(row, dtype=row.dtype or dtype))
    if imported.rows and not rows:
        reason, _, remedy = refused[-1].why.rpartition("; ")
        raise source.fault(refused[-1].line, reason, remedy)
    return replace(imported, rows=tuple(rows), refused=tuple(refused))


def _text(path: Path) -> str:
    try:
        data = _standard_input() if path == _STANDARD_INPUT else content(path, MAX_BYTES, pipe=True)
        return decoded(data, "replace")
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ImportFailed(
                f"{path} has more than {MAX_BYTES} bytes; give the part of it with the figures"
            ) from None
        raise ImportFailed(f"{path} cannot be read: {why(error)}; give a log or result file") from None


def _standard_input() -> bytes:
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES} bytes")
    return data


SCHEMA = 1
_KEY = "perfsuite_imported"


def write_imported(path: Path, files: Sequence[Imported]) -> None:
    """Write imported figures. Raises ConfigurationError if the file cannot be written."""
    plain = {_KEY: SCHEMA, "files": [to_json(imported) for imported in files]}
    write_file(path, json_text(plain), option="--out")


def read_imported(path: Path) -> tuple[Imported, ...]:
    """Return the figures of a file of ``perfsuite import --out``, or of an unambiguous file of another tool.

    Raises ImportFailed.
    """
    try:
        plain = plain_json(content(path).decode())
    except OSError as error:
        raise ImportFailed(f"{path} cannot be read: {why(error)}; give a file of perfsuite import --out") from None
    except ValueError:
        plain = None
    if not isinstance(plain, dict) or _KEY not in plain:
        return (read_file(path, ImportOptions()),)
    if plain[_KEY] != SCHEMA:
        raise ImportFailed(f"{path}:1: schema {plain[_KEY]} is not {SCHEMA}; update perfsuite, or import again")
    try:
        files = tuple(from_json(Imported, imported) for imported in plain["files"])
        if not any(imported.rows for imported in files):
            raise ValueError("it has no figure")
        for row in (row for imported in files for row in imported.rows):
            if (
                not math.isfinite(row.value)
                or (row.unit and row.value < 0)
                or not 0 <= (row.message_bytes or 0) < math.inf
            ):
                raise ValueError(
                    f"{row.metric} of {row.name!r:.60} is {row.value!r:.20} {row.unit}, which no import writes"
                )
        return files
    except (KeyError, TypeError, ValueError) as error:
        raise ImportFailed(f"{path}: {error}; import again") from None
