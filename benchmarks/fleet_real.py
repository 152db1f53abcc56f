"""Are slow and absent nodes named, and nobody else?  Nodes are network namespaces of this machine, under torchrun.

    python benchmarks/fleet_real.py [--nodes 8] [--runs 5] [--rate-mbit 200]

All nodes are connected to one switch, and the rate of each link is limited.  The link of one node has 40 % of the rate
of the other links.  The ranks of another node are stopped half of the time.  One more node is expected and never
starts.  The others send messages in rounds of pairs until every two have met, and time a step on every rank.  The step
waits twenty times for a millisecond: ranks that compute would share the cores of this machine, and measure that.
perfsuite fleet reads their journal.  Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PORT = 29531


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def shape(namespace: str, device: str, rate_mbit: float) -> None:
    rule = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "64kb", "latency", "50ms"]
    subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *rule], check=True)


def address(index: int) -> str:
    return f"10.89.0.{index + 1}"


@contextlib.contextmanager
def switched(nodes: int, slow: int, rate_mbit: float) -> Iterator[list[str]]:
    """Namespaces whose devices e0 are linked to a bridge in one more; their names."""
    names = [f"node{index}x{os.getpid()}" for index in range(nodes)]
    switch = f"switch{os.getpid()}"
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for index, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "e0", "type", "veth", "peer", "name", f"p{index}", "netns", switch)
            ip("-n", name, "addr", "add", f"{address(index)}/24", "dev", "e0")
            ip("-n", name, "link", "set", "e0", "up")
            ip("-n", switch, "link", "set", f"p{index}", "master", "br0", "up")
            rate = rate_mbit * (0.4 if index == slow else 1.0)
            shape(name, "e0", rate)
            shape(switch, f"p{index}", rate)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False)


CASES = """
import time

from perfsuite.workloads.pair_rounds import PairRounds

def test_rounds(perf):
    perf(PairRounds(message_bytes=1 << 19, messages=4, rounds="all"), on={ranks})

def test_everywhere(perf):
    perf(waits, on={ranks})

def waits(rank):
    def step():
        for _ in range(20):
            time.sleep(0.001)
    return step
"""
STOPPED_S = 0.005
"""The ranks of the held node are stopped for so long, and run for as long, in turn."""
LOOKED_S = 1.0
"""Time after which it is looked for processes that have started."""


def tree_of(process: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found


def hold(process: subprocess.Popen[str], ended: threading.Event) -> None:
    """Stop all processes of a node half of the time until ``ended`` is set."""
    looked_s, tree = 0.0, [process.pid]
    while not ended.is_set() and process.poll() is None:
        if time.monotonic() - looked_s > LOOKED_S:
            looked_s, tree = time.monotonic(), tree_of(process.pid)
        for sign in (signal.SIGSTOP, signal.SIGCONT):
            for one in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, sign)
            time.sleep(STOPPED_S)


def launch(folder: Path, names: list[str], journal: Path, held: int) -> None:
    """Run the cases on these nodes under torchrun; the ranks of one node are stopped half of the time."""
    test = folder / "test_cases.py"
    test.write_text(CASES.format(ranks=len(names)))
    hosts = folder / "hosts"
    lines = [f"{address(index)} {name}" for index, name in enumerate(names)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    environ = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "e0",
        "PERFSUITE_KEY": "truth of a real fleet",
        "OMP_NUM_THREADS": "1",
    }
    suite = ["-m", "pytest", str(test), f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q"]
    suite += ["--benchmark-min-rounds=3", f"--perf-journal={journal}"]
    running = []
    for index, name in enumerate(names):
        enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c"]
        become = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(names)}", "--nproc-per-node=1"]
        meet = [f"--node-rank={index}", f"--master-addr={address(0)}", f"--master-port={PORT}"]
        command = [*enter, become, name, str(hosts), *torchrun, *meet, *suite, "--perf-timeout=200s"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append(process)
    ended = threading.Event()
    holding = threading.Thread(target=hold, args=(running[held], ended))
    holding.start()
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        ended.set()
        holding.join()
        for process in running:
            process.terminate()
    if not journal.exists():
        sys.exit(said[0])


def one_run(nodes: int, number: int, rate_mbit: float) -> tuple[dict[str, str], dict[str, str]]:
    """The standings that are expected and those that were found, of the nodes that do not pass."""
    slow = 1 + number % (nodes - 2)
    held = 1 + (number + 3) % (nodes - 2)
    with tempfile.TemporaryDirectory() as made, switched(nodes, slow, rate_mbit) as names:
        folder = Path(made)
        journal, expected = folder / "launch.jsonl", folder / "nodes.txt"
        expected.write_text("".join(f"{name}\n" for name in names))
        launch(folder, names[:-1], journal, held)
        command = [sys.executable, "-m", "perfsuite", "fleet", str(journal), "--nodes", str(expected), "--json"]
        told = json.loads(subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout)
    found = {name: node["standing"] for name, node in told["nodes"].items() if node["standing"] != "pass"}
    for name, node in told["nodes"].items():
        if node["standing"] == "incomplete":
            found[name] = f"incomplete: {node['reason']}"
    found |= {" - ".join(link["ends"]): "slow link" for link in told["slow_links"]}
    return {names[slow]: "slow", names[held]: "slow", names[-1]: "absent"}, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    options = parser.parse_args()
    right = 0
    for run in range(options.runs):
        expected, found = one_run(options.nodes, run, options.rate_mbit)
        right += found == expected
        print(f"run {run + 1}: expected {expected}; named: {found}", flush=True)
    print(f"{right} of {options.runs} runs name the three nodes and nobody else")


if __name__ == "__main__":
    main()
