"""DeepSpeed: the summaries of its FLOPs profiler and its communication logger.

The logger's rates are Gbit/s and its sizes MiB printed as MB; its throughput of all_reduce counts 2 S, so only busbw is
taken.  The profiler's backward FLOPs are an assumed 2 x forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from perfsuite.base.units import GIB, KIB, MIB
from perfsuite.imports.factors import collective_named
from perfsuite.imports.row import Format, Imported, ImportedRow, Refused, Source, Told
from perfsuite.record.own_metrics import Better

_PROFILER = "DeepSpeed Flops Profiler"
_LOGGER = re.compile(r"^\s*Comm\. Op\s+Message Size\s+Count")
_SIZE = re.compile(
    r"^\s+(?P<size>[\d.]+) (?P<unit>B|KB|MB|GB)\s+(?P<count>\d+)\s+(?P<total>\S+)\s+(?P<average>\S+)"
    r"\s+(?P<tput>\S+)\s+(?P<busbw>\S+)\s*$"
)
_BYTES: Mapping[str, int] = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB}
_MS: Mapping[str, float] = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_TERA: Mapping[str, float] = {"GFLOPS": 1e-3, "TFLOPS": 1.0, "PFLOPS": 1e3}
_BARE: Mapping[str, float] = {"": 1.0}
_UNITS: Mapping[str, tuple[str, Mapping[str, float], Better]] = {
    "forward_ms": ("ms", _MS, "lower"),
    "backward_ms": ("ms", _MS, "lower"),
    "optimizer_ms": ("ms", _MS, "lower"),
    "step_time_ms": ("ms", _MS, "lower"),
    "forward_tflops_per_device": ("TFLOPS", _TERA, "higher"),
    "tflops_per_device": ("TFLOPS", _TERA, "higher"),
    "samples_per_s": ("samples/s", _BARE, "higher"),
}
"""Unit of a metric, what a figure is multiplied by to be in it, by the unit that it is printed with, and direction."""
_PARTS = "deepspeed: synchronised parts"
_FIGURES: tuple[tuple[str, str, str], ...] = (
    ("fwd latency", "forward_ms", _PARTS),
    ("bwd latency", "backward_ms", _PARTS),
    ("step latency", "optimizer_ms", _PARTS),
    ("iter latency", "step_time_ms", _PARTS),
    ("fwd FLOPS per GPU", "forward_tflops_per_device", "deepspeed: counted FLOPs of the forward"),
    ("fwd+bwd FLOPS per GPU", "tflops_per_device", "deepspeed: backward is an assumed 2 x forward"),
    ("samples/second", "samples_per_s", "deepspeed: of all devices"),
)
"""What a line of the profiler begins with, up to its colon or its formula; metric; convention."""


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
            logged = list(_logged(source, told, number, operation, match))
            rows += logged
            if not logged:
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
    counts = dict(_counts(source))
    batch = counts.get("batch size per GPU")
    for number, line in enumerate(source.lines, start=1):
        name, _, text = line.rpartition(":")
        printed, _, unit = text.strip().partition(" ")
        for title, metric, convention in _FIGURES:
            if name.partition(" = ")[0] != title:
                continue
            told_unit, scales, better = _UNITS[metric]
            if unit not in scales:
                reason = f"the unit is {unit!r}, not {', '.join(scales)}"
                raise source.fault(number, reason, "repair or remove the line")
            yield ImportedRow(
                name="profiled step",
                metric=metric,
                value=source.number(number, printed, title) * scales[unit],
                unit=told_unit,
                better=better,
                printed=text.strip(),
                source=str(source.path),
                line=number,
                tool="deepspeed",
                convention=convention,
                ranks=counts.get("world size"),
                platform=told.platform,
                settings={} if batch is None else {"local_batch_size": str(batch)},
            )


def _counts(source: Source) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(source.lines, start=1):
        if match := re.match(r"(world size|batch size per GPU):\s+(\d+)", line):
            yield match[1], source.whole(number, match[2], match[1], 1)


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
