"""nccl-tests and what is built of it (rccl-tests, mccl): text of all ages, and the JSON of ``-J``.

A row of text is read from its right end, because columns were added on the left and a blank operation shifts them.
algbw is printed with two decimals, so it is taken from size and time, and busbw from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perfsuite.imports.factors import KINDS, collective_named, factor, fitting
from perfsuite.imports.row import Format, Imported, ImportedRow, Refused, Source, Told
from perfsuite.platforms.environment import secret_free
from perfsuite.units import gb_per_s, plural

_BEGIN = re.compile(r"# nThread\s+(\d+)\s+nGpus\s+(\d+)\s+minBytes")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s")
_NAMED = re.compile(r"# Collective test starting:\s*(\S+)")
_PREFIX = re.compile(r"^\[\d+,\d+\]<std\w+>:\s?")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_STAMP = re.compile(r"^\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*\s")
"""What ``-S`` puts before a row."""
_DTYPES: Mapping[str, str] = MappingProxyType(
    {"float": "fp32", "double": "fp64", "half": "fp16", "bfloat16": "bf16", "int8": "int8", "int32": "int32"}
)
_KEPT = re.compile(r"^(NCCL|RCCL|MCCL|UCX)_\w+$|^(CUDA|MUSA|HIP)_VISIBLE_DEVICES$")
_CONVENTION = "nccl-tests; from size and time"
_LAST_DIGIT = 0.0051
"""Bandwidths are printed to 0.01 GB/s; and"""
_TIME_DIGITS = 1e-3
"""times to four digits."""


@dataclass(frozen=True, kw_only=True)
class _Point:
    """One size, one side."""

    line: int
    size: int
    dtype: str
    reduces: bool
    root: int | None
    in_place: bool
    time_us: float
    printed: tuple[str, str, str]
    """time, algbw, busbw."""
    wrong: str


def _is_text(source: Source) -> bool:
    return any(_BEGIN.search(line) for line in source.lines)


def _is_json(source: Source) -> bool:
    plain = source.json
    return isinstance(plain, dict) and {"version", "config", "results"} <= set(plain)


def _read(source: Source, told: Told) -> Imported:
    return _read_json(source, told) if _is_json(source) else _read_text(source, told)


# -- text --------------------------------------------------------------------------------------------------------


def _read_text(source: Source, told: Told) -> Imported:
    lines = [_PREFIX.sub("", line) for line in source.lines]
    begins = [number for number, line in enumerate(lines, start=1) if _BEGIN.search(line)]
    if not begins and source.text.lstrip().startswith("{"):
        raise source.fault(
            1, "no JSON of -J (version, config, results): it is cut, or of another tool", "give all of it"
        )
    if not begins:
        raise source.fault(1, "no line '# nThread ... nGpus ...', so this is no log of nccl-tests", "name its format")
    if len(begins) > 1:
        raise source.fault(begins[1], f"another run begins here, the first in line {begins[0]}", "give a file for each")
    named = [(number, match[1]) for number, line in enumerate(lines, start=1) if (match := _NAMED.search(line))]
    if len({name for _, name in named}) > 1:
        raise source.fault(named[1][0], f"a second collective, {named[1][1]}", "give a file for each")
    ranks = sum(bool(_RANK.match(line)) for line in lines)
    if not ranks:
        raise source.fault(
            begins[0], "no line '#  Rank', so it is unknown how many ranks there were", "keep the header"
        )
    sides = _sides(source, lines)
    points = list(_points(source, lines, sides))
    cut = () if any("Out of bounds values" in line for line in lines) else ("the log ends before its last lines",)
    name = collective_named(named[0][1]) if named else ""
    return _imported(source, told, points, ranks=ranks, named=name, settings={}, notes=cut)


def _sides(source: Source, lines: Sequence[str]) -> int:
    """Columns of each side: 4, or 8 with the extremes of single iterations (``-I 1``)."""
    for number, line in enumerate(lines, start=1):
        words = line.lstrip("# ").split()
        if words[:3] == ["size", "count", "type"]:
            if "(us)" not in " ".join(lines[number : number + 1]):
                raise source.fault(number, "the units below the columns' names are missing", "keep the whole header")
            times = [index for index, word in enumerate(words) if word == "time"]
            return times[1] - times[0] if len(times) == 2 else 4
    raise source.fault(1, "no line with the names of the columns (size count type)", "keep the whole header")


def _points(source: Source, lines: Sequence[str], side: int) -> Iterator[_Point]:
    columns = 0
    for number, line in enumerate(lines, start=1):
        row = _STAMP.sub("", line)
        if not _ROW.match(row):
            continue
        words = row.split()
        columns = columns or len(words)
        left = words[: len(words) - 2 * side]
        if len(words) != columns or not 3 <= len(left) <= 5:
            reason = f"the row has {len(words)} columns, others {columns}: it was cut"
            raise source.fault(number, reason, "remove it, or run again")
        size = int(left[0])
        has_root = len(left) > 3 and re.fullmatch(r"-?\d+", left[-1]) is not None
        operation = left[3] if len(left) > 3 + has_root else ""
        for in_place in (False, True):
            start = len(words) - side * (1 if in_place else 2)
            time, algbw, busbw = words[start : start + 3]
            if time == "N/A":
                continue
            for what, text in (("time", time), ("algbw", algbw), ("busbw", busbw)):
                source.number(number, text, what)
            yield _Point(
                line=number,
                size=size,
                dtype=left[2],
                reduces=operation not in ("", "none"),
                root=int(left[-1]) if has_root else None,
                in_place=in_place,
                time_us=source.number(number, time, "time"),
                printed=(time, algbw, busbw),
                wrong=words[start + 3],
            )


# -- JSON --------------------------------------------------------------------------------------------------------


def _read_json(source: Source, told: Told) -> Imported:
    plain: dict[str, Any] = source.json
    config, results = plain["config"], plain["results"]
    try:
        ranks = max(1, len(config["devices"])) * int(config["nthreads"]) * int(config["ngpus"])
        points = list(_json_points(source, results))
    except (KeyError, TypeError, ValueError) as error:
        raise source.fault(
            1, f"version {plain['version']} lacks what is needed ({error!r:.60})", "give the text instead"
        ) from None
    names = {str(result.get("experiment_name", "")) for result in results}
    if len(names) > 1:
        raise source.fault(1, f"two collectives in one file ({', '.join(sorted(names))})", "give a file for each")
    variables = (text.partition("=") for text in plain.get("env", ()) if isinstance(text, str))
    kept = {name: value for name, _, value in variables if _KEPT.match(name) and secret_free(name)}
    settings = {f"environment {name}": value for name, value in kept.items()}
    if "nccl_version" in plain:
        settings["nccl_version"] = str(plain["nccl_version"])
    return _imported(
        source, told, points, ranks=ranks, named=collective_named("".join(names)), settings=settings, notes=()
    )


def _json_points(source: Source, results: Sequence[Mapping[str, Any]]) -> Iterator[_Point]:
    for index, result in enumerate(results):
        line = source.line_of('"size"', index)
        for side in ("out_of_place", "in_place"):
            values = result.get(side)
            if values is None:
                continue
            time = values["time"] if "time" in values else values["cpu_time"]
            yield _Point(
                line=line,
                size=int(result["size"]),
                dtype=str(result["type"]),
                reduces=str(result.get("redop", "none")).strip() not in ("", "none"),
                root=int(result["root"]) if str(result.get("root", "")).strip() else None,
                in_place=side == "in_place",
                time_us=source.number(line, time, "time"),
                printed=(str(time), str(values["alg_bw"]), str(values["bus_bw"])),
                wrong=str(values.get("nwrong", "N/A")),
            )


# -- both --------------------------------------------------------------------------------------------------------


def _imported(
    source: Source,
    told: Told,
    points: Sequence[_Point],
    *,
    ranks: int,
    named: str,
    settings: Mapping[str, str],
    notes: tuple[str, ...],
) -> Imported:
    sized = [point for point in points if point.size > 0]
    if not sized:
        raise source.fault(1, "no row with a size above 0", "run a larger message")
    collective = _collective(source, told, sized, ranks, named)
    empty = len(points) - len(sized)
    left_out = (f"{plural(empty, 'figure')} of size 0 left out: nothing was sent",) if empty else ()
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    for point in sized:
        why = _why_refused(point, collective, ranks)
        if why:
            refused.append(Refused(line=point.line, text=" ".join(point.printed), why=why))
        else:
            rows += _rows(source, told, point, collective=collective, ranks=ranks, settings=settings)
    return Imported(
        source=str(source.path),
        tool="nccl-tests",
        rows=tuple(rows),
        refused=tuple(refused),
        notes=(f"{collective} on {plural(ranks, 'rank')}", *left_out, *notes),
    )


def _collective(source: Source, told: Told, points: Sequence[_Point], ranks: int, named: str) -> str:
    """As the log names it, else as told, else the only one that fits the ratio of busbw to algbw."""
    asked = collective_named(told.collective)
    if told.collective and not asked:
        raise source.fault(1, f"--collective {told.collective!r} is none of {', '.join(KINDS)}", "choose one of these")
    if named and asked and named != asked:
        raise source.fault(1, f"the log is of {named}, --collective says {asked}", "leave the option out")
    largest = max(points, key=lambda point: point.size)
    algbw, busbw = (float(text) for text in largest.printed[1:])
    fits = fitting(busbw / algbw, ranks, reduces=largest.reduces, root=largest.root) if algbw > 0 else tuple(KINDS)
    if named:
        return named
    if asked and algbw > 0 and abs(factor(asked, ranks) - busbw / algbw) > 0.01:
        raise source.fault(
            largest.line,
            f"busbw / algbw is {busbw / algbw:.3f}, that of {asked} on {ranks} ranks {factor(asked, ranks):.3f}",
            f"it may be {' or '.join(fits) or 'none that is known'}",
        )
    if asked or len(fits) == 1:
        return asked or fits[0]
    raise source.fault(
        largest.line,
        f"the log does not name its collective, and busbw / algbw fits {' and '.join(fits) or 'none'}",
        "say which: --collective NAME",
    )


def _why_refused(point: _Point, collective: str, ranks: int) -> str:
    if point.wrong not in ("N/A", "0", "0.0") and not re.fullmatch(r"0e\+0+", point.wrong):
        return f"{point.wrong} values were wrong: what did not compute the right thing is no measurement"
    if point.time_us <= 0:
        return "a time that is not positive is none"
    algbw = gb_per_s(point.size, point.time_us / 1e6)
    for what, text, value in (
        ("algbw", point.printed[1], algbw),
        ("busbw", point.printed[2], algbw * factor(collective, ranks)),
    ):
        if abs(float(text) - value) > 2 * _LAST_DIGIT + _TIME_DIGITS * value:
            return f"{what} {text} is not what size and time give, {value:.4g} GB/s: the row is not consistent"
    return ""


def _rows(
    source: Source, told: Told, point: _Point, *, collective: str, ranks: int, settings: Mapping[str, str]
) -> Iterator[ImportedRow]:
    algbw = gb_per_s(point.size, point.time_us / 1e6)
    dtype = _DTYPES.get(point.dtype, point.dtype)
    place = "in place" if point.in_place else "out of place"
    for metric, value, unit, better, printed in (
        ("latency_us", point.time_us, "us", "lower", point.printed[0]),
        ("algbw_gb_per_s", algbw, "GB/s", "higher", point.printed[1]),
        ("busbw_gb_per_s", algbw * factor(collective, ranks), "GB/s", "higher", point.printed[2]),
    ):
        yield ImportedRow(
            name=f"{collective} {point.size} B {dtype} {ranks} ranks {place}",
            metric=metric,
            value=value,
            unit=unit,
            better="lower" if better == "lower" else "higher",
            printed=printed,
            source=str(source.path),
            line=point.line,
            tool="nccl-tests",
            convention="nccl-tests" if metric == "latency_us" else _CONVENTION,
            collective=collective,
            message_bytes=float(point.size),
            dtype=dtype,
            ranks=ranks,
            platform=told.platform,
            settings={"place": place, **settings},
        )


FORMAT = Format(
    name="nccl-tests",
    about="nccl-tests, rccl-tests, mccl: text, or JSON of -J",
    recognises=lambda source: _is_text(source) or _is_json(source),
    read=_read,
)
