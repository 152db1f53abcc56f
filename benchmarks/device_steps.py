"""The steps of benchmarks/device_session.py, each run in a process of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.device_bench import Bench, figures, impossible, opened, outlived, record, told
from benchmarks.device_session import GATE_CASES, PAIRS, ROOT, SUSTAIN_S, Outcome
from perfsuite.base.errors import PerfsuiteError
from perfsuite.record.verdict import GateSettings
from perfsuite.record.workload import FunctionWorkload
from perfsuite.workloads.collective import AllReduce
from perfsuite.workloads.kernel_launch import KernelLaunch
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import HostDeviceCopy, MemoryCopy, MemoryTriad
from perfsuite.workloads.training.largest_batch import LargestBatch
from perfsuite.workloads.training.train_step import TrainStep

MIB = 1 << 20
RATIO = (0.98, 1.02)
"""What the suite's time of a product may be over that of a bare loop of events."""
MULTI_RANK_NCCL = (2, 30)
"""NCCL_MULTI_RANK_GPU_ENABLE is known from this version on."""
KEPT_SPEED = 0.9
"""Of the first fifth of a sustained run, what its last must reach."""
Step = Callable[[Bench], Outcome]


# -- what runs on the ranks --------------------------------------------------------------------------------------


def bare_product(rank, *, side=0, dtype="fp32", warmup=1, iterations=1, rounds=10):
    """The product of :class:`Matmul` in a loop of events, as a user would write it, as long and as warm as the suite's.

    A device that comes from idle runs above the clock that its power cap leaves it after half a second.
    """
    import torch

    a, b = (torch.randn(side, side, device=rank.device).to(rank.dtype(dtype)) for _ in range(2))
    out = torch.empty_like(a)
    device: Any = torch.get_device_module(rank.device)

    def loop():
        times_s = []
        for _ in range(warmup):
            torch.mm(a, b, out=out)
        for _ in range(rounds):
            start, end = (device.Event(enable_timing=True) for _ in range(2))
            device.synchronize()
            start.record()
            for _ in range(iterations):
                torch.mm(a, b, out=out)
            end.record()
            end.synchronize()
            times_s.append(start.elapsed_time(end) * 1e-3 / iterations)
        rank.record("bare_s", statistics.median(times_s))

    return loop


def faulty(rank):
    """A row that is not there: an assertion on the device, after which its process can use it no more."""
    import torch

    table, row = torch.ones(4, 2, device=rank.device), torch.tensor([4], device=rank.device)

    def step():
        torch.nn.functional.embedding(row, table)
        torch.get_device_module(rank.device).synchronize()

    return step


def killed(rank):
    """The process of the rank is killed, as by the kernel's out-of-memory killer."""
    import signal

    return lambda: os.kill(os.getpid(), signal.SIGKILL)


# -- the steps ---------------------------------------------------------------------------------------------------


def environment(bench: Bench) -> Outcome:
    """What this machine is, and whether torch can use it."""
    devices = [
        f"{device.reported_name or 'unnamed'} ({device.link or 'link unknown'})" for device in bench.machine.devices
    ]
    worker = bench.session.driver.environment()
    lines = [
        f"{bench.machine.model.title}, fingerprint {bench.session.fingerprint}",
        f"devices: {', '.join(devices) or 'none'}",
        *(f"{name}: {value}" for name, value in bench.machine.family.software().items()),
        *(f"{name}: {value}" for name, value in sorted(worker.items())),
    ]
    return Outcome(passed=bool(devices), lines=tuple(lines))


def matmul(bench: Bench) -> Outcome:
    """Products by dtype: the suite over a bare loop of events, and the share of the peak."""
    side, lines, passed = (64 if bench.small else 8192), [], True
    for dtype in ("fp32", "tf32", "bf16", "fp16"):
        if not bench.machine.natively(dtype):
            lines.append(f"{dtype}: not native, left out")
            continue
        ratios, result = [], bench.run(Matmul(m=side, k=side, n=side, dtype=dtype))
        for _ in range(PAIRS):
            suite = result.measurement
            assert suite is not None
            arguments = {"side": side, "dtype": dtype, "iterations": suite.iterations}
            arguments |= {"warmup": suite.warmup_iterations, "rounds": len(suite.times_s)}
            bare = bench.run(FunctionWorkload(function=bare_product, arguments=arguments), smoke=True)
            ratios.append(result.median_s / record(bare, "bare_s"))
            result = bench.run(Matmul(m=side, k=side, n=side, dtype=dtype))
        ratio = statistics.median(ratios)
        right = RATIO[0] <= ratio <= RATIO[1]
        passed &= right and not impossible(result)
        lines.append(f"{dtype} {side}x{side}x{side}: {told(result, 'tflops')}; suite over bare loop {ratio:.4f}")
    return Outcome(passed=passed, lines=tuple(lines))


def sustained(bench: Bench) -> Outcome:
    """A product for 15 s: does the device keep its speed, and what holds it down."""
    side, sustain_s = (256, 0.002) if bench.small else (8192, SUSTAIN_S)
    result = bench.run(Matmul(m=side, k=side, n=side, dtype="bf16"), sustain_s=sustain_s)
    assert result.measurement is not None
    times_s = result.measurement.times_s
    fifth = max(1, len(times_s) // 5)
    kept = statistics.median(times_s[:fifth]) / statistics.median(times_s[-fifth:])
    lines = [f"{told(result, 'tflops')} over {len(times_s)} samples; the last fifth at {kept:.3f} of the first's speed"]
    looks = result.measurement.looks
    for name, unit in (("clock_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "degrees C")):
        values = [value for look in looks if (value := getattr(look, name)) is not None]
        lines.append(f"{name}: {min(values):g} to {max(values):g} {unit}" if values else f"{name}: unknown")
    held = sorted({reason for look in looks for reason in look.throttle or ()})
    lines.append(f"held down by: {', '.join(held) or 'nothing that is known'}")
    return Outcome(passed=kept >= KEPT_SPEED, lines=tuple(lines))


def memory(bench: Bench) -> Outcome:
    """Bandwidth of the device's memory."""
    size = 64 * MIB if bench.small else 1024 * MIB
    return figures(bench, [(kind(buffer_bytes=size), "gb_per_s") for kind in (MemoryCopy, MemoryTriad)])


def host_link(bench: Bench) -> Outcome:
    """Bandwidth between host and device, both ways."""
    size = 16 * MIB if bench.small else 1024 * MIB
    directions = ("host_to_device", "device_to_host")
    cases = [
        (HostDeviceCopy(buffer_bytes=size, direction=direction, pinned=pinned), "gb_per_s")
        for direction in directions
        for pinned in (True, False)
    ]
    return figures(bench, cases)


def launch(bench: Bench) -> Outcome:
    """What it costs to start a kernel."""
    result = bench.run(KernelLaunch())
    return Outcome(passed=True, lines=tuple(f"{metric.name}: {told(result, metric.name)}" for metric in result.metrics))


def training(bench: Bench) -> Outcome:
    """A training step, and its memory against what its parameters take by count."""
    workload = TrainStep(model="gpt2-tiny" if bench.small else "gpt2", micro_batch_size=2, builds=("memory",))
    result = bench.run(workload)
    weights_gib = 4 * workload.find_model().parameters / 2**30
    found = {name: result.metric(f"{name}_gib").value for name in ("weights", "gradients", "optimizer")}
    steps = {"weights": 1, "gradients": 1, "optimizer": 2}
    # Adam keeps a step count per parameter beside its two moments: some hundreds of bytes at most.
    exact = all(value is not None and abs(value - steps[name] * weights_gib) < 1e-5 for name, value in found.items())
    assert result.measurement is not None
    lines = [
        f"{workload}: {result.median_s * 1e3:.3f} ms, {told(result, 'mfu_percent')}",
        *(f"{name}: {value} GiB, {steps[name] * weights_gib} by count" for name, value in found.items()),
        *(f"{metric.name}: {metric.value}" for metric in result.metrics if metric.name.startswith("peak")),
        *(f"build {purpose} failed: {why}" for purpose, why in result.measurement.failed_builds.items()),
    ]
    return Outcome(passed=exact and not impossible(result) and not result.measurement.failed_builds, lines=tuple(lines))


def largest_batch(bench: Bench) -> Outcome:
    """The largest local batch, by running out of the device's memory, and whether the device serves the next case."""
    # Simulated devices have as much memory as real ones, and hosts that simulate them have not.
    most = {"most": 16} if bench.small else {}
    model = "gpt2-tiny" if bench.small else "gpt2"
    result = bench.run(LargestBatch(model=model, **most))
    after = bench.run(Matmul(m=256, k=256, n=256), smoke=True)
    found = told(result, "largest_local_batch_samples") if result.outcome == "measured" else result.detail
    lines = [found, f"a product afterwards: {after.outcome}"]
    return Outcome(passed=result.outcome == "measured" and after.outcome == "smoke", lines=tuple(lines))


def fault(bench: Bench) -> Outcome:
    """A kernel that breaks its device fails its case and no other."""
    return outlived(bench, faulty, "")


def killed_rank(bench: Bench) -> Outcome:
    """A rank that is killed fails its case, by name, and no other."""
    return outlived(bench, killed, "rank 0")


def too_old(nccl: str) -> bool:
    """Whether this version of NCCL refuses two ranks on one device; another library, or none, is not asked.

    >>> [too_old(version) for version in ("2.29.7", "2.30.7", "")]
    [True, False, False]
    """
    return bool(nccl) and tuple(map(int, re.findall(r"\d+", nccl)[:2])) < MULTI_RANK_NCCL


def shared_device(bench: Bench) -> Outcome:
    """Two ranks on the one device: an all-reduce and a training step."""
    size = MIB if bench.small else 64 * MIB
    model = "gpt2-tiny" if bench.small else "gpt2"
    library = str(bench.session.driver.environment().get("nccl", ""))
    if too_old(library) and not any(word.startswith("--perf-backend=gloo") for word in bench.arguments):
        needs = ".".join(map(str, MULTI_RANK_NCCL))
        why = f"two ranks on one device need NCCL {needs} or newer, this one is {library}; pass --backend gloo"
        return Outcome(passed=False, lines=(why,))
    result = bench.run(AllReduce(message_bytes=size), 2)
    assert result.measurement is not None
    lines = [f"all-reduce of {size} bytes over {result.measurement.backend}: {told(result, 'busbw_gb_per_s')}"]
    step = bench.run(TrainStep(model=model, strategy="ddp", micro_batch_size=1), 2)
    lines.append(f"DDP step of {model}: {step.median_s * 1e3:.3f} ms")
    return Outcome(passed=True, lines=tuple(lines))


def gate_cases(bench: Bench) -> list[str]:
    """Node ids of the step ``gate``, GATE_CASES of full size: small ones time the launch.

    By id: a word for -k is in the name of a file too, and selects all of it.
    """
    name = bench.machine.name
    dtype = next(dtype for dtype in ("bf16", "fp16", "fp32") if bench.machine.natively(dtype))
    product, buffer = ("256x256x256", "1MiB") if bench.small else ("8192x8192x8192", "1GiB")
    ids = [
        f"test_perf/test_matmul.py::test_matmul[{name}-{product}-{dtype}]",
        *(f"test_perf/test_memory_bandwidth.py::test_memory_{kind}[{name}-{buffer}]" for kind in ("copy", "triad")),
    ]
    assert len(ids) == GATE_CASES
    return ids


def gate(bench: Bench) -> Outcome:
    """A/A: the same suite stored and judged against itself must not be called slower."""
    some = ["--perf-scale=full"]
    if bench.small:
        some = ["--perf-scale=small", "--benchmark-max-time=0.001"]
    folders = [f"perf_{kind}baselines={bench.state / f'{kind}baselines'}" for kind in ("", "simulated_")]
    command = [
        *(sys.executable, "-m", "pytest", *gate_cases(bench), *some, "-q", "-p", "no:cacheprovider", *bench.arguments),
        *(word for folder in folders for word in ("-o", folder)),
    ]
    lines, codes = [], []
    for words in (["--perf-update=append", f"--perf-runs={GateSettings().min_stored}"], ["--perf-gate"]):
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        codes.append(done.returncode)
        said = (done.stdout + done.stderr).splitlines()
        told = [line for line in said if re.search(r"\bgated\b|\d passed|\d failed|^FAILED|^ERROR", line)]
        lines.append(f"{words[0]}: exit code {done.returncode}; {'; '.join(told[-3:])}")
    return Outcome(passed=codes == [0, 0], lines=tuple(lines))


STEPS: Mapping[str, Step] = {
    "environment": environment,
    "matmul": matmul,
    "sustained": sustained,
    "memory": memory,
    "host-link": host_link,
    "launch": launch,
    "training": training,
    "largest-batch": largest_batch,
    "fault": fault,
    "killed-rank": killed_rank,
    "shared-device": shared_device,
    "gate": gate,
}


def main() -> None:
    """Run one step and write its outcome, as JSON, to the descriptor ``--answer``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--platform")
    parser.add_argument("--backend")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--answer", type=int, default=1)
    given = parser.parse_args()
    try:
        with opened(given.platform, given.backend, given.state) as bench:
            outcome = STEPS[given.step](bench)
    except PerfsuiteError as error:
        outcome = Outcome(passed=False, lines=tuple(str(error).splitlines()[:4]))
    with os.fdopen(given.answer, "w") as answer:
        json.dump(dataclasses.asdict(outcome), answer)
