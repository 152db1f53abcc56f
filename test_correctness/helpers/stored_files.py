"""Stored runs and files for tests of the baseline store."""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime, timedelta, timezone

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary

HARDWARE = Hardware(platform="cpu", fingerprint="cpu-test", key={"cpu_model": "Test CPU", "cores": 2})
NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)


OUT_OF_MEMORY = {"outcome": "out_of_memory", "quantiles_s": (), "location": None}
OUT_OF_MEMORY |= {"samples": 0, "clean": 0, "metrics": {}}
"""Fields of a run that did not fit."""


def run_of(session="s0", days_old=1.0, median_s=0.01, number=0, **changes):
    plain = RunSummary(
        session=session,
        time=(NOW - timedelta(days=days_old) + timedelta(seconds=number)).isoformat(),
        ordinal=number,
        quantiles_s=tuple(float(f"{median_s * factor:.3e}") for factor in (0.98, 0.99, 1.0, 1.01, 1.02)),
        location=round(math.log(median_s), 5),
        samples=40,
        clean=30,
        metrics={"latency_us": float(f"{median_s * 1e6:.5e}")},
        environment={"packages": {"torch": "2.13.0"}, "kernel": "6.1.0"},
    )
    return dataclasses.replace(plain, **changes)


def case(name="a", **changes):
    plain = CaseIdentity(
        node=f"test_x.py::test_{name}[cpu-ws2-1KiB]",
        world_size=2,
        backend="gloo",
        parameters={"message_bytes": 1024, "dtype": "fp32"},
        workload="test_x:Sum",
        metrics={"latency_us": MetricMeaning(unit="us", better="lower")},
    )
    return dataclasses.replace(plain, **changes)


def offer(folder, *runs, name="a", hardware=HARDWARE, mode="append", verdict="pass", **more):
    """Store new runs of a case; ``more`` are fields of what is offered or options of the update."""
    own = {field.name: more.pop(field.name) for field in dataclasses.fields(NewRuns) if field.name in more}
    new = NewRuns(**{"case": case(name), "runs": runs, "verdict": verdict, **own})
    return store.update(folder, hardware, [new], mode=mode, **more)


def entry_of(*runs, **fields):
    return Entry(**{"case": case(), "runs": runs, **fields})


def baseline_of(*entries):
    return Baseline(hardware=HARDWARE, entries={entry.case.key: entry for entry in entries})


def sessions_in(folder):
    (entry,) = store.load(folder, HARDWARE).by_node[case().node]
    return [run.session for run in entry.runs]


def entry_in(folder):
    """The only case of a file."""
    (entry,) = store.load(folder, HARDWARE).entries.values()
    return entry


def filled(folder, count):
    """Store runs of so many sessions, a day apart."""
    for index in range(count):
        offer(folder, run_of(f"s{index}", 40 - index))
