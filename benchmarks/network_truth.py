"""Are figures of a known network true?  Two hosts that are network namespaces of this machine, under torchrun.

    python benchmarks/network_truth.py bandwidth [--rates 100 400] [--ranks-per-host 1 2] [--pairs 3]
    python benchmarks/network_truth.py delay [--delay-ms 50] [--pairs 3]

``bandwidth`` shapes both directions of the link (tc tbf), ``delay`` passes its frames through a relay that holds each
back (the kernel may have no netem).  perfsuite and a plain torchrun program of the same messages take turns.  Needs
Linux, root and iproute2; all traffic stays inside namespaces that this program makes and removes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import mmap
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from perfsuite.base.units import parse_bytes  # noqa: E402
from perfsuite.metrics import read_run  # noqa: E402 - the script runs from a checkout
from perfsuite.reports.terminal import fit_collectives  # noqa: E402

ADDRESSES = ("10.88.0.1", "10.88.0.2")
MTU = {"bandwidth": 1500, "delay": 9000}
HEADERS = 52
"""IPv4 and TCP with time stamps: of a packet's bytes these are no payload."""
ETHERNET = 14
"""What tbf counts of a frame beside the packet."""
OPERATIONS = ("all_reduce", "send_recv")
MESSAGES = {"all_reduce": 4, "send_recv": 2}
"""One-way delays in one operation of two ranks: gloo announces each receive before the message comes."""
DELAY_RATE_MBIT = 10.0
DELAY_SIZES = ["1KiB", "16KiB", "48KiB"]
"""Within TCP's first window, so that time grows with size by the rate alone."""
PORT = 29511
TESTS = """
    from perfsuite import sizes, world_sizes
    from perfsuite.workloads.collective import AllReduce, SendRecv

    over_sizes = sizes(full={sizes}, small={sizes})

    @over_sizes
    @world_sizes({ranks})
    def test_all_reduce(perf, ranks, message_bytes, dtype):
        perf(AllReduce(message_bytes=message_bytes, dtype=dtype), on=ranks)

    @over_sizes
    @world_sizes({ranks})
    def test_send_recv(perf, ranks, message_bytes, dtype):
        perf(SendRecv(message_bytes=message_bytes, dtype=dtype), on=ranks)
"""
PLAIN = """
    import json, statistics, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    other = (rank + ranks // 2) % ranks
    found = {}
    for size in json.loads(sys.argv[1]):
        mine, theirs = torch.ones(size // 4), torch.empty(size // 4)

        def send_recv():
            for each in (dist.irecv(theirs, other), dist.isend(mine, other)):
                each.wait()

        for name, run in (("all_reduce", lambda: dist.all_reduce(mine)), ("send_recv", send_recv)):
            times = []
            for _ in range(int(sys.argv[2]) + 2):
                dist.barrier()
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            worst = torch.tensor(times[2:], dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            found[f"{name} {size}"] = statistics.median(worst.tolist())
    if rank == 0:
        print("FOUND", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two namespaces whose devices e0 are the ends of one cable; their names."""
    hosts = [f"truth{os.getpid()}-{index}" for index in range(2)]
    try:
        for host in hosts:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
            # Reno fills a shaped link most evenly, and a pause between samples shall not shrink its window.
            for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
                inside = ["nsenter", f"--net=/run/netns/{host}", "sysctl", "-qw", f"net.ipv4.{setting}"]
                subprocess.run(inside, check=True)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False)


def switch_on(host: str, index: int, mtu: int) -> None:
    ip("-n", host, "addr", "add", f"{ADDRESSES[index]}/24", "dev", "e0")
    ip("-n", host, "link", "set", "e0", "mtu", str(mtu), "up")


@contextlib.contextmanager
def shaped(hosts: list[str], mtu: int, rate_mbit: float) -> Iterator[None]:
    """A cable that carries ``rate_mbit`` in each direction."""
    ip("-n", hosts[0], "link", "add", "e0", "type", "veth", "peer", "name", "e0", "netns", hosts[1])
    for index, host in enumerate(hosts):
        switch_on(host, index, mtu)
        burst = f"{max(32, int(rate_mbit / 4))}kb"
        shape = ["tbf", "rate", f"{rate_mbit}mbit", "burst", burst, "latency", "50ms"]
        subprocess.run(["tc", "-n", host, "qdisc", "add", "dev", "e0", "root", *shape], check=True)
    yield
    ip("-n", hosts[0], "link", "del", "e0")


class Held:
    """What the relay's clock says of the delays that it made: shared by the relay and its parent."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 16)

    def add(self, delay_s: float) -> None:
        total_s, frames = self.total()
        self._shared[:] = struct.pack("dd", total_s + delay_s, frames + 1)

    def total(self) -> tuple[float, float]:
        """Sum of the delays in seconds, and of how many frames."""
        total_s, frames = struct.unpack("dd", self._shared[:])
        return total_s, frames


@contextlib.contextmanager
def delayed(hosts: list[str], mtu: int, delay_s: float) -> Iterator[Held]:
    """A cable that carries every frame at DELAY_RATE_MBIT and then holds it back for ``delay_s``, or a bit longer."""
    ends = []
    for index, host in enumerate(hosts):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name = f"truth{os.getpid() % 100000}{index}"
        fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))  # TUNSETIFF: a TAP without header
        ip("link", "set", name, "netns", host)
        ip("-n", host, "link", "set", name, "name", "e0")
        switch_on(host, index, mtu)
        ends.append(end)
    held = Held()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError, KeyboardInterrupt):
            relay(ends, delay_s, held)
        os._exit(0)
    try:
        yield held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for end in ends:
            os.close(end)


def relay(ends: list[int], delay_s: float, held: Held) -> None:
    """Pass frames on between two TAP devices; never returns."""
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    waiting: tuple[collections.deque[tuple[float, bytes]], ...] = (collections.deque(), collections.deque())
    free_s = [0.0, 0.0]
    while True:
        due = [queue[0][0] for queue in waiting if queue]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        for end in select.select(ends, [], [], timeout_s)[0]:
            to = 1 - ends.index(end)
            with contextlib.suppress(BlockingIOError):
                frame = os.read(end, 65536)
                free_s[to] = max(time.monotonic(), free_s[to]) + len(frame) * 8e-6 / DELAY_RATE_MBIT
                waiting[to].append((free_s[to] + delay_s, frame))
        for to, queue in enumerate(waiting):
            while queue and queue[0][0] <= time.monotonic():
                due_s, frame = queue.popleft()
                os.write(ends[to], frame)
                held.add(delay_s + time.monotonic() - due_s)


def launch(folder: Path, hosts: list[str], per_host: int, command: list[str]) -> str:
    """Run ``command`` under torchrun on both hosts; what the first one printed."""
    names = folder / "hosts"
    lines = [f"{address} {host}" for address, host in zip(ADDRESSES, hosts, strict=True)]
    names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "e0", "PERFSUITE_KEY": "truth of networks", "OMP_NUM_THREADS": "1"}
    running = []
    for index, host in enumerate(hosts):
        # A host has a name of its own, and names of addresses are found without asking a server.
        enter = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount", "sh", "-c"]
        become = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={per_host}"]
        meet = [f"--node-rank={index}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
        running.append(
            subprocess.Popen(
                [*enter, become, host, str(names), *torchrun, *meet, *command],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.terminate()
    if running[0].returncode:
        sys.exit("\n".join(said))
    return said[0]


def by_suite(
    folder: Path, hosts: list[str], per_host: int, sizes: list[str], name: str
) -> tuple[dict[str, float], Path]:
    """Median seconds by operation and size, and the journal."""
    (folder / "conftest.py").write_text('pytest_plugins = ["perfsuite.plugin"]\n')
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (folder / "test_network.py").write_text(textwrap.dedent(TESTS.format(sizes=sizes, ranks=2 * per_host)))
    journal = folder / f"{name}.jsonl"
    budget = ["--benchmark-max-time=3", "--benchmark-min-rounds=7", f"--perf-journal={journal}"]
    launch(folder, hosts, per_host, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_network.py", *budget])
    results = read_run(journal).results
    medians = {f"{each.work.collective} {each.work.message_bytes:.0f}": each.median_s for each in results.values()}
    assert len(medians) == len(OPERATIONS) * len(sizes), f"{len(medians)} results: see {journal}"
    return medians, journal


def by_hand(folder: Path, hosts: list[str], per_host: int, sizes: list[str]) -> dict[str, float]:
    """The same by a plain torchrun program."""
    (folder / "plain.py").write_text(textwrap.dedent(PLAIN))
    arguments = [json.dumps([parse_bytes(size) for size in sizes]), "7"]
    said = launch(folder, hosts, per_host, ["plain.py", *arguments])
    return dict(json.loads(said.split("FOUND ", 1)[1].splitlines()[0]))


def seen(values: list[float]) -> str:
    if not values:
        return "nothing"
    return f"{statistics.median(values):+.1f} % ({min(values):+.1f} to {max(values):+.1f})"


def bandwidth(folder: Path, rates: list[float], ranks_per_host: list[int], pairs: int) -> None:
    """Busbw of a large message over what the link carries of payload."""
    mtu = MTU["bandwidth"]
    for rate_mbit in rates:
        payload_bytes_per_s = rate_mbit / 8 * 1e6 * (mtu - HEADERS) / (mtu + ETHERNET)
        size = "4MiB" if rate_mbit < 200 else "16MiB"
        for per_host in ranks_per_host:
            # Bytes that leave a host, per byte of S: gloo's ring, and a message of each of its ranks.
            ranks = 2 * per_host
            leaving = {"all_reduce": 2 * (ranks - 1) / ranks, "send_recv": per_host}
            errors: dict[str, list[float]] = collections.defaultdict(list)
            with two_hosts() as hosts, shaped(hosts, mtu, rate_mbit):
                for pair in range(pairs):
                    suite, _ = by_suite(folder, hosts, per_host, [size], f"b{rate_mbit:g}-{per_host}-{pair}")
                    plain = by_hand(folder, hosts, per_host, [size])
                    for who, times_s in (("suite", suite), ("plain", plain)):
                        for name in OPERATIONS:
                            used = leaving[name] * parse_bytes(size) / times_s[f"{name} {parse_bytes(size)}"]
                            errors[f"{name} {who}"].append(100 * (used / payload_bytes_per_s - 1))
            for name in OPERATIONS:
                print(
                    f"{rate_mbit:g} Mbit/s, 2 x {per_host} ranks, {name} of {size}: off the payload rate by "
                    f"{seen(errors[f'{name} suite'])}; plain torchrun {seen(errors[f'{name} plain'])}; "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


def delay(folder: Path, delay_ms: float, pairs: int) -> None:
    """The fit's alpha over the delays that one operation takes, as the relay made them."""
    errors: dict[str, list[float]] = collections.defaultdict(list)
    made_ms: list[float] = []
    with two_hosts() as hosts, delayed(hosts, MTU["delay"], delay_ms / 1e3) as held:
        for pair in range(pairs):
            alphas_ms: dict[str, float] = {}
            before = held.total()
            _, journal = by_suite(folder, hosts, 1, DELAY_SIZES, f"d{pair}")
            for found in fit_collectives(read_run(journal).results.values()):
                if found.fit is None:
                    print(f"no fit of {found.collective} in run {pair}: {found.reason}", flush=True)
                else:
                    alphas_ms[f"{found.collective} suite"] = found.fit.alpha_us / 1e3
            plain = by_hand(folder, hosts, 1, DELAY_SIZES[:1])
            for name in OPERATIONS:
                alphas_ms[f"{name} plain"] = plain[f"{name} {parse_bytes(DELAY_SIZES[0])}"] * 1e3
            total_s, frames = (now - then for now, then in zip(held.total(), before, strict=True))
            made_ms.append(1e3 * total_s / frames)
            for key, alpha_ms in alphas_ms.items():
                errors[key].append(100 * (alpha_ms / MESSAGES[key.split()[0]] / made_ms[-1] - 1))
    print(f"delay of {delay_ms:g} ms, {statistics.median(made_ms):.1f} by the relay's clock (mean of all frames)")
    for name in OPERATIONS:
        print(
            f"by the alpha of {name}, {MESSAGES[name]} delays each: off by {seen(errors[f'{name} suite'])}; "
            f"plain torchrun, {DELAY_SIZES[0]}: {seen(errors[f'{name} plain'])}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bandwidth", "delay"])
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 400.0])
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "bandwidth":
            bandwidth(Path(folder), arguments.rates, arguments.ranks_per_host, arguments.pairs)
        else:
            delay(Path(folder), arguments.delay_ms, arguments.pairs)


if __name__ == "__main__":
    main()
