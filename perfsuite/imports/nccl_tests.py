"""nccl-tests and what is built of it (rccl-tests, mccl): text of all ages, and the JSON of ``-J``.

algbw is printed with two decimals, so it is taken from size and time, and busbw from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from perfsuite.base.masking import is_secret_name, masked
from perfsuite.base.units import gb_per_s, plural
from perfsuite.imports.factors import KINDS, collective_named, factor, fitting
from perfsuite.imports.nccl_text import Log, LogPoint, is_text, read_text
from perfsuite.imports.row import Format, Imported, ImportedRow, Refused, Source, Told

# The JSON that nccl-tests writes with ``-J``: version 3, and whatever newer one has the same fields.

_KEPT = re.compile(r"^(NCCL|RCCL|MCCL|UCX)_\w+$|^(CUDA|MUSA|HIP)_VISIBLE_DEVICES$")
"""Variables that change what is measured; the others of the whole environment in the file are nobody's business."""

_MOST_RANKS = 1 << 20


def is_json(source: Source) -> bool:
    """Whether a file is what ``-J`` writes."""
    plain = source.json
    return isinstance(plain, dict) and {"version", "config", "results"} <= set(plain)


def read_json(source: Source) -> Log:
    """What the file says; ImportFailed with line, reason and remedy."""
    plain: dict[str, Any] = source.json
    config, results = plain["config"], plain["results"]
    try:
        of_process = [
            source.whole(source.line_of(f'"{name}"'), config[name], name, 1) for name in ("nthreads", "ngpus")
        ]
        ranks = max(1, len(config["devices"])) * math.prod(of_process)
        if ranks > _MOST_RANKS:
            raise source.fault(
                source.line_of('"config"'), f"{ranks} ranks are more than any machine has", "give the text instead"
            )
        points = tuple(_points(source, results))
        names = {str(result.get("experiment_name", "")) for result in results}
        variables = [text.partition("=") for text in plain.get("env") or () if isinstance(text, str)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise source.fault(
            1, f"version {plain['version']} lacks what is needed ({error!r:.60})", "give the text instead"
        ) from None
    if len(names) > 1:
        raise source.fault(1, f"two collectives in one file ({', '.join(sorted(names))})", "give a file for each")
    kept = {name: value for name, _, value in variables if _KEPT.match(name) and not is_secret_name(name)}
    settings = {f"environment {name}": masked(value) for name, value in kept.items()}
    if "nccl_version" in plain:
        settings["nccl_version"] = str(plain["nccl_version"])
    return Log(points=points, ranks=ranks, named=collective_named("".join(names)), settings=settings)


def _points(source: Source, results: Sequence[Mapping[str, Any]]) -> Iterator[LogPoint]:
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


def _read(source: Source, told: Told) -> Imported:
    log = read_json(source) if is_json(source) else read_text(source)
    sized = [point for point in log.points if point.size > 0]
    if not sized:
        raise source.fault(1, "no row with a size above 0", "run a larger message")
    collective = _collective(source, told, sized, log.ranks, log.named)
    empty = len(log.points) - len(sized)
    left_out = (f"{plural(empty, 'figure')} of size 0 left out: nothing was sent",) if empty else ()
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    for point in sized:
        why = _why_refused(point, collective, log.ranks)
        if why:
            refused.append(Refused(line=point.line, text=" ".join(point.printed), why=why))
        else:
            rows += _rows(source, told, point, collective=collective, log=log)
    return Imported(
        source=str(source.path),
        tool="nccl-tests",
        rows=tuple(rows),
        refused=tuple(refused),
        notes=(f"{collective} on {plural(log.ranks, 'rank')}", *left_out, *log.notes),
    )


def _collective(source: Source, told: Told, points: Sequence[LogPoint], ranks: int, named: str) -> str:
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


def _rows(source: Source, told: Told, point: LogPoint, *, collective: str, log: Log) -> Iterator[ImportedRow]:
    algbw = gb_per_s(point.size, point.time_us / 1e6)
    dtype = _DTYPES.get(point.dtype, point.dtype)
    place = "in place" if point.in_place else "out of place"
    for metric, value, unit, better, printed in (
        ("latency_us", point.time_us, "us", "lower", point.printed[0]),
        ("algbw_gb_per_s", algbw, "GB/s", "higher", point.printed[1]),
        ("busbw_gb_per_s", algbw * factor(collective, log.ranks), "GB/s", "higher", point.printed[2]),
    ):
        yield ImportedRow(
            name=f"{collective} {point.size} B {dtype} {log.ranks} ranks {place}",
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
            ranks=log.ranks,
            platform=told.platform,
            settings={"place": place, **log.settings},
        )


FORMAT = Format(
    name="nccl-tests",
    about="nccl-tests, rccl-tests, mccl: text, or JSON of -J",
    recognises=lambda source: is_text(source) or is_json(source),
    read=_read,
)
