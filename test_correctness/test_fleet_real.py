"""Real processes on eight network namespaces: a slow link, a held rank and an absent node are named, nobody else."""

import os
import shutil
import subprocess

import pytest

from benchmarks.fleet_real import one_run

NAMESPACE = f"probe{os.getpid()}"


def why_not():
    """Why no network namespaces can be made here; empty where they can."""
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    if os.geteuid():
        return "network namespaces need root"
    made = subprocess.run(["ip", "netns", "add", NAMESPACE], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


@pytest.mark.slow
def test_a_slow_link_a_held_rank_and_an_absent_node_are_named_and_nobody_else():
    if reason := why_not():
        pytest.skip(reason)
    expected, found = one_run(8, 0, 200.0)
    assert {"slow", "absent"} == set(expected.values())
    assert expected == found
