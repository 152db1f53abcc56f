"""Limits of control groups where containers, services and namespaces have them; the trees are those of reports."""

import math
import os
from pathlib import Path

import pytest

from perfsuite.platforms import fingerprint, quiet, read_environment
from perfsuite.platforms.cpu import memory_bytes
from perfsuite.platforms.host import (
    Host,
    OomKills,
    Throttling,
    cpu_quota,
    memory_limit,
    own_groups,
    read_oom_kills,
    read_throttling,
    throttled,
    throttled_share,
)
from perfsuite.record.run import RunEnd
from perfsuite.reports.screen import screen
from test_correctness.helpers import machines
from test_correctness.helpers.runs import record, result

GIB = 1 << 30
V2 = "31 23 0:27 {root} {place} rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "36 31 0:33 {root} {place} ro,nosuid,nodev,noexec,relatime master:13 - cgroup cgroup rw,{controllers}"
HOST = V2.format(root="/", place="/sys/fs/cgroup")
CPU = "sys/fs/cgroup/cpu,cpuacct"
POD = "/kubepods/burstable/poda2ebe2cd-64c7/a026c487f116"


def v1_quota(folder, cores):
    return {f"{folder}/cpu.cfs_quota_us": f"{round(cores * 100_000)}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


def v1_cpu(root, place=f"/{CPU}"):
    return V1.format(root=root, place=place, controllers="cpu,cpuacct")


TREES = {
    "systemd slices, the tightest is neither the first nor the last": (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-r6.scope",
        HOST,
        {
            "sys/fs/cgroup/user.slice/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice/run-r6.scope/cgroup.procs": "7\n",
        },
        1.5,
    ),
    "a neighbour's limit and a fixed path are not the own ones": (
        "0::/system.slice/ci.service",
        HOST,
        {
            "sys/fs/cgroup/system.slice/ci.service/cpu.max": "20000 100000\n",
            "sys/fs/cgroup/system.slice/db.service/cpu.max": "1000 100000\n",
        },
        0.2,
    ),
    "no limit anywhere": ("0::/init.scope", HOST, {"sys/fs/cgroup/init.scope/cpu.max": "max 100000\n"}, math.inf),
    "docker and Kubernetes with a namespace": ("0::/", HOST, {"sys/fs/cgroup/cpu.max": "50000 20000\n"}, 2.5),
    "a shared namespace, the group is the root of the mount": (
        "0::/system.slice/docker-654d.scope",
        V2.format(root="/system.slice/docker-654d.scope", place="/sys/fs/cgroup"),
        {"sys/fs/cgroup/cpu.max": "300000 100000"},
        3.0,
    ),
    "a group of the container's own below the root of its mount": (
        "0::/system.slice/docker-654d.scope/build",
        V2.format(root="/system.slice/docker-654d.scope", place="/sys/fs/cgroup"),
        {"sys/fs/cgroup/cpu.max": "300000 100000", "sys/fs/cgroup/build/cpu.max": "100000 100000"},
        1.0,
    ),
    "version 1 in docker: mount root and path are the same": (
        "4:cpu,cpuacct:/docker/25b8a4c8\n1:name=systemd:/docker/25b8a4c8",
        v1_cpu("/docker/25b8a4c8"),
        v1_quota(CPU, 1.5),
        1.5,
    ),
    "version 1 in a pod, the controllers named in the other order": (
        f"5:cpuacct,cpu:{POD}",
        V1.format(root=POD, place="/sys/fs/cgroup/cpuacct,cpu", controllers="cpuacct,cpu"),
        v1_quota("sys/fs/cgroup/cpuacct,cpu", 4),
        4.0,
    ),
    "a path with colons and a place with blanks": (
        "3:cpu:/system.slice/containerd.service/kubepods-podb96a.slice:cri-containerd:6ef14b5a",
        v1_cpu("/", place=r"/mnt/c\040groups"),
        v1_quota("mnt/c groups/system.slice/containerd.service/kubepods-podb96a.slice:cri-containerd:6ef14b5a", 2),
        2.0,
    ),
    "Kubernetes in docker: the root ends with the path": (
        f"4:cpu,cpuacct:{POD}",
        v1_cpu(f"/docker/91d0f5e7{POD}"),
        v1_quota(CPU, 0.5),
        0.5,
    ),
    "hybrid: the CPU is version 1's, the other hierarchy has no limit": (
        "4:cpu,cpuacct:/lxc/web\n0::/lxc.payload.web",
        f"{v1_cpu('/')}\n{V2.format(root='/', place='/sys/fs/cgroup/unified')}",
        {**v1_quota(f"{CPU}/lxc/web", 2), "sys/fs/cgroup/unified/lxc.payload.web/cgroup.procs": "1\n"},
        2.0,
    ),
    "hybrid: version 1 has only systemd's names": (
        "1:name=systemd:/user.slice\n0::/user.slice/session-2.scope",
        f"{HOST}\n{V1.format(root='/', place='/sys/fs/cgroup/systemd', controllers='xattr,name=systemd')}",
        {"sys/fs/cgroup/user.slice/session-2.scope/cpu.max": "70000 100000"},
        0.7,
    ),
    "version 1 without a limit": (
        "1:cpu:/",
        v1_cpu("/"),
        {f"{CPU}/cpu.cfs_quota_us": "-1\n", f"{CPU}/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
    "a second mount of the same hierarchy": (
        "0::/",
        f"{V2.format(root='/../../..', place='/cgroup-in')}\n{HOST}",
        {"cgroup-in/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "200000 100000"},
        2.0,
    ),
    "a namespace that mounted nothing anew: the mount's root is above it": (
        "0::/",
        V2.format(root="/../..", place="/sys/fs/cgroup"),
        {
            "proc/self/stat": "41 (python3) S 1 41",
            "sys/fs/cgroup/a.slice/cgroup.procs": "7\n40\n",
            "sys/fs/cgroup/a.slice/b.scope/cgroup.procs": "7\n41\n",
            "sys/fs/cgroup/a.slice/b.scope/cpu.max": "100000 100000",
            "sys/fs/cgroup/a.slice/cpu.max": "80000 100000",
            "sys/fs/cgroup/other.slice/cpu.max": "1000 100000",
        },
        0.8,
    ),
    "a process that was moved out of its namespace": (
        "0::/../../other.slice",
        HOST,
        {"sys/fs/cgroup/cpu.max": "10000 100000"},
        None,
    ),
    "no hierarchy is mounted in a shared process namespace": (f"4:cpu,cpuacct:{POD}\n0::{POD}", "", {}, None),
    "no hierarchy is mounted and the group is the root": ("0::/", "", {}, math.inf),
    "hybrid: the hierarchy that has the CPU is not mounted": (
        f"4:cpu,cpuacct:{POD}\n0::/",
        HOST,
        {"sys/fs/cgroup/cgroup.procs": "1"},
        None,
    ),
    "a group that was removed": (
        "0::/system.slice/ci.service (deleted)",
        HOST,
        {"sys/fs/cgroup/system.slice/cpu.max": "100000 100000"},
        1.0,
    ),
    "a quota without its period": ("0::/", HOST, {"sys/fs/cgroup/cpu.max": "50000"}, 0.5),
    "no number": ("0::/", HOST, {"sys/fs/cgroup/cpu.max": "half 0"}, math.inf),
}


def tree(root, group, mounts, files):
    machines.write(machines.xeon(root), {"proc/self/cgroup": f"{group}\n", "proc/self/mountinfo": f"{mounts}\n"})
    machines.write(root, files)
    return machines.host(root, {}, cores=2)


@pytest.mark.parametrize("name", TREES)
def test_the_tightest_quota_of_the_own_group_and_those_above_counts(tmp_path, name):
    *where, expected = TREES[name]
    assert cpu_quota(tree(tmp_path, *where)) == expected


def test_a_quota_that_cannot_be_read_is_unknown(tmp_path, monkeypatch):
    host = tree(tmp_path, "0::/", HOST, {"sys/fs/cgroup/cpu.max": "20000 100000"})
    read = Host.read
    monkeypatch.setattr(Host, "read", lambda self, path: None if path.endswith("cpu.max") else read(self, path))
    assert cpu_quota(host) is None


@pytest.mark.parametrize(
    ("quota", "cores", "told"), [("20000", "0.2", "0.2"), ("400000", "2", "4"), ("max", "2", "none")]
)
def test_a_quota_below_the_cores_is_what_the_fingerprint_counts(tmp_path, quota, cores, told):
    host = tree(tmp_path, "0::/ci", HOST, {"sys/fs/cgroup/ci/cpu.max": f"{quota} 100000"})
    machine = machines.detected(host)
    found = fingerprint(machine)
    assert (found.parts["cores"], found.parts["cpu_quota"]) == (cores, told)
    assert f"-{cores}c-" in found.key
    said = read_environment(machine, host).cpu
    assert ("CPU quota" in said) == (told != "none")
    assert told == "none" or said.endswith(f"CPU quota: {told} cores")


@pytest.mark.parametrize(
    ("group", "mounts", "files", "limits"),
    [
        (
            "0::/ci/job",
            HOST,
            {
                "sys/fs/cgroup/ci/memory.max": f"{8 * GIB}",
                "sys/fs/cgroup/ci/memory.current": f"{7 * GIB}",
                "sys/fs/cgroup/ci/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
                "sys/fs/cgroup/ci/job/memory.high": f"{4 * GIB}",
                "sys/fs/cgroup/ci/job/memory.max": "max",
                "sys/fs/cgroup/ci/job/memory.current": f"{GIB // 2}",
            },
            (3 * GIB, 4 * GIB),
        ),
        (
            f"9:memory:{POD}\n4:cpu,cpuacct:{POD}",
            V1.format(root=POD, place="/sys/fs/cgroup/memory", controllers="memory"),
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
            },
            (GIB, 2 * GIB),
        ),
        ("0::/", HOST, {"sys/fs/cgroup/memory.max": f"{3 * GIB}"}, (3 * GIB, 3 * GIB)),
    ],
)
def test_memory_is_what_the_tightest_group_leaves(tmp_path, group, mounts, files, limits):
    host = tree(tmp_path, group, mounts, files)
    assert memory_limit(host) == memory_bytes(host) == limits


def test_a_version_1_limit_that_is_none_leaves_the_machines_memory(tmp_path):
    place = V1.format(root="/", place="/sys/fs/cgroup/memory", controllers="memory")
    host = tree(tmp_path, "9:memory:/x", place, {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712"})
    assert memory_bytes(host) == (900_000_000 * 1024, 1_056_000_000 * 1024)
    assert memory_bytes(machines.host(tmp_path / "nothing", {})) is None
    usual = machines.xeon(tmp_path / "usual")  # it has no list of mounts
    machines.write(usual, {"sys/fs/cgroup/memory.max": f"{3 * GIB}"})
    assert memory_bytes(machines.host(usual, {})) == (3 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("group", "mounts", "files", "expected"),
    [
        (
            "0::/ci/job",
            HOST,
            {
                "sys/fs/cgroup/ci/memory.events": "oom 9\noom_kill 9\n",  # a sibling's too
                "sys/fs/cgroup/ci/job/memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
                "proc/vmstat": "pgpgin 7\noom_kill 11\n",
            },
            OomKills(group=2, host=11),
        ),
        (
            f"9:memory:{POD}\n4:cpu,cpuacct:{POD}",
            V1.format(root=POD, place="/sys/fs/cgroup/memory", controllers="memory"),
            {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"},
            OomKills(group=1),
        ),
        ("0::/", HOST, {"proc/vmstat": "nr_free_pages 7\n"}, OomKills()),  # Linux before 4.13 counts none
    ],
)
def test_kills_for_memory_are_the_own_groups_and_the_hosts(tmp_path, group, mounts, files, expected):
    host = tree(tmp_path, group, mounts, files)
    assert read_oom_kills(host, own_groups(host, "memory")) == expected


def stat(periods, held, held_s, *, version=2):
    time = f"throttled_usec {round(held_s * 1e6)}" if version == 2 else f"throttled_time {round(held_s * 1e9)}"
    return f"nr_periods {periods}\nnr_throttled {held}\n{time}\n"


def test_throttling_is_of_the_group_that_was_held_back_the_most(tmp_path):
    slice_, job = "sys/fs/cgroup/ci/cpu.stat", "sys/fs/cgroup/ci/job/cpu.stat"
    host = tree(tmp_path, "0::/ci/job", HOST, {slice_: stat(900, 800, 70.0), job: stat(10, 0, 0.0)})
    before = read_throttling(host)
    machines.write(tmp_path, {slice_: stat(1000, 895, 77.5), job: stat(110, 0, 0.0)})
    held = throttled(before, read_throttling(host))
    assert held == Throttling(periods=100, throttled=95, held_s=7.5)
    assert throttled(before, before) is None
    assert throttled({}, before) is None
    version_1 = tree(tmp_path / "1", "1:cpu:/", v1_cpu("/"), {f"{CPU}/cpu.stat": stat(8, 4, 2.0, version=1)})
    assert read_throttling(version_1) == {CPU: Throttling(periods=8, throttled=4, held_s=2.0)}


def loads(tmp_path, *, quota, held, busy_s):
    """Readings 10 s apart on two cores, of which the run took 2 s."""
    cores = sorted(Host().granted())[:2]
    ticks = os.sysconf("SC_CLK_TCK")

    def reading(at_s):
        share = at_s / 10
        busy = round(busy_s * share * ticks / len(cores))
        idle = round(10 * share * ticks) - busy
        files = {
            "proc/stat": "".join(f"cpu{core} {busy} 0 0 {idle} 0 0 0 0 0 0\n" for core in cores),
            f"proc/{os.getpid()}/stat": f"1 (x) S {' '.join(['0'] * 10)} {round(2 * share * ticks)} 0 0 0\n",
            "sys/fs/cgroup/cpu.max": f"{quota} 100000",
            "sys/fs/cgroup/cpu.stat": stat(round(100 * share), round(held * share), held * share / 10),
        }
        return quiet.read_host_load(tree(tmp_path, "0::/", HOST, files), [os.getpid()])

    return reading(0.0), reading(10.0)


CASES = [("test_a", "rank 0 got 20% of its core")]


@pytest.mark.skipif(len(Host().granted()) < 2, reason="needs two cores")
def test_what_the_quota_holds_back_is_not_put_down_to_other_programs(tmp_path):
    before, after = loads(tmp_path, quota=20_000, held=95, busy_s=18.0)
    (line,) = quiet.warnings(CASES, before=before, after=after)
    assert line == (
        "throttled: the CPU quota of the own cgroup (0.2 cores) throttled the run in 95% of its periods, 9.5 s over "
        "all cores; 1 of 1 case disturbed, e.g. test_a: rank 0 got 20% of its core"
    )


@pytest.mark.skipif(len(Host().granted()) < 2, reason="needs two cores")
def test_others_are_told_beside_a_quota_when_it_held_nothing_back_or_they_took_of_it(tmp_path):
    before, after = loads(tmp_path / "a", quota=100_000, held=0, busy_s=18.0)
    (line,) = quiet.warnings(CASES, before=before, after=after)
    assert line.startswith("the machine is not quiet: other programs took 80% of the core time; 1 of 1 case")
    before, after = loads(tmp_path / "b", quota=100_000, held=40, busy_s=18.0)
    lines = quiet.warnings(CASES, before=before, after=after)
    assert [line.partition(": ")[0] for line in lines] == ["throttled", "the machine is not quiet"]
    assert "other programs took 30% of the core time" in lines[1]


def test_the_screen_says_throttled_and_not_that_the_machine_was_quiet():
    end = RunEnd(at="", took_s=1.0, exit_status=0, warnings=("throttled: the CPU quota of the own cgroup (0.2 cores)",))
    run = record(result("a"), end=end)
    (trust,) = [line for line, _ in screen(run, [], width=120) if line.startswith("trust")]
    assert trust.split(maxsplit=1)[1] == "THROTTLED: the CPU quota of the own cgroup (0.2 cores)"


def test_this_machine_has_limits_that_can_be_read():
    for controller in ("cpu", "memory"):
        assert all(Path("/", folder).is_dir() for folder in own_groups(Host(), controller)[0])


def test_the_share_of_periods_is_unknown_without_a_quota_and_zero_where_nothing_was_held_back():
    def counts(periods, throttled):
        return {"cpu": Throttling(periods=periods, throttled=throttled, held_s=0.1 * throttled)}

    assert throttled_share({}, {}) is None
    assert throttled_share(counts(0, 0), counts(0, 0)) is None
    assert throttled_share(counts(10, 5), counts(30, 5)) == 0.0
    assert throttled_share(counts(10, 5), counts(30, 10)) == 0.25
