"""The simulated device by itself: its clock, its streams, its memory and its refusals."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError, UnsupportedCase
from perfsuite.base.units import GIB
from perfsuite.platforms import cpu
from perfsuite.platforms.host import Host
from simmusa import build
from simmusa.costs import S4000, Costs
from simmusa.registered import registered
from test_correctness.helpers import machines
from test_correctness.helpers import simmusa_steps as steps
from test_correctness.helpers.processes import gone
from test_correctness.helpers.simmusa_ranks import ROOT, require_built

NAMES = Path(__file__).parent / "torch_musa_names"


def process():
    """Calls a function in a process of its own kind: this one must not get a device musa."""
    require_built()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


on_device, on_new_device = pytest.fixture(process, scope="module"), pytest.fixture(process)


@pytest.mark.extended
def test_only_names_that_torch_musa_has(on_device):
    recorded = json.loads((NAMES / "2.7.1.json").read_text(encoding="utf-8"))["names"]
    for where, names in on_device(steps.public_names).items():
        assert [] == [name for name in names if name not in recorded[where]], where


def test_the_flash_kernel_has_the_operators_that_torch_musa_has(on_device):
    recorded = json.loads((NAMES / "2.7.1.json").read_text(encoding="utf-8"))["operators"]
    found = on_device(steps.flash_attention, recorded)
    assert [] == found["other"]
    # 1 x 4 heads, 50 queries to 50 keys of 10 features: 400,000 FLOPs forward, 1,000,000 backward, 1 us each to launch.
    assert {"forward": 0.0014, "backward": 0.002} == {name: round(found[name], 9) for name in ("forward", "backward")}
    assert [[4, 2, 2], [4, 2, 2]] == found["heads"]
    assert found["error"] <= 1e-5
    assert "Now torch_musa only allows explicit value of `scale`" in found["scale"]


def test_a_kernel_takes_its_arithmetic_and_a_launch_is_the_hosts(on_device):
    # Ten products of 2 us behind one launch of 1 us; a bf16 product takes 0.5 us, so the launches bind.
    assert {"fp32": 0.021, "bf16": 0.0105, "tf32": 0.002} == on_device(steps.times_of_products)


def test_traffic_is_what_is_read_and_what_is_written(on_device):
    # 200,000 bytes per buffer at 1 TB/s; the link to the host has 10 GB/s; a view is free; a launch takes 1 us.
    expected = {"copy": 0.0014, "triad": 0.0016, "to_device": 0.021, "view": 0.0}
    expected |= {"in_place": 0.0016, "of_lists": 0.0024, "filled": 0.0012}
    assert expected == pytest.approx(on_device(steps.times_of_traffic), abs=1e-12)


def test_the_host_chooses_attention_without_a_kernel_and_without_waiting(on_device):
    # It looks at shapes: charged as a kernel that the host waits for, it hid gathers behind half a block only.
    assert {"ms": 0.0, "waited": False} == on_device(steps.choice_of_attention)


def test_an_event_that_is_not_over_has_no_time(on_device):
    found = on_device(steps.unfinished_events)
    assert not found["ready"]
    assert "RuntimeError: Both events must be completed before calculating elapsed time." == found["early"]
    assert "ValueError: Both events must be created with argument 'enable_timing=True'." == found["untimed"]
    assert 0 < found["polls"] < 20


def test_a_timer_that_forgets_to_wait_fails(on_device):
    assert "Both events must be completed" in on_device(steps.timer_that_forgets_to_wait)


def test_the_host_sees_a_queued_copy_only_when_it_has_waited(on_device):
    found = on_device(steps.copies_to_the_host)
    assert found["early"]
    assert [0.0, 1.0, 2.0, 3.0] == found["late"] == found["pageable"]
    assert 3.0 == found["item"]


def test_memory_shared_by_streams_needs_an_order(on_device):
    found = on_device(steps.two_streams)
    assert "aten::sum on stream 1 of musa:0 reads memory that the default stream of musa:0 wrote" in found["read"]
    assert "aten::fill_ on the default stream of musa:0 writes memory that stream 1" in found["write after read"]
    assert "writes memory that the default stream of musa:0 wrote" in found["half of another stream"]
    fine = ("ordered read", "other half", "ordered write", "after the host waited")
    assert dict.fromkeys(fine, "") == {name: found[name] for name in fine}


def test_streams_run_at_once(on_device):
    assert {"both": 0.002, "one": 0.002} == on_device(steps.times_of_two_streams)


def test_memory_is_counted_to_the_byte(on_device):
    found = on_device(steps.memory)
    # Pieces of 512 bytes, as the real allocator's.
    expected = {"two": 8192, "one": 4096, "none": 0, "peak": 8192, "after": 0, "info": (0, 64 << 20)}
    assert expected == {name: found[name] for name in expected}
    assert found["beyond"].startswith("OutOfMemoryError: MUSA out of memory. Tried to allocate 134217728 bytes.")


def test_memory_is_reserved_in_segments_beside_a_context(on_device):
    found = on_device(steps.segments)
    # 2 MiB for small pieces; two of 8 MiB share a segment of 20, the third has its own; a live piece keeps its segment.
    expected = {"before": 0, "free": 80, "small": 2, "large": 42, "freed": 42, "emptied": 22, "fits": ""}
    assert expected == {name: found[name] for name in expected}
    assert found["fragmented"].startswith("OutOfMemoryError: MUSA out of memory. Tried to allocate 62914560 bytes.")
    assert (1, "") == (found["retries"], found["all"])


@pytest.mark.parametrize(("version", "later"), [("2.7.0", "special_i1"), ("2.7.1", "")])
def test_only_what_torch_musa_registers_runs(on_device, version, later):
    found = on_device(steps.refused, version)
    assert found["missing"].startswith("NotImplementedError: Could not run 'aten::_int_mm' with arguments from the")
    assert found["missing"].endswith(f"torch_musa {version} does not register it")
    assert re.fullmatch(r"RuntimeError: \"aten::clamp(\.out)?\" not implemented for 'Char'", found["dtype"])
    assert 'RuntimeError: "aten::_scaled_mm" is only supported for MUSA_ARCH >= 310' == found["architecture"]
    assert bool(later) == (later in found["later"] and bool(found["later"]))
    assert "" == found["there"]


@pytest.mark.extended
def test_a_device_after_a_fault_is_lost_for_its_process(on_new_device):
    found = on_new_device(steps.faults)
    lost = "RuntimeError: MUSA error: an illegal memory access was encountered"
    expected = dict.fromkeys(("first", "second", "other device"), "")
    expected |= dict.fromkeys(("launch", "wait", "allocation"), lost)
    assert expected == {name: found[name] for name in expected}
    for name in ("index", "after the index"):
        assert "MUSA error: device-side assert triggered" in found[name]


def test_a_version_that_was_not_derived_is_told():
    told = r"SIMMUSA_TORCH_MUSA='2\.6' was not derived from its sources; choose 2.1"
    with pytest.raises(ConfigurationError, match=told):
        registered("2.6")


def test_what_the_real_device_refuses(on_device):
    found = on_device(steps.what_the_real_one_refuses)
    assert "Expected all tensors to be on the same device" in found["two devices"]
    assert "Expected all tensors to be on the same device" in found["host and device"]
    assert "" == found["scalar"]
    assert "synchronizing all streams" in found["accelerator"]
    assert "invalid device ordinal 9" in found["ordinal"]
    assert "Cannot re-initialize MUSA in forked subprocess" in found["fork"]


def test_jitter_follows_from_its_seed(on_device):
    first = on_device(steps.jittered, 1, {})
    assert first == on_device(steps.jittered, 1, {})
    assert first != on_device(steps.jittered, 2, {})
    assert 5 == len(set(first))
    assert all(abs(time_ms - 2.0) <= 0.02 for time_ms in first)
    slower = on_device(steps.jittered, 1, {"aten::mm": 1.03})
    assert [1.03 * time_ms for time_ms in first] == pytest.approx(slower, rel=1e-6)


@pytest.mark.extended
def test_the_arithmetic_is_the_cpus(on_device):
    assert {} == {name: off for name, off in on_device(steps.same_numbers_as_the_cpu).items() if off > 1e-6}


def test_costs_are_written_as_json():
    assert 1.03 == S4000.changed('{"slow": {"aten::mm": 1.03}}').slow["aten::mm"]
    assert Costs(alpha_ns=5) == Costs().changed('{"alpha_ns": 5}')
    with pytest.raises(ConfigurationError, match=r"'\[\]' is not an object of costs; its keys are alpha_ns, "):
        S4000.changed("[]")
    with pytest.raises(ConfigurationError, match=r"is not JSON"):
        S4000.changed("{")


def host_of(root, gib):
    return machines.host(machines.write(root, {"proc/meminfo": f"MemTotal: {gib << 20} kB\nMemAvailable: 1 kB\n"}), {})


def test_memory_is_within_half_of_the_hosts(tmp_path):
    small, large = host_of(tmp_path / "small", 24), host_of(tmp_path / "large", 768)
    assert 3 * GIB // 2 == S4000.held(8, small).memory_bytes
    assert 6 * GIB == S4000.held(2, small).memory_bytes
    assert S4000 == S4000.held(8, large)  # 384 GiB hold eight devices of 48
    asked = S4000.changed(f'{{"memory_bytes": {GIB}}}')
    assert asked == asked.held(8, small)
    with pytest.raises(ConfigurationError, match=r"half of this host's 8\.0 GiB is 0\.50 for each of 8 .* to fewer"):
        S4000.held(8, host_of(tmp_path / "least", 8))


@pytest.mark.extended
def test_a_device_of_this_host_has_no_more(on_new_device):
    found = on_new_device(steps.memory_as_installed)
    assert S4000.held(8, Host()).memory_bytes == found <= cpu.memory_bytes(Host())[1] // 16


def test_one_process_builds_and_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMMUSA_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "why_not", lambda: "")
    built = []

    def pretend(target, longest_s):
        built.append(os.getpid())
        with pytest.raises(UnsupportedCase, match="another process has been building simmusa for 0 s"):
            build.ensure_built(longest_s=0.0)
        target.parent.mkdir()
        target.touch()

    monkeypatch.setattr(build, "_build", pretend)
    assert build.library() == build.ensure_built() == build.ensure_built()
    assert 1 == len(built)


def test_a_build_that_takes_too_long_leaves_no_compiler_behind(tmp_path, monkeypatch):
    compiler, python = tmp_path / "compiler", tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {compiler}\nwait\n")
    python.chmod(0o755)
    monkeypatch.setenv("SIMMUSA_CACHE", str(tmp_path / "builds"))
    monkeypatch.setattr(build.sys, "executable", str(python))
    build.cache().mkdir()
    real = build.subprocess.Popen.communicate

    def too_long(process, timeout=None):
        while timeout is not None and not (compiler.exists() and compiler.read_text()):
            time.sleep(0.01)
        return real(process, timeout=timeout and 0.01)

    monkeypatch.setattr(build.subprocess.Popen, "communicate", too_long)
    with pytest.raises(UnsupportedCase, match="simmusa was not built within 5 s"):
        build._build(build.library(), 5.0)
    assert gone([int(compiler.read_text())])  # the signal to its group may take a moment
    assert [] == list(build.cache().iterdir())


@pytest.mark.extended
def test_a_killed_build_leaves_no_compiler_behind_and_the_next_one_removes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMMUSA_CACHE", str(tmp_path / "builds"))
    compiler, started = tmp_path / "compiler", tmp_path / "started"
    compiler.write_text(f"#!/bin/sh\necho $$ > {started}\nexec sleep 60\n")
    compiler.chmod(0o755)
    environ = {**os.environ, "CXX": str(compiler)}
    with subprocess.Popen([sys.executable, "-m", "simmusa.build"], cwd=ROOT, env=environ) as builder:
        while not (started.exists() and started.read_text().strip()):
            assert builder.poll() is None
            time.sleep(0.01)
        builder.kill()
    assert gone([int(started.read_text())])
    assert [True, False] == sorted((path.is_dir() for path in build.cache().iterdir()), reverse=True)
    monkeypatch.setattr(build.sys, "executable", "/bin/false")
    with pytest.raises(UnsupportedCase, match="simmusa did not build"):
        build._build(build.library(), 60.0)
    assert [False] == [path.is_dir() for path in build.cache().iterdir()]
