"""DeepSpeed: the summaries of its FLOPs profiler and its communication logger.

The logger's rates are Gbit/s and its sizes MiB printed as MB; its throughput of all_reduce counts 2 S, so only busbw is
taken.  The profiler's backward FLOPs are an assumed 2 x forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from perfsuite.base.units import GIB, KIB, MIB
from perfsuite.imports.factors import collective_named
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Refused, Source

_PROFILER = "DeepSpeed Flops Profiler"
_LOGGER = re.compile(r"^\s*Comm\. Op\s+Message Size\s+Count")
_SIZE = re.compile(
    r"^\s+(?P<size>[\d.]+) (?P<unit>B|KB|MB|GB)\s+(?P<count>\d+)\s+(?P<total>\S+)\s+(?P<average>\S+)"
    r"\s+(?P<tput>\S+)\s+(?P<busbw>\S+)\s*$"
)
_BYTES: Mapping[str, int] = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB}
_MS: Mapping[str, float] = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_TERA: Mapping[str, float] = {"GFLOPS": 1e-3, "TFLOPS": 1.0, "PFLOPS": 1e3}
_PARTS = "deepspeed: synchronised parts"
_FIGURES: tuple[tuple[str, Meaning, Mapping[str, float], str], ...] = (
    ("fwd latency", ("forward_ms", "ms", "lower"), _MS, _PARTS),
    ("bwd latency", ("backward_ms", "ms", "lower"), _MS, _PARTS),
    ("step latency", ("optimizer_ms", "ms", "lower"), _MS, _PARTS),
    ("iter latency", ("step_time_ms", "ms", "lower"), _MS, _PARTS),
    ("fwd FLOPS per GPU", ("forward_tflops_per_device", "TFLOPS", "higher"), _TERA,
     "deepspeed: counted FLOPs of the forward"),
    ("fwd+bwd FLOPS per GPU", ("tflops_per_device", "TFLOPS", "higher"), _TERA,
     "deepspeed: backward is an assumed 2 x forward"),
    ("samples/second", ("samples_per_s", "samples/s", "higher"), {"": 1.0}, "deepspeed: of all devices"),
)  # fmt: skip
"""Begin of a profiler's line, up to its colon or its formula; meaning; factors by printed unit; convention."""


def _read(source: Source) -> Imported:
    rows = list(_profiled(source))
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
            if collective_named(operation):
                rows += _logged(source, number, operation, match)
            else:
                why = f"{operation or 'nothing'} is no collective"
                refused.append(Refused(line=number, text=line.strip(), why=why))
    if not rows:
        raise source.fault(1, "neither a summary of the FLOPs profiler nor of the communication logger", "give one")
    notes = ["every call was synchronised while it was logged"] if in_table else []
    return source.imported(rows, refused=refused, notes=notes)


def _profiled(source: Source) -> Iterator[ImportedRow]:
    if _PROFILER not in source.text:
        return
    counts = {
        match[1]: source.whole(number, match[2], match[1], 1)
        for number, line in enumerate(source.lines, start=1)
        if (match := re.match(r"(world size|batch size per GPU):\s+(\d+)", line))
    }
    batch = counts.get("batch size per GPU")
    for number, line in enumerate(source.lines, start=1):
        name, _, text = line.rpartition(":")
        printed, _, unit = text.strip().partition(" ")
        for title, meaning, scales, convention in _FIGURES:
            if name.partition(" = ")[0] != title:
                continue
            if unit not in scales:
                reason = f"the unit is {unit!r}, not {', '.join(scales)}"
                raise source.fault(number, reason, "repair or remove the line")
            yield source.row(
                number,
                "profiled step",
                meaning,
                source.number(number, printed, title) * scales[unit],
                printed=text.strip(),
                convention=convention,
                ranks=counts.get("world size"),
                settings={} if batch is None else {"local_batch_size": str(batch)},
            )


def _logged(source: Source, number: int, operation: str, match: re.Match[str]) -> Iterator[ImportedRow]:
    size = source.number(number, match["size"], "size") * _BYTES[match["unit"]]
    figures: tuple[tuple[Meaning, str, float, str], ...] = (
        (("latency_us", "us", "lower"), match["average"], 1e3, "deepspeed: mean of all calls, in ms"),
        (("busbw_gb_per_s", "GB/s", "higher"), match["busbw"], 1 / 8, "nccl-tests busbw; printed in Gbit/s"),
    )
    for meaning, text, scale, convention in figures:
        yield source.row(
            number,
            f"{operation} {match['size']} {match['unit']}",
            meaning,
            source.number(number, text, meaning[0]) * scale,
            printed=text,
            convention=convention,
            collective=collective_named(operation),
            message_bytes=size,
            settings={"count": match["count"], "printed size": f"{match['size']} {match['unit']}, a power of two"},
        )


FORMAT = Format(
    name="deepspeed",
    about="DeepSpeed's FLOPs profiler and communication logger",
    recognises=lambda source: _PROFILER in source.text or any(_LOGGER.match(line) for line in source.lines),
    read=_read,
)
