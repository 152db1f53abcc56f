"""Time and memory of verdicts on many cases with full baselines, and of reading and writing a baseline file.

    python benchmarks/gate_speed.py                 # 10,000 cases x 12 runs
    python benchmarks/gate_speed.py --cases 200 --runs 8

Each case has one new run.  The benchmark fits the stored runs, screens the new run and gives the verdict.  Times are
CPU seconds of the single thread, so other programs hardly change them.  Memory is the largest resident set of this
process with all runs.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware
from perfsuite.baselines.document import dumps
from perfsuite.baselines.runs import QUANTILES, CaseIdentity, MetricMeaning, RunSummary, rounded
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import GateSettings

ENVIRONMENT = {"kernel": "6.1.0", "packages": {"torch": "2.13.0"}, "governor": "performance"}
METRICS = {
    "latency_us": MetricMeaning(unit="us", better="lower"),
    "busbw_gb_per_s": MetricMeaning(unit="GB/s", better="higher"),
}
HARDWARE = Hardware(platform="cpu", fingerprint="cpu-example", key={"cpu_model": "Example", "cores": 8})


def run_of(rng: random.Random, middle_s: float, session: int) -> RunSummary:
    median_s = middle_s * math.exp(rng.gauss(0, 0.01))
    return RunSummary(
        session=f"20260101T{session:02d}0000.000000Z-1234",
        time=f"2026-01-{session + 1:02d}T02:00:00+00:00",
        quantiles_s=tuple(rounded(median_s * (0.96 + 0.08 * share), 4) for share in QUANTILES),
        location=round(math.log(median_s), 5),
        mean=round(math.log(median_s) + 0.02, 5),
        clean_mean=round(math.log(median_s) + 0.01, 5),
        clean_p95=round(math.log(median_s) + rng.gauss(0.05, 0.01), 5),
        yardstick=round(math.log(1e-3) + rng.gauss(0, 0.01), 5),
        samples=40,
        clean=36,
        metrics={"latency_us": rounded(median_s * 1e6, 6), "busbw_gb_per_s": rounded(1e-3 / median_s, 6)},
        commit="6861899",
        environment=ENVIRONMENT,
    )


def baseline_of(cases: int, runs: int, seed: int = 1) -> Baseline:
    rng = random.Random(seed)
    entries = {}
    for index in range(cases):
        node = f"test_perf/test_collectives.py::test_kind_{index % 50}[cpu-ws2-{index}KiB-fp32]"
        parameters = {"message_bytes": 1024 * (index + 1), "dtype": "fp32"}
        case = CaseIdentity(
            node=node, world_size=2, backend="gloo", parameters=parameters, workload="m:AllReduce", metrics=METRICS
        )
        middle_s = 1e-3 * (1 + index % 97)
        entries[case.key] = Entry(case=case, runs=tuple(run_of(rng, middle_s, number) for number in range(runs)))
    return Baseline(hardware=HARDWARE, entries=entries)


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=12)
    options = parser.parse_args()
    baseline = baseline_of(options.cases, options.runs)
    rng = random.Random(2)
    new = {node: run_of(rng, 1e-3 * (1 + index % 97), 28) for index, (node, *_) in enumerate(baseline.entries)}
    print(f"{options.cases} cases x {options.runs} runs; before the verdicts {resident_mib():.0f} MiB")

    began = time.process_time()
    gate = Gate(
        [GateCase(case=entry.case, specs=REGISTRY, stored=entry.runs) for entry in baseline.entries.values()],
        GateSettings(),
    )
    for node, run in new.items():
        gate.add(node, run)
    asked = gate.next_requests()
    verdicts = gate.verdicts()
    took_s = time.process_time() - began
    counts = {
        name: sum(each.name == name for each in verdicts.values()) for name in {v.name for v in verdicts.values()}
    }
    print(f"verdicts: {took_s:.2f} CPU s, {resident_mib():.0f} MiB; {len(asked)} runs asked for; {counts}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        began = time.process_time()
        path.write_text(dumps(baseline))
        wrote_s = time.process_time() - began
        began = time.process_time()
        found = store.read(path)
        read_s = time.process_time() - began
        size_kib = path.stat().st_size / 1024
    assert found == baseline
    print(f"file: {size_kib:.0f} KiB; written in {wrote_s:.2f}, read and checked in {read_s:.2f} CPU s")


if __name__ == "__main__":
    main()
