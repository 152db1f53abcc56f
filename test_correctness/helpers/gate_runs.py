"""Stored and new runs for tests of the gate, with times that a test chooses."""

from __future__ import annotations

import dataclasses
import math

from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import GateSettings

WOBBLE = (0.0, 0.004, -0.003, 0.002, -0.004, 0.003, -0.001, 0.001)
"""Stored runs move by half a per cent, as on a quiet machine."""
MIDDLE_S = 0.01


def node_of(name="a"):
    return f"test_x.py::test_{name}[cpu-ws2]"


def case_of(name="a", **changes):
    plain = CaseIdentity(node=node_of(name), world_size=2, backend="gloo", parameters={"size": 4}, workload="m:W")
    return dataclasses.replace(plain, **changes)


def run_of(change=0.0, session="now", number=0, middle_s=MIDDLE_S, **changes):
    """A run that took ``change`` (0.05: 5 %) longer than the middle."""
    median_s = middle_s * (1 + change)
    plain = RunSummary(
        session=session,
        time=f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}+00:00",
        quantiles_s=tuple(median_s * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02)),
        location=math.log(median_s),
        samples=40,
        clean=30,
    )
    return dataclasses.replace(plain, **changes)


def stored_runs(wobble=WOBBLE, **changes):
    """One run from each of several sessions."""
    return tuple(run_of(change, session=f"s{index}", **changes) for index, change in enumerate(wobble))


def gated(name="a", stored=None, **changes):
    return GateCase(case=case_of(name), specs=REGISTRY, stored=stored_runs() if stored is None else stored, **changes)


def settle(gate, new, base=lambda name, number: run_of(), nodes=None, anchor=None):
    """Carry out requests; ``new``, ``base`` and ``anchor`` are (name, number) -> Run.  Those that were carried out."""
    done = []
    while requests := gate.next_requests(nodes):
        assert len(done) + len(requests) < 5000, "the gate asks for ever"
        for request in requests:
            done.append(request)
            name = request.case.partition("test_x.py::test_")[2].partition("[")[0]
            if request.kind == "run":
                gate.add(request.case, new(name, len(done)))
            elif request.kind == "anchor_pair":
                gate.add_anchor_pair(request.case, anchor=anchor(name, len(done)), new=new(name, len(done)))
            else:
                gate.add_pair(request.case, base=base(name, len(done)), new=new(name, len(done)))
    return done


def jitter(number):
    """A few tenths of a per cent that differ from run to run, the same in every test run."""
    return WOBBLE[number % len(WOBBLE)]


def judged(change, *, settings=None, base=0.0, anchor=0.0, given=None, **run_changes):
    """Verdict and requests of one case: new runs are slower by ``change``, those of base and anchor by theirs."""
    gate = Gate([given or gated()], settings or GateSettings())

    def new(name, number):
        return run_of(change + jitter(number), number=number, **run_changes)

    gate.add(node_of(), new("a", 0))
    done = settle(
        gate,
        new,
        base=lambda name, number: run_of(base + jitter(number + 3), number=number),
        anchor=lambda name, number: run_of(anchor + jitter(number + 5), number=number),
    )
    return gate.verdict(node_of()), done


def settled_suite(count, stored, new, *, settings=None, base=None, anchor=None, **given):
    """Return the gate of ``count`` settled cases n0, n1 and so on, and the requests that were carried out.

    ``stored`` is wobble -> runs; ``new``, ``base`` and ``anchor`` are (name, number) -> run.
    """
    wobbles = {f"n{index}": WOBBLE[index % 8 :] + WOBBLE[: index % 8] for index in range(count)}  # not all alike
    cases = [gated(name, stored=stored(own), **given) for name, own in wobbles.items()]
    gate = Gate(cases, settings or GateSettings())
    for number, name in enumerate(wobbles):
        gate.add(node_of(name), new(name, 5 * number))
    return gate, settle(gate, new, base=base, anchor=anchor)


METRICS = {
    "latency_us": MetricMeaning(unit="us", better="lower"),
    "busbw_gb_per_s": MetricMeaning(unit="GB/s", better="higher"),
    "latency_p99_us": MetricMeaning(unit="us", better="lower"),
    "peak_memory_gib": MetricMeaning(unit="GiB", better="lower"),
    "bubble_ratio": MetricMeaning(unit="ratio", better="lower"),
    "sent_bytes": MetricMeaning(unit="bytes", better="lower"),
    "work_flops": MetricMeaning(unit="FLOPs", better="neither"),
    "own_score": MetricMeaning(unit="points", better="higher"),
}
