"""nccl-tests and what is built of it (rccl-tests, mccl): text of all ages, and the JSON of ``-J``.

algbw is printed with two decimals, so it is taken from size and time, and busbw from it.  A row of text is read from
its right end, because columns were added on the left and a blank operation shifts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perfsuite.base.masking import is_secret_name, masked
from perfsuite.base.units import gb_per_s, plural
from perfsuite.imports.factors import KINDS, collective_named, factor, fitting
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Refused, Source


@dataclass(frozen=True, kw_only=True)
class LogPoint:
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


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a run of nccl-tests printed."""

    points: tuple[LogPoint, ...]
    ranks: int
    named: str
    """The collective, where the log names one; else empty."""
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# The JSON that nccl-tests writes with ``-J``: version 3, and whatever newer one has the same fields.

_KEPT = re.compile(r"^(NCCL|RCCL|MCCL|UCX)_\w+$|^(CUDA|MUSA|HIP)_VISIBLE_DEVICES$")
"""Variables that change what is measured; the others of the whole environment in the file are nobody's business."""

_MOST_RANKS = 1 << 20


def _is_json(source: Source) -> bool:
    """Whether a file is what ``-J`` writes."""
    plain = source.json
    return isinstance(plain, dict) and {"version", "config", "results"} <= set(plain)


def _read_json(source: Source) -> Log:
    """What the file says; ImportFailed with line, reason and remedy."""
    plain: dict[str, Any] = source.json
    config, results = plain["config"], plain["results"]
    try:
        names = ("nthreads", "ngpus")
        of_process = [source.whole(source.line_of(f'"{name}"'), config[name], name, 1) for name in names]
        ranks = max(1, len(config["devices"])) * math.prod(of_process)
        if ranks > _MOST_RANKS:
            reason = f"{ranks} ranks are more than any machine has"
            raise source.fault(source.line_of('"config"'), reason, "give the text instead")
        points = tuple(_json_points(source, results))
        named = {str(result.get("experiment_name", "")) for result in results}
        variables = [text.partition("=") for text in plain.get("env") or () if isinstance(text, str)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"version {plain['version']} lacks what is needed ({error!r:.60})"
        raise source.fault(1, reason, "give the text instead") from None
    if len(named) > 1:
        raise source.fault(1, f"two collectives in one file ({', '.join(sorted(named))})", "give a file for each")
    kept = {name: value for name, _, value in variables if _KEPT.match(name) and not is_secret_name(name)}
    settings = {f"environment {name}": masked(value) for name, value in kept.items()}
    if "nccl_version" in plain:
        settings["nccl_version"] = str(plain["nccl_version"])
    return Log(points=points, ranks=ranks, named=collective_named("".join(named)), settings=settings)


def _json_points(source: Source, results: Sequence[Mapping[str, Any]]) -> Iterator[LogPoint]:
    for index, result in enumerate(results):
        line = source.line_of('"size"', index)
        for side in ("out_of_place", "in_place"):
            values = result.get(side)
            if values is None:
                continue
            time = values["time"] if "time" in values else values["cpu_time"]
            figures = (("time", time), ("alg_bw", values["alg_bw"]), ("bus_bw", values["bus_bw"]))
            numbers = [source.number(line, value, what) for what, value in figures]
            yield LogPoint(
                line=line,
                size=source.whole(line, result["size"], "size"),
                dtype=str(result["type"]),
                reduces=str(result.get("redop", "none")).strip() not in ("", "none"),
                root=int(result["root"]) if str(result.get("root", "")).strip() else None,
                in_place=side == "in_place",
                time_us=numbers[0],
                printed=(str(time), str(values["alg_bw"]), str(values["bus_bw"])),
                wrong=str(values.get("nwrong", "N/A")),
            )


# ---- text, of all ages ----

_BEGIN = re.compile(r"# nThread\s+(\d+)\s+nGpus\s+(\d+)\s+minBytes")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s")
_NAMED = re.compile(r"# Collective test starting:\s*(\S+)")
_PREFIX = re.compile(r"^\[\d+,\d+\]<std\w+>:\s?")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_STAMP = re.compile(r"^\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*\s")
"""What ``-S`` puts before a row."""


def _read_text(source: Source) -> Log:
    """What a log says; ImportFailed with line, reason and remedy."""
    lines = [_PREFIX.sub("", line) for line in source.lines]
    begins = [number for number, line in enumerate(lines, start=1) if _BEGIN.search(line)]
    if not begins and source.text.lstrip().startswith("{"):
        reason = "no JSON of -J (version, config, results): it is cut, or of another tool"
        raise source.fault(1, reason, "give all of it")
    if not begins:
        raise source.fault(1, "no line '# nThread ... nGpus ...', so this is no log of nccl-tests", "name its format")
    if len(begins) > 1:
        raise source.fault(begins[1], f"another run begins here, the first in line {begins[0]}", "give a file for each")
    named = [(number, match[1]) for number, line in enumerate(lines, start=1) if (match := _NAMED.search(line))]
    if len({name for _, name in named}) > 1:
        raise source.fault(named[1][0], f"a second collective, {named[1][1]}", "give a file for each")
    ranks = sum(bool(_RANK.match(line)) for line in lines)
    if not ranks:
        reason = "no line '#  Rank', so it is unknown how many ranks there were"
        raise source.fault(begins[0], reason, "keep the header")
    sides = _sides(source, lines)
    points = tuple(_text_points(source, lines, sides))
    cut = () if any("Out of bounds values" in line for line in lines) else ("the log ends before its last lines",)
    name = collective_named(named[0][1]) if named else ""
    return Log(points=points, ranks=ranks, named=name, notes=cut)


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


def _text_points(source: Source, lines: Sequence[str], side: int) -> Iterator[LogPoint]:
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
        size = source.whole(number, left[0], "size")
        has_root = len(left) > 3 and re.fullmatch(r"-?\d+", left[-1]) is not None
        operation = left[3] if len(left) > 3 + has_root else ""
        for in_place in (False, True):
            start = len(words) - side * (1 if in_place else 2)
            time, algbw, busbw = words[start : start + 3]
            if time == "N/A":
                continue
            for what, text in (("time", time), ("algbw", algbw), ("busbw", busbw)):
                source.number(number, text, what)
            yield LogPoint(
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


# ---- figures ----

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"float": "fp32", "double": "fp64", "half": "fp16", "bfloat16": "bf16", "int8": "int8", "int32": "int32"}
)
_CONVENTION = "nccl-tests; from size and time"
_LAST_DIGIT = 0.0051
"""Bandwidths are printed to 0.01 GB/s; and"""
_TIME_DIGITS = 1e-3
"""times to four digits."""
_LEAST_US = 1e-3
"""No clock tells less than a nanosecond."""


def _read(source: Source) -> Imported:
    log = _read_json(source) if _is_json(source) else _read_text(source)
    sized = [point for point in log.points if point.size > 0]
    if not sized:
        raise source.fault(1, "no row with a size above 0", "run a larger message")
    collective = _collective(source, sized, log.ranks, log.named)
    empty = len(log.points) - len(sized)
    left_out = (f"{plural(empty, 'figure')} of size 0 left out: nothing was sent",) if empty else ()
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    for point in sized:
        why = _why_refused(point, collective, log.ranks)
        if why:
            refused.append(Refused(line=point.line, text=" ".join(point.printed), why=why))
        else:
            rows += _rows(source, point, collective, log)
    notes = (f"{collective} on {plural(log.ranks, 'rank')}", *left_out, *log.notes)
    return source.imported(rows, refused=refused, notes=notes)


def _collective(source: Source, points: Sequence[LogPoint], ranks: int, named: str) -> str:
    """As the log names it, else as told, else the only one that fits the ratio of busbw to algbw."""
    told = source.told.collective
    asked = collective_named(told)
    if told and not asked:
        raise source.fault(1, f"--collective {told!r} is none of {', '.join(KINDS)}", "choose one of these")
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


def _why_refused(point: LogPoint, collective: str, ranks: int) -> str:
    if point.wrong not in ("N/A", "0", "0.0") and not re.fullmatch(r"0e\+0+", point.wrong):
        return f"{point.wrong} values were wrong: what did not compute the right thing is no measurement"
    if point.time_us < _LEAST_US:
        return f"a time of {point.time_us:g} us is none"
    algbw = gb_per_s(point.size, point.time_us / 1e6)
    for what, text, value in (
        ("algbw", point.printed[1], algbw),
        ("busbw", point.printed[2], algbw * factor(collective, ranks)),
    ):
        if abs(float(text) - value) > 2 * _LAST_DIGIT + _TIME_DIGITS * value:
            return f"{what} {text} is not what size and time give, {value:.4g} GB/s: the row is not consistent"
    return ""


def _rows(source: Source, point: LogPoint, collective: str, log: Log) -> Iterator[ImportedRow]:
    algbw = gb_per_s(point.size, point.time_us / 1e6)
    dtype = _DTYPES.get(point.dtype, point.dtype)
    place = "in place" if point.in_place else "out of place"
    figures: tuple[tuple[Meaning, float, str], ...] = (
        (("latency_us", "us", "lower"), point.time_us, "nccl-tests"),
        (("algbw_gb_per_s", "GB/s", "higher"), algbw, _CONVENTION),
        (("busbw_gb_per_s", "GB/s", "higher"), algbw * factor(collective, log.ranks), _CONVENTION),
    )
    for (meaning, value, convention), printed in zip(figures, point.printed, strict=True):
        yield source.row(
            point.line,
            f"{collective} {point.size} B {dtype} {log.ranks} ranks {place}",
            meaning,
            value,
            printed=printed,
            convention=convention,
            collective=collective,
            message_bytes=float(point.size),
            dtype=dtype,
            ranks=log.ranks,
            settings={"place": place, **log.settings},
        )


FORMAT = Format(
    name="nccl-tests",
    about="nccl-tests, rccl-tests, mccl: text, or JSON of -J",
    recognises=lambda source: any(_BEGIN.search(line) for line in source.lines) or _is_json(source),
    read=_read,
)
