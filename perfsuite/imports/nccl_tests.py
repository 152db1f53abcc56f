"""nccl-tests and what is built of it (rccl-tests, mccl): text of all ages, and the JSON of ``-J``.

algbw is printed with two decimals, so it is taken from size and time, and busbw from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from perfsuite.imports.factors import KINDS, collective_named, factor, fitting
from perfsuite.imports.nccl_json import is_json, read_json
from perfsuite.imports.nccl_text import Log, LogPoint, is_text, read_text
from perfsuite.imports.row import Format, Imported, ImportedRow, Refused, Source, Told
from perfsuite.units import gb_per_s, plural

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
