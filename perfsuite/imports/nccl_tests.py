"""nccl-tests and its forks (rccl-tests, mccl): text of all versions, and the JSON of ``-J``.

algbw is computed from size and time, because it is printed with two decimals; busbw follows from it. A file may have
several runs, each with its own collective and ranks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from perfsuite.base.errors import ImportFailed
from perfsuite.base.masking import is_secret_name, masked
from perfsuite.base.units import gb_per_s, plural
from perfsuite.imports.nccl_deduce import BYTES, Found, decide, figure, from_time, meets
from perfsuite.imports.nccl_table import LogPoint, factor, is_row, is_table
from perfsuite.imports.nccl_text import BEGIN, Log, read_runs
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Refused, Source
from perfsuite.published.numbers import Interval, printed

# The JSON that nccl-tests writes with ``-J``: version 3, and newer ones with the same fields.

_KEPT = re.compile(r"^(NCCL|RCCL|MCCL|UCX)_\w+$|^(CUDA|MUSA|HIP)_VISIBLE_DEVICES$")
"""Variables that change results; the other variables of the environment are not imported."""

_MOST_RANKS = 1 << 20


def _is_json(source: Source) -> bool:
    plain = source.json
    return isinstance(plain, dict) and {"version", "config", "results"} <= set(plain)


def _read_json(source: Source) -> Log:
    plain: dict[str, Any] = source.json
    config, results = plain["config"], plain["results"]
    try:
        names = ("nthreads", "ngpus")
        of_process = [source.whole(source.line_of(f'"{name}"'), config[name], name, 1) for name in names]
        groups = Counter(str(device.get("group", 0)) for device in config["devices"] if isinstance(device, dict))
        if len(set(groups.values())) > 1:
            reason = "groups of NCCL_TESTS_SPLIT with different numbers of ranks"
            raise source.fault(source.line_of('"devices"'), reason, "give the text instead")
        ranks = max(1, len(config["devices"]) // max(1, len(groups))) * math.prod(of_process)
        if ranks > _MOST_RANKS:
            reason = f"{ranks} ranks are more than any machine has"
            raise source.fault(source.line_of('"config"'), reason, "give the text instead")
        refused: list[Refused] = []
        points = tuple(_json_points(source, results, refused))
        named = {str(result.get("experiment_name", "")) for result in results}
        variables = [text.partition("=") for text in plain.get("env") or () if isinstance(text, str)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"version {plain['version']} lacks a field ({error!r:.60})"
        raise source.fault(1, reason, "give the text instead") from None
    if len(named) > 1:
        raise source.fault(1, f"two collectives in one file ({', '.join(sorted(named))})", "give a file for each")
    kept = {name: value for name, _, value in variables if _KEPT.match(name) and not is_secret_name(name)}
    settings = {f"environment {name}": masked(value) for name, value in kept.items()}
    if "nccl_version" in plain:
        settings["nccl_version"] = str(plain["nccl_version"])
    return Log(
        points=points,
        ranks=ranks,
        groups=max(1, len(groups)),
        named="".join(named),
        units=True,
        cpu_time=any("cpu_time" in (result.get(side) or {}) for result in results for side in _SIDES),
        settings=settings,
        refused=tuple(refused),
    )


_SIDES = ("out_of_place", "in_place")


def _json_points(source: Source, results: Sequence[Mapping[str, Any]], refused: list[Refused]) -> Iterator[LogPoint]:
    for index, result in enumerate(results):
        line = source.line_of('"size"', index)
        for side in _SIDES:
            values = result.get(side)
            if values is None:
                continue
            time = values["time"] if "time" in values else values["cpu_time"]
            figures = (("time", time), ("alg_bw", values["alg_bw"]), ("bus_bw", values["bus_bw"]))
            try:
                numbers = [source.number(line, value, what) for what, value in figures]
            except ImportFailed as error:
                refused.append(Refused(line=line, text=f"{side} {result['size']} B", why=_reason(source, error)))
                continue
            wrong = values.get("nwrong")
            yield LogPoint(
                line=line,
                size=source.whole(line, result["size"], "size"),
                dtype=str(result["type"]),
                operation=str(result.get("redop", "none")).strip().replace("none", ""),
                root=int(result["root"]) if str(result.get("root", "")).strip() else None,
                in_place=side == "in_place",
                time_us=numbers[0],
                printed=(str(time), str(values["alg_bw"]), str(values["bus_bw"])),
                wrong="N/A" if wrong is None else str(wrong),
            )


def _reason(source: Source, error: ImportFailed) -> str:
    return re.sub(r"^:\d+: ", "", str(error).removeprefix(str(source.path)))


# ---- figures ----

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"float": "fp32", "double": "fp64", "half": "fp16", "bfloat16": "bf16", "char": "int8", "int": "int32"}
)
_CONVENTION = "nccl-tests; from size and time"
_LEAST_US = 1e-3  # Smallest time that a clock can measure.
_LIMITS: Mapping[str, float] = MappingProxyType({"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12})
"""Largest valid deviation per rank in nccl-tests before August 2022; 0 for whole numbers."""


def _read(source: Source) -> Imported:
    logs = [_read_json(source)] if _is_json(source) else _read_text(source)
    number = source.options.run
    if number and number > len(logs):
        reason = f"--run {number} of {plural(len(logs), 'run')}"
        raise source.fault(logs[-1].line, reason, f"choose 1 to {len(logs)}")
    chosen = [(index, log) for index, log in enumerate(logs, start=1) if number in (None, index)]
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    notes: list[str] = []
    for index, log in chosen:
        run = f"run {index} line {log.line}" if len(logs) > 1 else ""
        try:
            read, left_out, more = _run(source, log, run and f"run {index}")
        except ImportFailed as error:
            if len(chosen) == 1:
                raise
            at = re.match(r":(\d+): ", str(error).removeprefix(str(source.path)))
            line = int(at[1]) if at else log.line
            refused.append(Refused(line=line, text=f"all of {run}", why=_reason(source, error)))
            continue
        rows += read
        refused += left_out
        notes += [f"{run}: {', '.join(more)}" if run else more[0], *(() if run else more[1:])]
    if not rows and len(chosen) > 1:
        raise source.fault(refused[0].line, refused[0].why.partition(";")[0], "give the log of a run that ended")
    many = [f"{len(logs)} runs"] if len(logs) > 1 else []
    return source.imported(rows, refused=sorted(refused, key=lambda one: one.line), notes=[*many, *notes])


def _read_text(source: Source) -> list[Log]:
    if source.text.lstrip().startswith("{") and not any(BEGIN.search(line) for line in source.lines):
        reason = "no JSON of -J (version, config, results): it is cut, or of another tool"
        raise source.fault(1, reason, "give all of it")
    return read_runs(source)


def _run(source: Source, log: Log, run: str) -> tuple[list[ImportedRow], list[Refused], list[str]]:
    refused = list(log.refused)
    if not log.points and refused:
        reason, _, remedy = refused[0].why.rpartition("; ")
        raise source.fault(refused[0].line, reason or refused[0].why, remedy)
    sized = [point for point in log.points if point.size > 0]
    if not sized:
        raise source.fault(log.line, "no row with a size above 0", "run a larger message")
    found = decide(source, log, sized)
    empty = len(log.points) - len(sized)
    left_out = (f"{plural(empty, 'figure')} of size 0 left out: nothing was sent",) if empty else ()
    names: dict[tuple[object, ...], int] = {}
    rows: list[ImportedRow] = []
    for point in sized:
        why = _why_refused(point, found, log)
        if why:
            refused.append(Refused(line=point.line, text=" ".join(point.printed), why=why))
            continue
        more = [
            *([point.operation] if point.operation not in ("", "sum") else []),
            *([f"root {point.root}"] if (point.root or 0) > 0 else []),
            *([run] if run else []),
        ]
        same = (point.size, point.dtype, point.in_place, *more)
        names[same] = names.get(same, 0) + 1
        more += [f"repeat {names[same]}"] if names[same] > 1 else []
        rows += _rows(source, point, found, log, more)
    groups = f" in each of {log.groups} groups" if log.groups > 1 else ""
    notes = [f"{found.title} on {plural(found.ranks, 'rank')}{groups}", *left_out, *log.notes, *found.notes]
    if all(point.wrong == "N/A" for point in sized):
        notes.append("values were not checked")
    return rows, refused, notes


def _why_refused(point: LogPoint, found: Found, log: Log) -> str:
    if why := _why_wrong(point, found, log):
        return why
    if point.time_us < _LEAST_US:
        return f"a time of {point.time_us:g} us is none"
    whole = (point.count or 0) * BYTES.get(point.dtype, 0)
    if whole and point.size not in (whole, whole * found.ranks):
        return f"{point.size} B is not {point.count} elements of {point.dtype}, of one rank or all: the row is broken"
    algbw, busbw = (figure(text) for text in point.printed[1:])
    exact = from_time(point)
    ratio = Interval.exactly(factor(found.collective, found.ranks)) if found.collective else None
    if log.cpu_time:
        exact = algbw
    checked = (("algbw", algbw, exact), ("busbw", busbw, exact * ratio if exact and ratio else None))
    for (what, value, right), text in zip(checked, point.printed[1:], strict=True):
        if right is not None and not meets(value, right):
            return f"{what} {text} differs from size over time, {right} GB/s: the row is not consistent"
    return ""


def _why_wrong(point: LogPoint, found: Found, log: Log) -> str:
    """Return why the values of a row are wrong; empty for right and for unchecked values."""
    try:
        wrong = 0.0 if point.wrong == "N/A" else float(point.wrong)
    except ValueError:
        wrong = math.inf
    if not math.isfinite(wrong):
        return f"{point.wrong!r:.40} is not a number of wrong values: the row is broken"
    if wrong == 0:
        unseen = log.verdict == "FAILED" and (point.wrong == "N/A" or log.deviations)
        return "the last lines say FAILED, and not of which row: run it again" if unseen else ""
    if not log.deviations and wrong == int(wrong):
        return f"{point.wrong} values were wrong: a wrong result is not a measurement"
    limit = _LIMITS.get(point.dtype, 0.0)
    if log.verdict == "OK":  # nccl-tests allows it for each rank that is added
        limit *= max(1, found.ranks - 1)
    if wrong > limit:
        return f"a deviation of {point.wrong}, more than {limit:g} for {point.dtype}: the result is wrong"
    return "the last lines say FAILED, and not of which row: run it again" if log.verdict == "FAILED" else ""


def _rows(source: Source, point: LogPoint, found: Found, log: Log, more: Sequence[str]) -> Iterator[ImportedRow]:
    """Yield the figures of a point; ``more`` distinguishes rows of one size."""
    ratio = factor(found.collective, found.ranks) if found.collective else 0.0
    algbw = gb_per_s(point.size, point.time_us / 1e6)
    number = printed(point.printed[0]).number()
    is_printed = log.cpu_time or (number is not None and number.digits < 3)
    if is_printed:
        algbw = float(point.printed[1])
    dtype = _DTYPES.get(point.dtype, point.dtype)
    place = "in place" if point.in_place else "out of place"
    groups = f" in each of {log.groups} groups" if log.groups > 1 else ""
    name = f"{found.title} {point.size} B {dtype} {plural(found.ranks, 'rank')}{groups} {place}"
    counted = "nccl-tests; as printed" if is_printed else _CONVENTION
    counted += "; one rank sends nothing" if found.ranks == 1 else ""
    time: Meaning = ("cpu_time_us" if log.cpu_time else "latency_us", "us", "lower")
    clock = "nccl-tests" if point.time_unit_us == 1 else "nccl-tests; printed in ms"
    figures: list[tuple[Meaning, float, str, str]] = [(time, point.time_us, point.printed[0], clock)]
    figures.append((("algbw_gb_per_s", "GB/s", "higher"), algbw, point.printed[1], counted))
    if found.ranks > 1:
        busbw = float(point.printed[2]) if log.cpu_time else algbw * ratio
        figures.append((("busbw_gb_per_s", "GB/s", "higher"), busbw, point.printed[2], counted))
    known_settings = {"operation": point.operation, "root": "" if point.root in (None, -1) else str(point.root)}
    for meaning, value, text, convention in figures:
        yield source.row(
            point.line,
            ", ".join([name, *more]),
            meaning,
            value,
            printed=text,
            convention="; ".join([convention, *more, *([groups.strip()] if groups else [])]),
            collective="" if meaning[0] == "cpu_time_us" else found.collective,
            message_bytes=float(point.size),
            dtype=dtype,
            ranks=found.ranks,
            settings={"place": place, **{key: one for key, one in known_settings.items() if one}, **log.settings},
        )


FORMAT = Format(
    name="nccl-tests",
    about="nccl-tests, rccl-tests, mccl: text, or JSON of -J",
    recognises=lambda source: (
        any(BEGIN.search(line) or is_table(line) or is_row(line) for line in source.lines) or _is_json(source)
    ),
    read=_read,
    options=("collective", "ranks", "run"),
)
