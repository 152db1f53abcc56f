"""FlagPerf: the FINISHED event of a training log, and the result lines of base cases, one per rank and unit.

Its intra-server bandwidth is busbw doubled ("bidirectional"); its inter-server one takes the ranks of a node for n.
Source: FlagPerf base/benchmarks/interconnect-MPI_*/main.py, 0d3a409.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfsuite.base.units import GIB
from perfsuite.imports.factors import factor
from perfsuite.imports.row import Format, Imported, ImportedRow, Refused, Source, Told
from perfsuite.record.own_metrics import Better

_EVENT = re.compile(r"\[PerfLog\]\s*(\{.*)$")
_RESULT = re.compile(
    r"\[FlagPerf Result\]\s*Rank (?P<rank>\d+)'s (?P<name>[\w.-]+?)="
    r"(?P<value>[-+]?\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)(?P<unit>[A-Za-z/]*)\s*$"
)
_ANY_RESULT = re.compile(r"\[FlagPerf Result\]")
_UNITS: Mapping[str, tuple[str, float, str, Better]] = {
    "TFLOPS": ("tflops_per_device", 1.0, "TFLOPS", "higher"),
    "TOPS": ("tops_per_device", 1.0, "TOPS", "higher"),
    "GB/s": ("bandwidth_gb_per_s", 1.0, "GB/s", "higher"),
    "GiB/s": ("bandwidth_gb_per_s", GIB / 1e9, "GB/s", "higher"),
    "GiB": ("memory_gib", 1.0, "GiB", "higher"),
    "us": ("latency_us", 1.0, "us", "lower"),
}
_FINISHED: Mapping[str, tuple[str, str, Better]] = {
    "training_sequences_per_second": ("sequences_per_s", "sequences/s", "higher"),
    "training_samples_per_second": ("samples_per_s", "samples/s", "higher"),
    "e2e_time": ("time_s", "s", "lower"),
    "raw_train_time": ("time_s", "s", "lower"),
    "init_time": ("time_s", "s", "lower"),
    "final_loss": ("final_loss", "", "lower"),
    "final_mlm_accuracy": ("accuracy", "", "higher"),
    "final_accuracy": ("accuracy", "", "higher"),
}
_SAME = 0.01
"""GB/s and GiB/s of one figure are rounded to 0.01 each."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    number: int
    rank: int
    name: str
    text: str
    unit: str


def _read(source: Source, told: Told) -> Imported:
    rows = list(_events(source, told))
    base, refused = _base(source, told, list(_results(source)))
    rows += base
    if not rows and not refused:
        raise source.fault(1, "no FINISHED event and no [FlagPerf Result]: the run did not end", "give a whole log")
    return Imported(source=str(source.path), tool="flagperf", rows=tuple(rows), refused=tuple(refused))


def _events(source: Source, told: Told) -> Iterator[ImportedRow]:
    for number, line in enumerate(source.lines, start=1):
        match = _EVENT.search(line)
        if match is None:
            continue
        try:
            event = json.loads(match[1])
        except (ValueError, RecursionError):
            raise source.fault(number, "the event is cut", "remove the line, or copy the log again") from None
        if not isinstance(event, dict) or event.get("event") != "FINISHED":
            continue
        values = event.get("value")
        if not isinstance(values, dict):
            raise source.fault(number, "the event has no values", "remove the line, or copy the log again")
        for name, (metric, unit, better) in _FINISHED.items():
            if values.get(name) is not None:
                yield ImportedRow(
                    name=f"training {name}",
                    metric=metric,
                    value=source.number(number, values[name], name),
                    unit=unit,
                    better=better,
                    printed=str(values[name]),
                    source=str(source.path),
                    line=number,
                    tool="flagperf",
                    convention="flagperf; of the whole job, not of a device" if unit.endswith("/s") else "flagperf",
                    platform=told.platform,
                    settings={"converged": str(values.get("converged", "not said"))},
                )


def _results(source: Source) -> Iterator[_Line]:
    for number, line in enumerate(source.lines, start=1):
        if not _ANY_RESULT.search(line):
            continue
        match = _RESULT.search(line)
        if match is None:
            raise source.fault(number, "the result line is cut", "remove it, or copy the log again")
        if match["unit"] not in _UNITS:
            said = f"its unit {match['unit']!r} is not known" if match["unit"] else "its unit is missing"
            raise source.fault(number, f"{match['name']}: {said}", f"it may be {', '.join(_UNITS)}")
        yield _Line(
            number=number,
            rank=source.whole(number, match["rank"], "rank"),
            name=match["name"],
            text=match["value"],
            unit=match["unit"],
        )


def _base(source: Source, told: Told, lines: Sequence[_Line]) -> tuple[list[ImportedRow], list[Refused]]:
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    seen: dict[tuple[int, str], float] = {}
    ranks = len({line.rank for line in lines})
    for line in lines:
        metric, scale, unit, better = _UNITS[line.unit]
        value = source.number(line.number, line.text, line.name) * scale
        known = seen.setdefault((line.rank, line.name), value)
        if known != value:  # the same figure in the other unit
            if abs(known - value) > _SAME * (1 + scale):
                raise source.fault(
                    line.number,
                    f"{line.text} {line.unit} is {value:.2f} GB/s, a line before says {known:.2f} GB/s",
                    "find out which is right, and remove the other",
                )
            continue
        value, convention, why = _converted(line, value, told, ranks)
        if why:
            refused.append(Refused(line=line.number, text=f"{line.name}={line.text}{line.unit}", why=why))
            continue
        interconnect = convention != "flagperf"
        rows.append(
            ImportedRow(
                name=line.name,
                metric="busbw_gb_per_s" if interconnect else metric,
                value=value,
                unit=unit,
                better=better,
                printed=f"{line.text}{line.unit}",
                source=str(source.path),
                line=line.number,
                tool="flagperf",
                convention=convention,
                collective="all_reduce" if interconnect else "",
                dtype="fp32" if interconnect else "",
                platform=told.platform,
                settings={"rank": str(line.rank)},
            )
        )
    return rows, refused


def _converted(line: _Line, value: float, told: Told, ranks: int) -> tuple[float, str, str]:
    """Value, convention, and why it is refused."""
    if "MPI_intraserver" in line.name:
        return value / 2, "nccl-tests busbw; flagperf prints it doubled (both directions)", ""
    if "MPI_interserver" in line.name or line.name == "transfer-bandwidth":
        node = told.ranks_per_node
        if not node or node < 2:
            why = (
                "busbw with the ranks of one node for n, or another transfer: the log does not say; if it is "
                "interconnect-MPI_interserver, give --ranks-per-node"
            )
            return value, "", why
        if ranks <= node:
            return value, "", f"the log has {ranks} ranks, so {node} ranks per node are no several nodes"
        right = value * factor("all_reduce", ranks) / factor("all_reduce", node)
        return right, f"nccl-tests busbw over {ranks} ranks; flagperf counts it with {node}, those of a node", ""
    return value, "flagperf", ""


def _recognises(source: Source) -> bool:
    return any("[PerfLog] {" in line or _ANY_RESULT.search(line) for line in source.lines)


FORMAT = Format(
    name="flagperf",
    about="FlagPerf training logs ([PerfLog]) and base results ([FlagPerf Result])",
    recognises=_recognises,
    read=_read,
)
