"""Runs as a screen, a page or a summary shows them: results, verdicts, and one with more than fits anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import Metric, Peak, Result, Work
from perfsuite.record.run import GateRecord, Header, RunEnd, RunRecord
from perfsuite.record.verdict import Effect, Finding, Verdict
from test_correctness.helpers.measurements import result_of
from test_correctness.helpers.scripted_driver import measured_on

PEAK = Peak(value=0.772, unit="TFLOPS", source="measured here", kind="measured")


def result(case: str, median_s: float = 0.5, **changes) -> Result:
    meaning = {"workload": "t:step", "parameters": {"case": case}, "fingerprint": "cpu-x", **changes}
    plain = measured_on(changes.get("world_size", 1), (median_s, 1.1 * median_s, median_s))
    return result_of(meaning.pop("measurement", plain), case, **meaning)


def remeasured(result: Result, **changes: Any) -> Result:
    """The result with other fields of its measurement."""
    assert result.measurement is not None
    return dataclasses.replace(result, measurement=dataclasses.replace(result.measurement, **changes))


def on_devices(result: Result, medians_s: Sequence[float], **changes: Any) -> Result:
    """The result on one device per time."""
    assert result.measurement is not None
    first = result.measurement.ranks[0]
    ranks = tuple(
        dataclasses.replace(first, rank=rank, device=f"cuda:{rank}", median_s=median_s)
        for rank, median_s in enumerate(medians_s)
    )
    return remeasured(dataclasses.replace(result, world_size=len(ranks)), ranks=ranks, **changes)


def product(case: str, tflops: float, dtype: str = "bf16") -> Result:
    metric = Metric(name="tflops", value=tflops, unit="TFLOPS", better="higher", peak=PEAK)
    return result(case, work=Work(flops={"exact": 1.0}, dtype=dtype), metrics=(metric,))


def all_reduce(size: int, ranks: int, median_s: float) -> Result:
    work = Work(collective="all_reduce", message_bytes=float(size), dtype="fp32")
    case = f"t.py::test_all_reduce[cpu-ws{ranks}-{size}]"
    return result(case, median_s, world_size=ranks, work=work, metrics=("busbw_gb_per_s",))


def record(*results: Result, **fields) -> RunRecord:
    meaning = {"name": "s", "platform": "cpu (1 x EPYC)", "fingerprint": "cpu-x", "versions": {"torch": "2.13.0"}}
    return RunRecord(**{**meaning, "results": {one.case: one for one in results}, **fields})


HEADER = Header(session="s", fingerprint="cpu-x", platform="cpu", started_at="2026-01-01T00:00:00+00:00")


def journal_of(
    path: Path,
    *results: Result,
    header: Header = HEADER,
    failures: Mapping[str, str] | None = None,
    skips: Mapping[str, str] | None = None,
    gate: GateRecord | None = None,
    end: RunEnd | None = None,
) -> Path:
    """The journal of a run."""
    writer = JournalWriter(path, header)
    for each in results:
        writer.result(each)
    for case, message in (failures or {}).items():
        writer.failure(case, message)
    for case, reason in (skips or {}).items():
        writer.skip(case, reason)
    if gate is not None:
        writer.judged(gate)
    if end is not None:
        writer.ended(end)
    writer.close()
    return path


def verdict(case: str, name: str = "regressed", effect: float = 0.081, **changes: Any) -> Verdict:
    """A verdict from 1 s, with six runs of the change; ``changes`` are of its finding."""
    ends = changes.pop("interval", (effect - 0.019, effect + 0.019))
    finding = Finding(
        **{"quantity": "time", "name": name, "tolerance": 0.03, "effect": effect, "interval": ends},
        **{"before": 1.0, "after": 1 + effect, "unit": "s", **changes},
        change=Effect(change=effect, interval=ends, count=6),
    )
    return Verdict(case=case, name=name, findings=(finding,))


def large_run(count: int) -> RunRecord:
    long = "very-long-" * 9
    results = [product(f"t.py::test_{long}{number}", 0.5 + number % 7, f"d{number % 9}") for number in range(count)]
    return record(
        *results,
        *(all_reduce(1 << size, ranks, 1e-3) for size in range(10, 25) for ranks in (2, 4, 8)),
        failures={f"t.py::failed_{number}": "rank 1 died of " + long for number in range(count)},
        skips={f"t.py::s{number}": f"reason {number} {long}" for number in range(count)},
        gate=GateRecord(gate=True, fail_on=("regressed",), verdicts=tuple(verdict(one.case) for one in results)),
        end=RunEnd(at="", took_s=1.0, exit_status=1, warnings=tuple(f"warning {n} {long}" for n in range(20))),
    )
