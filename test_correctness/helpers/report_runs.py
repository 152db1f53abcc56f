"""Results of training steps as a run would have them, without running anything: for tests of tables and scaling."""

from __future__ import annotations

import dataclasses

from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.platforms import load_catalog
from perfsuite.record.codec import to_json
from perfsuite.record.result import ClockFacts, Metric, Peak, Peaks, Record, Result
from perfsuite.record.run import RunRecord
from perfsuite.record.step import SpanTotal, Timeline, TimelineEvent
from perfsuite.reports.stored import Recording
from perfsuite.reports.tables.report import STYLES, report
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.measurements import measurement_of, rank_facts

CLOCK = ClockFacts(name="cuda.Event", resolution_s=5e-8, cost_s=1e-7)
PEAKS = Peaks(tflops={name: Peak(value=100.0, unit="TFLOPS", source="data sheet") for name in ("fp32", "bf16", "fp16")})
SHARES = {"data": 0.25, "forward": 0.2, "backward": 0.4, "optimizer": 0.1, "remainder": 0.05}


def measurement(ranks, time_s, *, hosts=1, records=(), shared=False):
    """What ranks report of a step of ``time_s``, its parts in fixed shares, five equal samples but one."""
    facts = [
        rank_facts(
            rank,
            time_s=time_s,
            host=f"host{rank * hosts // ranks}",
            device="cpu" if shared else f"cuda:{rank}",
            max_rss_bytes=1 << 30,
        )
        for rank in range(ranks)
    ]
    spans = tuple(
        SpanTotal(name=name, time_s=time_s * share, count=1, slowest_rank=0) for name, share in SHARES.items()
    )
    times_s = (time_s * 0.99, time_s, time_s, time_s, time_s * 1.01)
    return measurement_of(
        times_s,
        facts,
        warmup_iterations=1,
        aligned=False,
        clock=CLOCK,
        process="reused",
        spans=spans,
        records=tuple(Record(name=name, value=value, unit="", reduce="max") for name, value in records),
    )


def trained(
    name,
    ranks,
    time_s,
    *,
    platform="s4000",
    fingerprint="",
    hosts=1,
    records=(),
    shared=False,
    oom="",
    measured=None,
    **workload,
):
    """The result of one training case; with ``oom`` it ran out of memory, which is what it says.

    A ``name`` with brackets is the whole case; ``measured`` are further fields of its measurement.
    """
    step = TrainStep(**workload)
    work = step.work(MeshShape.parse(step.mesh) if step.mesh else MeshShape.of(dp=ranks))
    told = measurement(ranks, time_s, hosts=hosts, records=records, shared=shared)
    measured = None if oom else dataclasses.replace(told, **(measured or {}))
    case = name if "[" in name else f"{name}[{platform}-ws{ranks}-{step.model}]"
    return Result(
        case=f"test_perf/test_it.py::{case}",
        workload="perfsuite.workloads.training.train_step:TrainStep",
        parameters=to_json(step.parameters()),
        platform=platform,
        world_size=ranks,
        outcome="out_of_memory" if oom else "measured",
        detail=oom,
        work=work,
        metrics=() if oom else derive(step.metrics, work=work, measurement=measured, peaks=PEAKS),
        measurement=measured,
        fingerprint=fingerprint or f"{platform}-test",
    )


def run(*results, name="journal.jsonl", platform="", missing=(), **meaning):
    """These results as a report takes them."""
    platform = platform or (results[0].platform if results else "s4000")
    reasons = {case: reason.partition(": ") for case, reason in dict(missing).items()}
    record = RunRecord(
        name=name,
        results={result.case: result for result in results},
        skips={case: told for case, (kind, _, told) in reasons.items() if kind == "skipped"},
        failures={case: told for case, (kind, _, told) in reasons.items() if kind == "failed"},
        **{"platform": platform, "fingerprint": results[0].fingerprint if results else "s4000-test", **meaning},
    )
    return Recording(run=record, device=load_catalog().models.get(platform))


def latte(ranks, time_s, **changes):
    """One row of report 001."""
    return trained("test_latte", ranks, time_s, **{"model": "latte-l", "strategy": "ddp", **changes})


GIB = 2**30
MEMORY = tuple(
    (f"{name}_bytes", gib * GIB)
    for name, gib in (
        ("weights", 3),
        ("gradients", 3),
        ("optimizer", 6),
        ("activations", 2.5),
        ("peak", 14.5),
        ("fragmentation", 0.5),
        ("final_device", 12),
        ("final_host", 10),
    )
)


def opensora(ranks, time_s, **changes):
    usual = {"model": "opensora", "strategy": "fsdp", "builds": ("memory", "loss")}
    return trained("test_opensora", ranks, time_s, **{**usual, "records": (*MEMORY, ("final_loss", 0.25)), **changes})


def llama(ranks, time_s, **changes):
    records = (*MEMORY, ("final_loss", 3.5), ("whole_device_bytes", 40 * GIB))
    usual = {"model": "llama2-7b", "strategy": "fsdp", "micro_batch_size": 3, "dtype": "bf16", "records": records}
    return trained("test_llama2", ranks, time_s, **{**usual, "builds": ("memory", "loss"), **changes})


def gpt(name, ranks, time_s, **changes):
    return trained(name, ranks, time_s, **{"model": "gpt2-xl", "strategy": "ddp", "platform": "a100", **changes})


def style(name, *runs, base=None):
    return report(list(runs), [STYLES[name]], base)


def pipeline(schedule, micro_batches, bubble):
    events = tuple(
        TimelineEvent(kind="forward", rank=rank, stage=rank, micro_batch=micro, start_s=0.0, end_s=1.0)
        for rank in range(4)
        for micro in range(micro_batches)
    )
    timeline = Timeline(ranks=4, events=events, source="measured", schedule=schedule)
    plain = gpt(f"test_pp[a100-ws4-{schedule}-m{micro_batches}]", 4, 1.0, measured={"timeline": timeline})
    ratio = Metric(name="bubble_ratio", value=bubble, unit="ratio", better="lower")
    return dataclasses.replace(plain, metrics=(*plain.metrics, ratio))


def kernel(name, workload, ranks, parameters, work, **metrics):
    plain = gpt(name, ranks, 1e-3)
    return dataclasses.replace(
        plain,
        case=f"t.py::{name}[a100-ws{ranks}]",
        workload=f"perfsuite.workloads.x:{workload}",
        parameters=parameters,
        work=work,
        metrics=tuple(Metric(name=key, value=value, unit="", better="higher") for key, value in metrics.items()),
    )


def section(text, title):
    """Lines of the section with this heading, the heading left out."""
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if line.lstrip("#") == f" {title}" and line.startswith("#"))
    depth = lines[at].split()[0]
    ends = (
        index
        for index, line in enumerate(lines[at + 1 :], at + 1)
        if line.startswith("#") and len(line.split()[0]) <= len(depth)
    )
    return lines[at + 1 : next(ends, len(lines))]


def table(text, title):
    """Cells of the first table of a section, row by row, the headings first."""
    lines = [line for line in section(text, title) if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for index, row in enumerate(rows) if index != 1]


def rows(text, title):
    """Rows of the first table of a section, each a cell by its heading."""
    heads, *cells = table(text, title)
    return [dict(zip(heads, row, strict=True)) for row in cells]
