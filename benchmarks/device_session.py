"""One machine with one accelerator, through everything of perfsuite that can be validated there in 30 minutes.

    python benchmarks/device_session.py [--platform h100] [--backend gloo] [--state DIR] [--page docs/my-device.md]

Every step runs in a process of its own with a limit, is PASS or FAIL, and is kept in the state folder when it ends: the
same command goes on where it was stopped, and repeats what failed.  Prints one Markdown page, as far as it got.

On the simulated device: ``PERFSUITE_FAMILIES=simmusa=simmusa.family:SimMusa python benchmarks/device_session.py
--platform simmusa``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PAIRS = 3
"""Comparisons of a product with a bare loop, for each dtype."""
SUSTAIN_S = 15.0
GATE_CASES = 3
"""A product, a copy and a triad."""
GATE_RUNS = 8
"""Fresh runs of each: as many as the gate needs stored, one that is judged, and two for a suspicion."""
_PROCESS_S = 5.0
"""A process that imports torch, opens a device and makes a communicator: 3 to 5 s by estimate, none was timed."""
_RUN_S = 4.0
"""A build with two checks of 8192 x 8192 in fp64 on the host, and its samples: 2 to 4 s by estimate."""
_MARGIN = 2.0
_LEAST_S = 90.0
"""The first import of torch from a cold disk."""


def _limit(processes: int, runs: int, beside_s: float = 0.0) -> float:
    """Return the limit of a step that starts so many processes and runs so many builds."""
    return max(_LEAST_S, _MARGIN * (processes * _PROCESS_S + runs * _RUN_S + beside_s))


LIMITS_S: Mapping[str, float] = {
    "environment": _limit(1, 0),
    "matmul": _limit(1, 4 * (1 + 2 * PAIRS)),  # of four dtypes
    "sustained": _limit(1, 1, SUSTAIN_S),
    "memory": _limit(1, 2),
    "host-link": _limit(1, 4),
    "launch": _limit(1, 1),
    "training": _limit(1, 3, 40),  # gpt2 is built on the host
    "largest-batch": _limit(8, 20),  # 13 memory builds and up to 5 timed ones; each that does not fit costs a process
    "fault": _limit(3, 2),
    "killed-rank": _limit(3, 2),
    "shared-device": _limit(4, 2, 20),
    "gate": _limit(GATE_CASES * GATE_RUNS, GATE_CASES * GATE_RUNS),
}
"""Seconds that each step may take, in the order in which they run: half an hour where all of them are used up."""
_SAID_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step found."""

    passed: bool
    lines: tuple[str, ...]
    """For the page: figures, or what went wrong."""
    seconds: float = 0.0


def run_step(name: str, arguments: list[str], limit_s: float) -> Outcome:
    """The outcome of a step in a process of its own; one that is not over within its limit is ended and has failed."""
    began = time.monotonic()
    read, write = os.pipe()
    # Not as a program: what its steps send to the ranks belongs to a module that a rank can import.
    program = "from benchmarks.device_steps import main; main()"
    command = [sys.executable, "-c", program, name, *arguments, f"--answer={write}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        pass_fds=[write],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.close(write)
    try:
        said, _ = process.communicate(timeout=limit_s)
        why = f"ended with exit code {process.returncode} and no answer"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the driver ends its ranks
        try:
            said, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        why = f"not over within its limit of {limit_s:g} s"
    with os.fdopen(read) as answers:
        answer = answers.read()
    seconds = time.monotonic() - began
    if not answer:
        return Outcome(passed=False, lines=(why, *said.splitlines()[-_SAID_LINES:]), seconds=seconds)
    found = json.loads(answer)
    return Outcome(passed=found["passed"], lines=tuple(found["lines"]), seconds=seconds)


def kept(state: Path) -> dict[str, Outcome]:
    """Outcomes of an earlier run, by step."""
    found = {}
    for name in LIMITS_S:
        file = state / f"{name}.json"
        if file.exists():
            written = json.loads(file.read_text(encoding="utf-8"))
            found[name] = Outcome(**{**written, "lines": tuple(written["lines"])})
    return found


def keep(state: Path, name: str, outcome: Outcome) -> None:
    """Write the outcome of a step, whole or not at all."""
    file = state / f"{name}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def page(outcomes: Mapping[str, Outcome], command: str) -> str:
    """The page: a line per step, then what each found."""
    passed = sum(outcome.passed for outcome in outcomes.values())
    total_s = sum(outcome.seconds for outcome in outcomes.values())
    lines = [
        "# One accelerator, validated step by step",
        "",
        f"`{command}`: {passed} of {len(LIMITS_S)} steps passed, {len(outcomes)} run, {total_s:.0f} s together.",
        "",
        "| step | verdict | took | limit |",
        "| --- | --- | --- | --- |",
    ]
    for name, limit_s in LIMITS_S.items():
        outcome = outcomes.get(name)
        verdict = "not run" if outcome is None else "PASS" if outcome.passed else "FAIL"
        took = "" if outcome is None else f"{outcome.seconds:.0f} s"
        lines.append(f"| {name} | {verdict} | {took} | {limit_s:g} s |")
    for name, outcome in outcomes.items():
        lines += [
            "",
            f"## {name}: {'PASS' if outcome.passed else 'FAIL'}",
            "",
            *(f"- {line}" for line in outcome.lines),
        ]
    return "\n".join(lines) + "\n"


def go_through(names: Iterable[str], state: Path, arguments: list[str]) -> dict[str, Outcome]:
    """Run the steps that have not passed yet; the outcomes of all that were run, in order."""
    state.mkdir(parents=True, exist_ok=True)
    outcomes = kept(state)
    for name in names:
        if name in outcomes and outcomes[name].passed:
            print(f"{name}: passed before", flush=True)
            continue
        print(f"{name}: at most {LIMITS_S[name]:g} s ...", end=" ", flush=True)
        outcomes[name] = run_step(name, arguments, LIMITS_S[name])
        keep(state, name, outcomes[name])
        print(f"{'PASS' if outcomes[name].passed else 'FAIL'} in {outcomes[name].seconds:.0f} s", flush=True)
    return {name: outcomes[name] for name in LIMITS_S if name in outcomes}


def main() -> int:
    """Exit code 0 where every step passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", help="as --perf-platform; default: the accelerator found")
    parser.add_argument("--backend", help="as --perf-backend, for several ranks on the one device")
    parser.add_argument(
        "--state", type=Path, default=Path(".perfsuite/device-session"), help="folder of what was found"
    )
    parser.add_argument("--page", type=Path, help="file that the page is written to as well")
    parser.add_argument("--steps", default=",".join(LIMITS_S), help="some of them: %(default)s")
    given = parser.parse_args()
    names = given.steps.split(",")
    if unknown := [name for name in names if name not in LIMITS_S]:
        parser.error(f"--steps: {unknown[0]!r} is no step; choose from {', '.join(LIMITS_S)}")
    state = given.state.resolve()
    options = {"--platform": given.platform, "--backend": given.backend}
    arguments = [f"--state={state}", *(f"{name}={value}" for name, value in options.items() if value)]
    outcomes = go_through(names, state, arguments)
    written = page(outcomes, shlex.join(["python", *sys.argv]))
    print("\n" + written)
    if given.page:
        given.page.write_text(written, encoding="utf-8")
    return 0 if all(outcomes[name].passed for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
