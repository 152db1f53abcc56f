"""Runs a fixed selection of cases with the Python and torch of this environment; ``tox -e versions`` runs it in four.

    python -m tools.promised_versions [--deepspeed] [--newest]

Every case is built, checked and run once, then two of them are measured.  Exit code 1 lists the cases that did not
pass.  A case that was skipped did not pass: an environment in which nothing runs must not look like one that holds.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
CORE = (
    "test_matmul.py::test_matmul[cpu-256x256x256-fp32]",
    "test_memory_bandwidth.py::test_memory_triad[cpu-1MiB]",
    "test_collectives.py::test_all_reduce[cpu-ws2-1KiB-fp32]",
    "test_collectives.py::test_all_to_all_uneven[cpu-ws2-1KiB-fp32]",
    "test_pairs.py::test_pair_latency[cpu-ws4-1KiB-one]",
    "test_train_step.py::test_ddp[cpu-ws2-gpt2-tiny]",
    "test_train_step.py::test_zero_redundancy[cpu-ws2-gpt2-tiny]",
    "test_train_step.py::test_latte[cpu-ws1-latte-tiny]",
    "test_pipeline.py::test_stage_counts[cpu-pp2]",
    "test_pipeline.py::test_interleaving[cpu-pp2-v2]",
    "test_tensor_parallel.py::test_tensor_parallel[cpu-ws2-gpt2-tiny]",
    "test_long_sequences.py::test_long_sequences[cpu-256-sequence]",
    "test_experts.py::test_routing[cpu-32x16x64x128-top2]",
)
"""Hold with every torch from 2.5 on; of each family of cases one."""
NEWEST = (
    "test_pipeline.py::test_newer_schedules[cpu-pp2-zbv]",
    "test_train_step.py::test_fsdp[cpu-ws2-gpt2-tiny]",
    "test_train_step.py::test_llama2[cpu-ws2-llama2-tiny-fp32]",
    "test_experts.py::test_experts_and_dense[cpu-moe-tiny]",
)
"""torch 2.5 lacks what the first needs, and 2.5 and 2.7 cannot run FSDP on a CPU: with them these are skipped."""
DEEPSPEED = tuple(f"test_train_step.py::test_deepspeed[cpu-ws2-gpt2-tiny-zero{stage}]" for stage in range(4))
CORE_MEASURED = tuple(case for case in CORE if "all_reduce" in case or "test_ddp" in case)
DEEPSPEED_MEASURED = DEEPSPEED[2:]
PACKAGES = ("torch", "deepspeed", "numpy", "pytest", "pytest-benchmark")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where every selected case passed, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deepspeed", action="store_true", help="run the cases of DeepSpeed instead of the others")
    parser.add_argument(
        "--newest",
        action="store_true",
        help="run the cases too that only the newest torch can do",
    )
    asked = parser.parse_args(arguments)
    cases = DEEPSPEED if asked.deepspeed else CORE + NEWEST * asked.newest
    measured = DEEPSPEED_MEASURED if asked.deepspeed else CORE_MEASURED
    print(f"promised versions: {_versions()}", flush=True)
    failures = run(cases, "--benchmark-disable") + run(measured, "--benchmark-max-time=0.1", needs_metrics=True)
    for failure in failures:
        print(f"promised versions: NOT PASSED: {failure}")
    if not failures:
        print(f"promised versions: {len(cases)} run once and {len(measured)} measured, all passed: {_versions()}")
    return int(bool(failures))


def run(cases: Sequence[str], *options: str, needs_metrics: bool = False) -> list[str]:
    """Return a line for each case that did not pass, or that gave no metric where it ``needs_metrics``."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        paths = (f"test_perf/{case}" for case in cases)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *options]
        status = subprocess.run([*command, *paths], cwd=ROOT, check=False).returncode
        found = list(ElementTree.parse(junit).iter("testcase")) if junit.exists() else []
    outcomes = {f"{case.attrib['classname'].rpartition('.')[2]}.py::{case.attrib['name']}": case for case in found}
    failures = [f"{case}: {why}" for case in cases if (why := _why_not(outcomes.get(case), needs_metrics))]
    if status != 0 and not failures:
        failures = [f"pytest ended with exit code {status}"]
    return failures


def _why_not(case: ElementTree.Element | None, needs_metrics: bool) -> str:
    """Return why a case does not count as passed; empty for one that does."""
    if case is None:
        return "not run"
    problem = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
    if problem is not None:
        return f"{problem.tag}: {problem.attrib.get('message', '')}"
    if needs_metrics and case.find("properties/property") is None:
        return "passed without a metric"
    return ""


def _versions() -> str:
    said = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            said.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            said.append(f"no {package}")
    return ", ".join(said)


if __name__ == "__main__":
    sys.exit(main())
