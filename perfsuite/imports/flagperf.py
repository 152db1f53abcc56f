"""FlagPerf: the FINISHED event of a training log, and the result lines of base cases and operators.

Base cases in PyTorch print a line per rank and unit; the vendors' toolkits print a line without a rank. Conventions
differ per name. The intra-server bandwidth of PyTorch, NVIDIA and MTT is busbw doubled ("bidirectional"). The
inter-server bandwidth of PyTorch uses the ranks of a node for n. Toolkits of other vendors print results of other
tools. Source: FlagPerf base/benchmarks/interconnect-MPI_*/main.py, 0d3a409, and base/toolkits, 1b5a030.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.units import GIB
from perfsuite.imports.nccl_table import factor
from perfsuite.imports.row import Format, Imported, ImportedRow, LogFigures, Meaning, Source

_TAG = re.compile(r"(?=\[FlagPerf Result\]|\[PerfLog\])")
_RESULT = re.compile(
    r"\[FlagPerf Result\]\s*(?:Rank (?P<rank>\d{1,7})(?P<chips>'s | BI-V150 [\w ]+ ))?"
    r"(?P<name>[\w.()-]+?(?: bandwidth| global latency)?)\s*=\s*"
    r"(?P<value>[-+]?\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)(?P<blank>\s*)(?P<unit>[A-Za-z/]*)\s*$"
)
_EVENT = re.compile(r"\[PerfLog\]\s*(\{.*)$")
_EVENT_NAME = re.compile(r'"event"\s*:\s*"(\w+)"')
_FAMILIES: tuple[tuple[str, Meaning, Mapping[str, float]], ...] = (
    (r"^computation-INT", ("tops_per_device", "TOPS", "higher"), {"TOPS": 1.0, "Tops": 1.0, "TFLOPS": 1.0}),
    (r"^computation-", ("tflops_per_device", "TFLOPS", "higher"), {"TFLOPS": 1.0, "TFlops": 1.0}),
    (r"algbw$", ("algbw_gb_per_s", "GB/s", "higher"), {"GB/s": 1.0, "GiB/s": GIB / 1e9}),
    (
        r"b[ai]ndwidth$|^interconnect-(P2P_\w+|h2d)$",
        ("bandwidth_gb_per_s", "GB/s", "higher"),
        {"GB/s": 1.0, "GiB/s": GIB / 1e9},
    ),
    (r"capacity$", ("memory_gib", "GiB", "higher"), {"GiB": 1.0, "GB": 1e9 / GIB, "MiB": 1 / 1024}),
    (r"latency$", ("latency_us", "us", "lower"), {"us": 1.0, "ns": 1e-3}),
    (r"^power-", ("power_w", "W", "lower"), {"W": 1.0}),
)
"""Pattern of the name, meaning, and scale of each unit that may follow."""
_SAME = 0.01  # GB/s and GiB/s of one figure are rounded to 0.01 each.
_RATES = frozenset({"sequences", "samples", "images", "items", "tokens"})
_OF_JOB = "flagperf; of the whole job, not of a device"
_TIMES = {"raw": "training", "no_eval": "training without evaluation", "pure_compute": "pure computing"}


def _finished(name: str, values: Mapping[str, object]) -> tuple[Meaning, str] | None:
    """Return meaning and convention of a value of FINISHED; None for a count or an ambiguous value.

    >>> _finished("training_images_per_second", {})[0], _finished("global_steps", {})
    (('images_per_s', 'images/s', 'higher'), None)
    """
    if hit := re.fullmatch(r"(?:training|effective)_(\w+)_per_second", name):
        return ((f"{hit[1]}_per_s", f"{hit[1]}/s", "higher"), _OF_JOB) if hit[1] in _RATES else None
    if hit := re.fullmatch(r"thro(?:ugh|uhg)put\(([is])ps\)_(raw|no_eval|pure_compute)", name):
        items = "samples" if hit[1] == "s" or "num_trained_samples" in values else "items"
        items = "tokens" if "training_tokens_per_second" in values else items
        return (f"{items}_per_s", f"{items}/s", "higher"), f"{_OF_JOB}; over the time of {_TIMES[hit[2]]}"
    if re.fullmatch(r"(e2e|raw_train|init|train|train_no_eval|pure_training_computing)_time", name):
        return ("time_s", "s", "lower"), "flagperf"
    if name in ("final_loss", "val_loss", "train_loss", "best_validation_loss"):
        return (name, "", "lower"), "flagperf"
    if name in ("final_accuracy", "final_mlm_accuracy"):
        return ("accuracy", "", "higher"), "flagperf"
    return None


@dataclass(frozen=True, kw_only=True)
class _Result:
    """One result line."""

    line: int
    rank: str  # Empty for a toolkit, whose lines have none.
    name: str
    text: str
    unit: str
    blank: bool  # A blank precedes the unit, as in scripts around vendors' tools.
    meaning: Meaning
    scale: float

    @property
    def value(self) -> float:
        """In the unit of the meaning."""
        return float(self.text) * self.scale

    @property
    def printed(self) -> str:
        """The figure with its unit."""
        return f"{self.text}{self.unit}"


def _read(source: Source) -> Imported:
    aside = LogFigures()
    rows = [*_events(source, aside), *_operators(source, aside)]
    rows += _base(source, list(_results(source, aside)), aside)
    if not rows and not aside.refused:
        raise source.fault(1, "no FINISHED event and no [FlagPerf Result]: the run did not end", "give a whole log")
    return source.imported(rows, refused=aside.refused, notes=[*aside.notes, *aside.counted()])


def _parts(source: Source) -> Iterator[tuple[int, str]]:
    """Yield every tagged text with its line; ranks that print at the same time may share a line."""
    for number, line in enumerate(source.lines, start=1):
        if "[FlagPerf Result]" in line or "[PerfLog]" in line:
            yield from ((number, part) for part in _TAG.split(line) if part.startswith("["))


# Operators.

_OPERATOR = re.compile(r"\[FlagPerf Result\]\s*Operation (?P<name>\S+) in (?P<library>\S+) at (?P<dtype>\w+):\s*$")
_FLOAT = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_TIMED = re.compile(
    rf"\[FlagPerf Result\]\s*(?P<kind>cpu|kernel)time=(?P<time>{_FLOAT}) us, throughput=(?P<rate>{_FLOAT}) op/s, "
    rf"equals to (?P<tflops>{_FLOAT}) TFLOPS\s*$"
)
_OF_OPERATOR = re.compile(r"\[FlagPerf Result\]\s*(?:Operation |(?:cpu|kernel)time=|FLOPS util|Correctness|First time)")
_KINDS = {
    "cpu": ("latency_us", "flagperf: host time of back-to-back calls"),
    "kernel": ("kernel_us", "flagperf: median on the device"),
}


def _operators(source: Source, aside: LogFigures) -> list[ImportedRow]:
    """Return the times of operators (operation/benchmarks/drivers/calculate.py, 1b5a030); backward is 3 x FLOPs."""
    rows: list[ImportedRow] = []
    name, dtype, begin = "", "", 0
    for number, part in _parts(source):
        if match := _OPERATOR.match(part):
            name, dtype, begin = f"{match['name']} in {match['library']}", match["dtype"].lower(), len(rows)
        elif part.rstrip().endswith("Reference: False"):
            aside.refuse(
                number, part, f"the result of {name} is wrong, so its {len(rows) - begin} figures are left out"
            )
            del rows[begin:]
        elif _OF_OPERATOR.match(part) and "time=" in part[:40]:
            match = _TIMED.match(part)
            time, rate = (float(match["time"]), float(match["rate"])) if match else (0.0, 0.0)
            if match is None or not name or abs(time * rate - 1e6) > 0.005 * rate + 1:
                aside.refuse(number, part, "not the time of one operation, its rate and TFLOPS: the line was cut")
                continue
            metric, how = _KINDS[match["kind"]]
            figures: dict[Meaning, str] = {(metric, "us", "lower"): match["time"]}
            if match["kind"] == "kernel" and float(match["tflops"]):
                figures["tflops_per_device", "TFLOPS", "higher"] = match["tflops"]
            for meaning, text in figures.items():
                rows.append(source.row(number, name, meaning, float(text), printed=text, convention=how, dtype=dtype))
    return rows


# Training: the FINISHED event.


def _events(source: Source, aside: LogFigures) -> Iterator[ImportedRow]:
    seen: list[tuple[str, str]] = []
    for number, part in _parts(source):
        if not part.startswith("[PerfLog]"):
            continue
        name = _EVENT_NAME.search(part)
        if name is not None and name[1] != "FINISHED":
            aside.left_out["other event", ""] += 1
            continue
        event = _event(part)
        if event is None:
            aside.refuse(number, part[:120], "the event is cut; copy the log again")
            continue
        values, rank = event
        text = json.dumps(values, sort_keys=True)
        if (rank, text) in seen:
            aside.left_out["repeated event", ""] += 1
            continue
        seen.append((rank, text))
        run = sum(other == rank for other, _ in seen)
        yield from _training(source, number, values, aside, rank=rank, run=run)


def _event(part: str) -> tuple[Mapping[str, object], str] | None:
    match = _EVENT.search(part)
    try:
        event = json.loads(match[1]) if match else None
    except (ValueError, RecursionError):
        return None
    values = event.get("value") if isinstance(event, dict) else None
    if not isinstance(event, dict) or not isinstance(values, dict) or event.get("event") != "FINISHED":
        return None
    about = event.get("metadata")
    return values, str(about.get("rank", "")) if isinstance(about, dict) else ""


def _training(
    source: Source, number: int, values: Mapping[str, object], aside: LogFigures, *, rank: str, run: int
) -> Iterator[ImportedRow]:
    other: list[str] = []
    settings = {"converged": str(values.get("converged", "not said")), "rank": rank, "run": str(run) if run > 1 else ""}
    for name, value in values.items():
        found = _finished(name, values)
        if found is None:
            other += [name] if isinstance(value, int | float) and not isinstance(value, bool) else []
            continue
        meaning, convention = found
        figure = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if value is None or figure == 0:
            other.append(f"{name} ({value})")
        elif not math.isfinite(figure) or (meaning[1] and figure < 0):
            aside.refuse(number, f"{name}: {value}", f"{name} is not a number from 0 {meaning[1]} on; run again")
        else:
            yield source.row(
                number,
                f"training {name}{f', run {run}' if run > 1 else ''}",
                meaning,
                figure,
                printed=str(value),
                convention=convention,
                settings={key: text for key, text in settings.items() if text},
            )
    if other:
        aside.notes.append(f"line {number}: left out of FINISHED (counts, zeros, no common unit): {', '.join(other)}")


# Base cases.


def _results(source: Source, aside: LogFigures) -> Iterator[_Result]:
    for number, part in _parts(source):
        if not part.startswith("[FlagPerf Result]") or _OF_OPERATOR.match(part):
            continue
        match = _RESULT.fullmatch(part)
        name, unit = (match["name"], match["unit"]) if match else ("", "")
        family = next((row for row in _FAMILIES if re.search(row[0], name)), None)
        if match is None:
            why = "not one name, figure and unit: cut, or joined with another; copy the log again"
        elif family is None:
            why = f"{name} is not a result of FlagPerf's base cases; its meaning is not known"
        elif not unit or unit not in family[2]:
            reason = f"its unit {unit!r} does not fit" if unit else "its unit is missing"
            why = f"{name}: {reason}; it may be {', '.join(family[2])}"
        elif not _is_figure(match["value"]):
            why = f"{name} is {match['value']}, not a number above 0; run again"
        elif match["chips"] not in (None, "'s "):
            why = "twice the figure that the line of the rank has (two chips, or both directions); use that line"
        else:
            blank = bool(match["blank"])
            scale = 1.0 if blank and unit == "GB" else family[2][unit]  # tsingmicro divides by 1024
            rank = str(int(match["rank"])) if match["rank"] else ""
            yield _Result(
                line=number, rank=rank, name=name, text=match["value"], unit=unit, blank=blank,
                meaning=family[1], scale=scale,
            )  # fmt: skip
            continue
        aside.refuse(number, part[:120], why)


def _is_figure(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


_Runs = Mapping[tuple[str, str], Sequence[Mapping[str, _Result]]]  # Results by unit of each run, by (rank, name).


def _runs(results: Sequence[_Result], aside: LogFigures) -> _Runs:
    """Group results into runs: a repeated figure with another value in the same unit begins a new run."""
    runs: dict[tuple[str, str], list[dict[str, _Result]]] = {}
    for result in results:
        series = runs.setdefault((result.rank, result.name), [{}])
        if any(result.unit in run and run[result.unit].text == result.text for run in series):
            aside.left_out["repeated line", ""] += 1
        elif result.unit in series[-1]:
            series.append({result.unit: result})
        else:
            series[-1][result.unit] = result
    return runs


def _base(source: Source, results: Sequence[_Result], aside: LogFigures) -> list[ImportedRow]:
    rows: list[ImportedRow] = []
    runs = _runs(results, aside)
    for (rank, name), series in runs.items():
        for index, units in enumerate(series):
            figures = list(units.values())
            first = next((one for one in figures if one.scale == 1), figures[0])
            apart = [one for one in figures if abs(one.value - first.value) > _SAME * (1 + one.scale)]
            if apart:
                for one, other in ((first, apart[0]), (apart[0], first)):
                    unit = one.meaning[1]
                    why = f"{one.printed} is {one.value:.2f} {unit}, line {other.line} says {other.value:.2f} {unit}"
                    aside.refuse(one.line, f"{name}={one.printed}", f"{why}; find out which is right")
                continue
            partner = runs.get((rank, re.sub(r"bandwidth$", "algbw", name)), ())
            algbw = next(iter(partner[index].values())) if index < len(partner) else None
            found = _converted(source, first, runs, None if algbw is first else algbw)
            if isinstance(found, str):
                aside.refuse(first.line, f"{name}={first.printed}", found)
                continue
            value, meaning, convention, more = found
            settings = {"rank": rank, "run": str(index + 1) if index else ""}
            rows.append(
                source.row(
                    first.line,
                    f"{name}, run {index + 1}" if index else name,
                    meaning,
                    value,
                    printed=first.printed,
                    convention=convention,
                    settings={key: text for key, text in settings.items() if text},
                    **more,
                )
            )
    return sorted(rows, key=lambda row: row.line)


_Converted = tuple[float, Meaning, str, Mapping[str, Any]]
"""A figure in a comparable convention: value, meaning, convention and further fields of ImportedRow."""
_OF_ALL_REDUCE: Mapping[str, Any] = {"collective": "all_reduce", "dtype": "fp32"}


def _converted(source: Source, result: _Result, runs: _Runs, algbw: _Result | None) -> _Converted | str:
    """Return the figure in its convention, or the reason of its refusal."""
    name, is_collective = result.name, "MPI_" in result.name
    if name.endswith("algbw"):
        about = "nccl-tests algbw; flagperf's toolkit of nvidia or mthreads"
        return result.value, result.meaning, about, _OF_ALL_REDUCE
    if result.rank and (is_collective or name == "transfer-bandwidth"):
        return _of_ranks(result, source.options.ranks_per_node, len({rank for rank, _ in runs if rank}))
    if is_collective:
        return _of_toolkit(result, algbw)
    dtype = name.removeprefix("computation-").lower() if name.startswith("computation-") else ""
    remark = _remark(result)
    if name == "computation-FP32" and not result.rank and result.blank:
        dtype, remark = "", "; the FP16 toolkit of MTT S4000 prints this name as well"
    more = {"dtype": dtype} if dtype else {}
    return result.value, result.meaning, f"flagperf{remark}", more


def _remark(result: _Result) -> str:
    """Return the part of the convention that is not in the name."""
    name = result.name
    if result.meaning[0] == "tops_per_device" and result.unit == "TFLOPS":
        return "; printed as TFLOPS"
    if "P2P" in name:
        return "; one direction, or both added: that differs between its cases"
    if "h2d" in name or name == "transfer-bandwidth":
        return "; host to device" + ("" if result.blank else ", doubled by the toolkit of dcu")
    if name.startswith("main_memory-b"):
        return "; as the vendor's tool counts" if result.blank else "; bytes read and bytes written"
    if result.unit == "GB" and result.blank:
        return "; its GB are 2^30 bytes"
    return ""


def _of_ranks(result: _Result, node: int | None, ranks: int) -> _Converted | str:
    """Convert the bandwidth of PyTorch's cases; ``node`` is the number of ranks of a node."""
    meaning: Meaning = ("busbw_gb_per_s", "GB/s", "higher")
    if "MPI_intraserver" in result.name:
        about = "nccl-tests busbw; flagperf prints it doubled (both directions)"
        return result.value / 2, meaning, about, _OF_ALL_REDUCE
    if not node or node < 2:
        return (
            "busbw with the ranks of one node for n, or another transfer: the log does not say; if it is "
            "interconnect-MPI_interserver, give --ranks-per-node"
        )
    if ranks <= node:
        return f"the log has {ranks} ranks, so {node} ranks per node are not several nodes"
    right = result.value * factor("all_reduce", ranks) / factor("all_reduce", node)
    about = f"nccl-tests busbw over {ranks} ranks; flagperf counts it with {node}, those of a node"
    return right, meaning, about, {**_OF_ALL_REDUCE, "ranks": ranks}


def _of_toolkit(result: _Result, algbw: _Result | None) -> _Converted | str:
    """Convert the bandwidth of a toolkit; the convention is only certain together with algbw."""
    if algbw is None:
        return (
            "a toolkit's line without algbw: busbw of all_reduce or all_gather, single or doubled, or "
            "send and receive; the log does not say which; import the log of the vendor's own tool"
        )
    half = 0.005 * max(result.scale, algbw.scale)
    busbw = result.value / 2
    low, high = (busbw - half / 2) / (algbw.value + half), (busbw + half / 2) / max(algbw.value - half, 1e-9)
    # busbw / algbw = 2 (n - 1) / n, so n = 2 / (2 - ratio)
    fewest = math.ceil(2 / (2 - max(low, 1.0))) if low < 2 else 0
    most = math.floor(2 / (2 - high)) if high < 2 else math.inf
    if not fewest or most < max(fewest, 2):
        return f"{result.value:.2f} GB/s is not twice the busbw of algbw {algbw.value:.2f} GB/s for any number of ranks"
    ranks = fewest if fewest == most else None
    about = f"nccl-tests busbw{f' over {ranks} ranks, by algbw' if ranks else ''}; flagperf prints it doubled"
    more = {**_OF_ALL_REDUCE, "ranks": ranks}
    return busbw, ("busbw_gb_per_s", "GB/s", "higher"), about, more


FORMAT = Format(
    name="flagperf",
    about="FlagPerf training logs ([PerfLog]), base results and operators ([FlagPerf Result])",
    recognises=lambda source: any("[PerfLog] {" in line or "[FlagPerf Result]" in line for line in source.lines),
    read=_read,
    options=("ranks_per_node",),
)
