"""CPU seconds of reading a large journal and of its screen.

    python benchmarks/journal_read.py [--cases 10000] [--samples 200] [--ranks 2] [--repeats 3]

The aim is 2 s or less for 10,000 cases of 200 samples.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from time import process_time

from perfsuite.metrics import derive, read_run
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import ClockFacts, Measurement, Peak, Peaks, RankFacts, Result, Work
from perfsuite.record.run import Header
from perfsuite.record.step import SpanTotal
from perfsuite.reports.notable import notable
from perfsuite.reports.screen import screen

PEAK = Peak(value=400.0, unit="TFLOPS", source="a data sheet")


def result(index: int, samples: int, ranks: int) -> Result:
    """A case of a matrix product with figures that differ from case to case."""
    draw = random.Random(index)
    times_s = tuple(round(draw.gauss(1e-3, 1e-5), 12) for _ in range(samples))  # as the timer rounds
    measurement = Measurement(
        times_s=times_s,
        involuntary_switches=tuple(int(draw.random() < 0.02) for _ in range(samples)),
        iterations=10,
        warmup_iterations=3,
        warmup_steady=True,
        aligned=True,
        clock=ClockFacts(name="cuda.Event", resolution_s=1e-6, cost_s=1e-6),
        ranks=tuple(
            RankFacts(
                rank=rank, host="node1", device=f"cuda:{rank}", threads=8, cores=None, median_s=draw.gauss(1e-3, 1e-5),
                min_s=9e-4, max_s=2e-3, cpu_share=1.0, max_rss_bytes=1 << 30, launch_s=1e-5,
            )
            for rank in range(ranks)
        ),
        backend="nccl",
        process="reused",
        transport="local",
        spans=(SpanTotal(name="product", time_s=9e-4, count=1.0, slowest_rank=0, slowest_s=9e-4),),
    )  # fmt: skip
    work = Work(flops={"exact": 2.0e11}, dtype="bf16", bytes_moved=3.0e6, memory_path="device")
    peaks = Peaks(tflops={"bf16": PEAK})
    return Result(
        case=f"test_perf/test_matmul.py::test_matmul[h100-ws{ranks}-{index}]",
        workload="perfsuite.workloads.matmul:Matmul",
        parameters={"m": 4096, "n": 4096, "k": 4096 + index, "dtype": "bf16"},
        platform="h100",
        world_size=ranks,
        outcome="measured",
        work=work,
        metrics=derive(("latency_us", "tflops", "mfu_percent"), work=work, measurement=measurement, peaks=peaks),
        measurement=measurement,
        fingerprint="h100-8x",
        environment={"torch": "2.13.0"},
        session="s1",
        took_s=1.5,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        writer = JournalWriter(path, Header(session="s1", fingerprint="h100-8x", platform="h100", started_at=""))
        for index in range(options.cases):
            writer.result(result(index, options.samples, options.ranks))
        writer.close()
        took_s = []
        for _ in range(options.repeats):
            start_s = process_time()
            run = read_run(path)
            read_s = process_time()
            screen(run, notable(run), width=100)
            took_s.append((read_s - start_s, process_time() - read_s))
            del run  # or the next one is read beside it
        size_mb = path.stat().st_size / 1e6
        read, shown = zip(*took_s, strict=True)
        print(f"{options.cases} cases, {size_mb:.1f} MB: read in {min(read):.2f} to {max(read):.2f} s CPU", end=", ")
        print(f"screen in {min(shown):.2f} to {max(shown):.2f} s CPU")


if __name__ == "__main__":
    main()
