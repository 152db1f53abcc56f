"""Journals of nodes of a fleet, without running anything; a test says only what is wrong with which node."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfsuite.cli.main import main
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import ClockFacts, Peak, Peaks, Work
from perfsuite.record.run import Header, RunEnd
from perfsuite.record.step import Identity
from test_correctness.helpers.measurements import measurement_of, rank_facts, result_of

GIB = 1 << 30
PEAKS = Peaks(
    tflops={"bf16": Peak(value=989.0, unit="TFLOPS", source="data sheet")},
    memory_bandwidth=Peak(value=4800.0, unit="GB/s", source="data sheet"),
    link=Peak(value=450.0, unit="GB/s", source="data sheet"),
    host_link=Peak(value=63.0, unit="GB/s", source="data sheet"),
)
MATMUL, ALL_REDUCE = "test_matmul_everywhere", "test_all_reduce"
PRODUCT = Work(flops={"exact": 2.0 * 8192**3 * 8}, dtype="bf16")
TRIAD = Work(bytes_moved=3.0 * GIB, memory_path="device")
COPY = Work(bytes_moved=float(GIB), memory_path="host_to_device")
SUM = Work(collective="all_reduce", message_bytes=float(GIB), dtype="fp32")
SIDES, BUFFER = {"m": 8192, "k": 8192, "n": 8192, "dtype": "bf16"}, {"buffer_bytes": GIB}
BUS = ("latency_us", "algbw_gb_per_s", "busbw_gb_per_s")
CASES: Mapping[str, tuple[str, dict[str, Any], Work, float, float, tuple[str, ...]]] = {
    MATMUL: ("matmul:Matmul", SIDES, PRODUCT, 1.4e-3, 0.01, ("tflops",)),
    "test_memory_everywhere": ("memory_bandwidth:MemoryTriad", BUFFER, TRIAD, 8e-4, 0.003, ("gb_per_s",)),
    "test_host_link_everywhere": ("memory_bandwidth:HostDeviceCopy", BUFFER, COPY, 2e-2, 0.003, ("gb_per_s",)),
    ALL_REDUCE: ("collective:AllReduce", {"message_bytes": GIB, "dtype": "fp32"}, SUM, 1.87 / 463.0, 0.004, BUS),
}
"""By name: workload, parameters, work, seconds, healthy spread and metrics."""

Slower = Callable[[str, int], float]
"""Relative slowdown of a case (a key of CASES) on a device; -1 for the node's own collective."""


def case_of(name: str, devices: int = 8, platform: str = "h200") -> str:
    """The node id of a case."""
    return f"test_perf/test_fleet.py::{name}[{platform}-ws{devices}]"


def write_node(
    folder: Path,
    name: str,
    *,
    slower: Slower = lambda case, device: 0.0,
    devices: int = 8,
    run: int = 0,
    ends: bool = True,
    cases: Mapping[str, Any] = CASES,
    extra_cases: int = 0,
    samples: int = 20,
    header: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    uuids: bool = True,
    platform: str = "h200",
    file: str = "",
    failed: Mapping[str, str] | None = None,
    identity: Callable[[int], Identity] = lambda device: Identity(),
) -> Path:
    """Write the journal of one run of one node, and return its path."""
    node_draw = random.Random(f"node {name}")
    draw = random.Random(f"{name} {run}")
    path = folder / (file or f"{name}-{run}.jsonl" if run or file else f"{name}.jsonl")
    facts = {"host": name, "boot": f"boot of {name}", "started_at": f"2026-11-26T0{run}", **(header or {})}
    writer = JournalWriter(path, Header(session=f"{name}-{run}", fingerprint="h200-8x-1", platform=platform, **facts))
    shown = {
        "hostname": name,
        "devices": [f"NVIDIA H200, 139.8 GiB{f', GPU-{name}-{device}' if uuids else ''}" for device in range(devices)],
        "power_caps": ["700.00 W"] * devices,
        "driver": {"driver": "570.86"},
        "packages": {"torch": "2.9.1"},
        **(environment or {}),
    }
    own = {device: node_draw.gauss(0, 1) for device in range(devices)}
    for title, (workload, parameters, work, seconds, spread, metrics) in cases.items():
        collective = bool(work.collective)
        times = {
            device: seconds
            * math.exp(spread * own[device] + draw.gauss(0, 0.001))
            * (1 + slower(title, -1 if collective else device))
            for device in range(devices)
        }
        if collective:
            times = dict.fromkeys(times, times[0])
        for copy in range(extra_cases + 1):
            usual = {"host": name, "threads": 8, "launch_s": 1e-5}
            ranks = [
                rank_facts(device, time_s=time_s, device=f"cuda:{device}", identity=identity(device), **usual)
                for device, time_s in times.items()
            ]
            samples_s = [max(times.values()) * (1 + draw.gauss(0, 0.001)) for _ in range(samples)]
            clock = ClockFacts(name="cuda.Event", resolution_s=1e-6, cost_s=1e-6)
            given = {**parameters, **({"k": 8192 + copy} if copy and "k" in parameters else {})}
            writer.result(
                result_of(
                    measurement_of(samples_s, ranks, backend="nccl", clock=clock),
                    f"{case_of(title, devices, platform)}{copy or ''}",
                    workload=f"perfsuite.workloads.{workload}",
                    parameters=given,
                    defaults={"direction": "host_to_device", "pinned": True} if "HostDevice" in workload else {},
                    platform=platform,
                    work=work,
                    metrics=metrics,
                    peaks=PEAKS,
                    environment=shown,
                    started_at=f"2026-11-26T0{run}",
                )
            )
    for case, message in (failed or {}).items():
        writer.failure(case, message)
    if ends:
        writer.ended(RunEnd(at="2026-11-26", took_s=60.0, exit_status=0, failed=failed or {}))
    writer.close()
    return path


def fleet(folder, count=16, *, wrong=None, **changes):
    """Write ``count`` nodes; ``wrong`` gives what differs by number of the node."""
    for number in range(count):
        write_node(folder, f"gpu{number:02}", **{**changes, **(wrong or {}).get(number, {})})


def slower(title, share, *devices):
    return {"slower": lambda case, device: share if case == title and (device in devices or not devices) else 0.0}


def answer(capsys, *arguments):
    """Exit code and JSON of the command."""
    code = main(["fleet", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def standings(told, *, all_of=False):
    return {name: node["standing"] for name, node in told["nodes"].items() if all_of or node["standing"] != "pass"}
