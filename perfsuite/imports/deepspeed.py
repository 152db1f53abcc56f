"""DeepSpeed: the summaries of its FLOPs profiler and its communication logger.

The logger's rates are Gbit/s and its sizes MiB printed as MB; its throughput of all_reduce counts 2 S, so only busbw is
taken.  The profiler's backward FLOPs are an assumed 2 x forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from perfsuite.imports.factors import collective_named
from perfsuite.imports.row import Format, Imported, ImportedRow, Refused, Source, Told
from perfsuite.records import Better
from perfsuite.units import GIB, KIB, MIB

_PROFILER = "DeepSpeed Flops Profiler"
_LOGGER = re.compile(r"^\s*Comm\. Op\s+Message Size\s+Count")
_SIZE = re.compile(
    r"^\s+(?P<size>[\d.]+) (?P<unit>B|KB|MB|GB)\s+(?P<count>\d+)\s+(?P<total>\S+)\s+(?P<average>\S+)"
    r"\s+(?P<tput>\S+)\s+(?P<busbw>\S+)\s*$"
)
_BYTES: Mapping[str, int] = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB}
_MS: Mapping[str, float] = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_TERA: Mapping[str, float] = {"GFLOPS": 1e-3, "TFLOPS": 1.0, "PFLOPS": 1e3}
_TIMES: tuple[tuple[str, str], ...] = (
    ("fwd latency", "forward_ms"),
    ("bwd latency", "backward_ms"),
    ("step latency", "optimizer_ms"),
    ("iter latency", "step_time_ms"),
)
_RATES: tuple[tuple[str, str, str], ...] = (
    ("fwd FLOPS per GPU", "forward_tflops_per_device", "deepspeed: counted FLOPs of the forward"),
    ("fwd+bwd FLOPS per GPU", "tflops_per_device", "deepspeed: backward is an assumed 2 x forward"),
)


def _read(source: Source, told: Told) -> Imported:
    rows = list(_profiled(source, told))
    refused: list[Refused] = []
    operation = ""
    in_table = False
    for number, line in enumerate(source.lines, start=1):
        if _LOGGER.match(line):
            if "Gbps" not in line:
                raise source.fault(number, "the unit of the rates (Gbps) is missing", "give the logger's own summary")
            in_table = True
        elif in_table and re.fullmatch(r"\w+", line.strip()) and not line[0].isspace():
            operation = line.strip()
        elif in_table and line[:1].isspace() and line.strip():
            match = _SIZE.match(line)
            if match is None:
                raise source.fault(number, "the row is cut or has no unit", "remove it, or copy the log again")
            found = list(_logged(source, told, number, operation, match))
            rows += found
            if not found:
                refused.append(
                    Refused(line=number, text=line.strip(), why=f"{operation or 'nothing'} is no collective")
                )
    if not rows:
        raise source.fault(1, "neither a summary of the FLOPs profiler nor of the communication logger", "give one")
    note = "every call was synchronised while it was logged" if in_table else ""
    return Imported(
        source=str(source.path),
        tool="deepspeed",
        rows=tuple(rows),
        refused=tuple(refused),
        notes=tuple(filter(None, [note])),
    )


def _profiled(source: Source, told: Told) -> Iterator[ImportedRow]:
    if _PROFILER not in source.text:
        return
    ranks = re.search(r"^world size:\s+(\d+)", source.text, re.MULTILINE)
    batch = re.search(r"^batch size per GPU:\s+(\d+)", source.text, re.MULTILINE)

    def row(
        line: int, name: str, value: float, *, unit: str, better: Better, printed: str, convention: str
    ) -> ImportedRow:
        return ImportedRow(
            name="profiled step",
            metric=name,
            value=value,
            unit=unit,
            better=better,
            printed=printed,
            source=str(source.path),
            line=line,
            tool="deepspeed",
            convention=convention,
            ranks=int(ranks[1]) if ranks else None,
            platform=told.platform,
            settings={"local_batch_size": batch[1]} if batch else {},
        )

    for number, line in enumerate(source.lines, start=1):
        name, _, text = line.rpartition(":")
        figure, _, unit = text.strip().partition(" ")
        for title, metric in _TIMES:
            if name == title:
                scale = _scale(source, number, unit, _MS)
                value = source.number(number, figure, title) * scale
                yield row(
                    number,
                    metric,
                    value,
                    unit="ms",
                    better="lower",
                    printed=text.strip(),
                    convention="deepspeed: synchronised parts",
                )
        for title, metric, convention in _RATES:
            if name.startswith(f"{title} ="):
                scale = _scale(source, number, unit, _TERA)
                value = source.number(number, figure, title) * scale
                yield row(
                    number,
                    metric,
                    value,
                    unit="TFLOPS",
                    better="higher",
                    printed=text.strip(),
                    convention=convention,
                )
        if name == "samples/second":
            value = source.number(number, figure, name)
            yield row(
                number,
                "samples_per_s",
                value,
                unit="samples/s",
                better="higher",
                printed=text.strip(),
                convention="deepspeed: of all devices",
            )


def _scale(source: Source, number: int, unit: str, known: Mapping[str, float]) -> float:
    if unit not in known:
        raise source.fault(number, f"the unit is {unit!r}, not {', '.join(known)}", "repair or remove the line")
    return known[unit]


def _logged(source: Source, told: Told, number: int, operation: str, match: re.Match[str]) -> Iterator[ImportedRow]:
    collective = collective_named(operation)
    if not collective:
        return
    size = source.number(number, match["size"], "size") * _BYTES[match["unit"]]
    figures: tuple[tuple[str, str, float, str, Better, str], ...] = (
        ("latency_us", match["average"], 1e3, "us", "lower", "deepspeed: mean of all calls, in ms"),
        ("busbw_gb_per_s", match["busbw"], 1 / 8, "GB/s", "higher", "nccl-tests busbw; printed in Gbit/s"),
    )
    for metric, text, scale, unit, better, convention in figures:
        yield ImportedRow(
            name=f"{operation} {match['size']} {match['unit']}",
            metric=metric,
            value=source.number(number, text, metric) * scale,
            unit=unit,
            better=better,
            printed=text,
            source=str(source.path),
            line=number,
            tool="deepspeed",
            convention=convention,
            collective=collective,
            message_bytes=size,
            platform=told.platform,
            settings={"count": match["count"], "printed size": f"{match['size']} {match['unit']}, a power of two"},
        )


FORMAT = Format(
    name="deepspeed",
    about="DeepSpeed's FLOPs profiler and communication logger",
    recognises=lambda source: _PROFILER in source.text or any(_LOGGER.match(line) for line in source.lines),
    read=_read,
)
