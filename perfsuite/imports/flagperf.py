"""FlagPerf: the FINISHED event of a training log, and the result lines of base cases, one per rank and unit.

Its intra-server bandwidth is busbw doubled ("bidirectional"); its inter-server one takes the ranks of a node for n.
Source: FlagPerf base/benchmarks/interconnect-MPI_*/main.py, 0d3a409.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from perfsuite.base.units import GIB
from perfsuite.imports.factors import factor
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Refused, Source

_EVENT = re.compile(r"\[PerfLog\]\s*(\{.*)$")
_RESULT = re.compile(
    r"\[FlagPerf Result\]\s*Rank (?P<rank>\d+)'s (?P<name>[\w.-]+?)="
    r"(?P<value>[-+]?\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)(?P<unit>[A-Za-z/]*)\s*$"
)
_ANY_RESULT = re.compile(r"\[FlagPerf Result\]")
_UNITS: Mapping[str, tuple[Meaning, float]] = {
    "TFLOPS": (("tflops_per_device", "TFLOPS", "higher"), 1.0),
    "TOPS": (("tops_per_device", "TOPS", "higher"), 1.0),
    "GB/s": (("bandwidth_gb_per_s", "GB/s", "higher"), 1.0),
    "GiB/s": (("bandwidth_gb_per_s", "GB/s", "higher"), GIB / 1e9),
    "GiB": (("memory_gib", "GiB", "higher"), 1.0),
    "us": (("latency_us", "us", "lower"), 1.0),
}
_FINISHED: Mapping[str, Meaning] = {
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


def _read(source: Source) -> Imported:
    rows = list(_events(source))
    base, refused = _base(source, list(_results(source)))
    rows += base
    if not rows and not refused:
        raise source.fault(1, "no FINISHED event and no [FlagPerf Result]: the run did not end", "give a whole log")
    return source.imported(rows, refused=refused)


def _events(source: Source) -> Iterator[ImportedRow]:
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
        for name, meaning in _FINISHED.items():
            if values.get(name) is not None:
                yield source.row(
                    number,
                    f"training {name}",
                    meaning,
                    source.number(number, values[name], name),
                    printed=str(values[name]),
                    convention="flagperf; of the whole job, not of a device"
                    if meaning[1].endswith("/s")
                    else "flagperf",
                    settings={"converged": str(values.get("converged", "not said"))},
                )


def _results(source: Source) -> Iterator[tuple[int, int, re.Match[str]]]:
    """Line, rank and parts of every result."""
    for number, line in enumerate(source.lines, start=1):
        if not _ANY_RESULT.search(line):
            continue
        match = _RESULT.search(line)
        if match is None:
            raise source.fault(number, "the result line is cut", "remove it, or copy the log again")
        if match["unit"] not in _UNITS:
            reason = f"its unit {match['unit']!r} is not known" if match["unit"] else "its unit is missing"
            raise source.fault(number, f"{match['name']}: {reason}", f"it may be {', '.join(_UNITS)}")
        yield number, source.whole(number, match["rank"], "rank"), match


def _base(source: Source, results: Sequence[tuple[int, int, re.Match[str]]]) -> tuple[list[ImportedRow], list[Refused]]:
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    seen: dict[tuple[int, str], float] = {}
    ranks = len({rank for _, rank, _ in results})
    for number, rank, match in results:
        name, text, unit = match["name"], match["value"], match["unit"]
        meaning, scale = _UNITS[unit]
        value = source.number(number, text, name) * scale
        known = seen.setdefault((rank, name), value)
        if known != value:  # the same figure in the other unit
            if abs(known - value) > _SAME * (1 + scale):
                reason = f"{text} {unit} is {value:.2f} GB/s, a line before says {known:.2f} GB/s"
                raise source.fault(number, reason, "find out which is right, and remove the other")
            continue
        value, convention, why = _converted(name, value, source.told.ranks_per_node, ranks)
        if why:
            refused.append(Refused(line=number, text=f"{name}={text}{unit}", why=why))
            continue
        more: dict[str, str] = {}
        if convention != "flagperf":
            meaning = ("busbw_gb_per_s", *meaning[1:])
            more = {"collective": "all_reduce", "dtype": "fp32"}
        printed, settings = f"{text}{unit}", {"rank": str(rank)}
        rows.append(
            source.row(number, name, meaning, value, printed=printed, convention=convention, settings=settings, **more)
        )
    return rows, refused


def _converted(name: str, value: float, node: int | None, ranks: int) -> tuple[float, str, str]:
    """Value, convention, and why it is refused; ``node`` is the number of ranks of a node."""
    if "MPI_intraserver" in name:
        return value / 2, "nccl-tests busbw; flagperf prints it doubled (both directions)", ""
    if "MPI_interserver" in name or name == "transfer-bandwidth":
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


FORMAT = Format(
    name="flagperf",
    about="FlagPerf training logs ([PerfLog]) and base results ([FlagPerf Result])",
    recognises=lambda source: any("[PerfLog] {" in line or _ANY_RESULT.search(line) for line in source.lines),
    read=_read,
)
