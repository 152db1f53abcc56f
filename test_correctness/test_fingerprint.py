"""The hard key of a machine and the environment of a run: what changes which."""

import dataclasses
import json
import re

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.platforms import Fingerprint, fingerprint, read_environment
from perfsuite.platforms.environment import Environment
from perfsuite.platforms.host import ToolAnswer
from perfsuite.record.codec import from_json, to_json
from test_correctness.helpers import machines


def key_of(host, **options):
    return fingerprint(machines.detected(host), **options)


def test_a_key_is_readable_and_a_file_name(tmp_path):
    cpu = key_of(machines.host(machines.xeon(tmp_path / "cpu"), {}))
    assert re.fullmatch(r"cpu-intel-xeon-gold-6330-112c-[0-9a-f]{8}", cpu.key)
    assert re.fullmatch(r"s4000-8x-[0-9a-f]{8}", key_of(machines.s4000(tmp_path / "musa")).key)
    unknown = key_of(machines.nvidia(tmp_path / "l4", ["NVIDIA L2"] * 2))
    assert re.fullmatch(r"cuda-nvidia-l2-2x-[0-9a-f]{8}", unknown.key)
    assert re.fullmatch(r"s4000-4h-8x-[0-9a-f]{8}", key_of(machines.s4000(tmp_path / "cluster"), hosts=4).key)
    assert str(cpu) == cpu.key


def test_the_parts_are_what_the_hardware_is(tmp_path):
    assert {
        "hosts": "1",
        "accelerators": "8 x MTT S4000",
        "partition": "none",
        "host_link": "pcie5x16",
        "links": "MT2",
        "cpu_model": "Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz",
        "cpu_identity": "GenuineIntel 6 106 6",
        "cpu_features": "avx avx2 avx512_vnni avx512f fma",
        "cpu_threads_per_core": "2",
        "cores": "112",
        "cpu_quota": "none",
    } == dict(key_of(machines.s4000(tmp_path)).parts)


def test_readings_and_software_do_not_change_the_key(tmp_path):
    machine = machines.s4000(tmp_path)
    before = key_of(machine)
    machines.xeon(tmp_path, mhz=3100.0, free_kb=1)
    readings = {
        "proc/sys/kernel/osrelease": "6.8.0",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/bus/pci/devices/0000:10:00.0/current_link_speed": "32.0 GT/s PCIe\n",
    }
    machines.write(tmp_path, readings)
    newer = {"mthreads-gmi -q": machines.gmi_query(["MTT S4000"] * 8, driver="3.3.5-server")}
    tools = {**newer, "mthreads-gmi topo -m": machines.matrix(8, "MT2")}
    after = key_of(machines.host(tmp_path, tools, environ={"OMP_NUM_THREADS": "4"}))
    assert before == after
    assert set() == differing(before, after)


def differing(one, other):
    return {name for name in {**one.parts, **other.parts} if one.parts.get(name) != other.parts.get(name)}


def test_other_hardware_changes_the_key_and_is_named(tmp_path):
    whole = key_of(machines.s4000(tmp_path / "8"))
    half = key_of(machines.s4000(tmp_path / "8b", environ={"MUSA_VISIBLE_DEVICES": "0,1,2,3"}))
    assert whole.key != half.key
    assert {"accelerators"} == differing(whole, half)
    assert ("8 x MTT S4000", "4 x MTT S4000") == (whole.parts["accelerators"], half.parts["accelerators"])
    pcie = key_of(machines.s4000(tmp_path / "pcie", tools={"mthreads-gmi topo -m": machines.matrix(8, "SYS")}))
    assert {"links"} == differing(whole, pcie)
    assert ("MT2", "SYS") == (whole.parts["links"], pcie.parts["links"])
    fewer = key_of(machines.s4000(tmp_path / "cores"), cores=64)
    assert {"cores"} == differing(whole, fewer)
    assert ("112", "64") == (whole.parts["cores"], fewer.parts["cores"])
    cpu = key_of(machines.host(machines.xeon(tmp_path / "cpu"), {}))
    assert "accelerators" in differing(whole, cpu) - cpu.parts.keys()


def test_a_mig_slice_has_a_key_of_its_own(tmp_path):
    whole = key_of(machines.nvidia(tmp_path / "whole", ["NVIDIA H200"]))
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-0aaa)\n  MIG 1g.18gb     Device  0: (UUID: MIG-222)\n"
    host = machines.nvidia(tmp_path / "mig", ["NVIDIA H200"], mig="Enabled", tools={"nvidia-smi -L": listed})
    sliced = key_of(host)
    assert {"partition"} == differing(whole, sliced)
    assert ("none", "MIG 1g.18gb") == (whole.parts["partition"], sliced.parts["partition"])


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, "2.5"),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, "2"),
        ({}, "none"),
    ],
)
def test_the_cgroups_share_of_the_cpu_is_hardware(tmp_path, files, quota):
    """Where nothing says what is mounted, the usual places are read; test_cgroups.py has all others."""
    machines.write(machines.xeon(tmp_path), files)
    assert quota == key_of(machines.host(tmp_path, {})).parts["cpu_quota"]


def test_a_fingerprint_survives_json(tmp_path):
    key = key_of(machines.s4000(tmp_path))
    assert key == from_json(Fingerprint, json.loads(json.dumps(to_json(key))))
    assert {key} == {key}


# ------------------------------------------------------------------------------------------------ environment


def environment_of(host, **known):
    return read_environment(machines.detected(host), **known)


def test_the_environment_has_what_report_002_lists(tmp_path):
    environ = {"MCCL_PROTOS": "2", "MUSA_KERNEL_TIMEOUT": "3600000", "HOME": "/root", "NCCL_TOKEN": "secret"}
    found = environment_of(
        machines.s4000(tmp_path, environ=environ),
        declared={"docker_image": "PyTorch2.0_musa1.4"},
        worker={"torch": "2.5.0", "torch_musa": "2.1.1"},
    )
    assert ("node7", "Moore Threads MCCX D800") == (found.hostname, found.machine_model)
    assert ("Ubuntu 20.04 LTS", "5.4.0-42-generic") == (found.os, found.kernel)
    assert "Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz; sockets: 2; threads per core: 2; cores used: 112" == found.cpu
    assert ("1007.1", "performance", "none seen") == (found.memory_gib, found.governor, found.container)
    assert ("mlx5_0 port 1: 200 Gb/sec (4X HDR) InfiniBand",) == found.network
    assert found.tcp == "cubic"
    assert "MTT S4000, 48.0 GiB, 0a1b2c3d-0000-0000-0000-000000000000" == found.devices[0]
    assert {"driver": "2.7.0", "musa_toolkits": "3.1.0", "mccl": "2.11.4"} == dict(found.driver)
    assert {"MCCL_PROTOS": "2", "MUSA_KERNEL_TIMEOUT": "3600000"} == dict(found.variables)
    assert found.notes[0].startswith("architecture mp_22: compute capability 2.2; which kernels and quirks")
    assert any(note.startswith("fsdp2-does-not-overlap (architectures below mp_31): FSDP2's") for note in found.notes)
    assert {"torch": "2.5.0", "torch_musa": "2.1.1"} == found.worker
    assert {"docker_image": "PyTorch2.0_musa1.4"} == found.declared
    assert found.topology == machines.matrix(8, "MT2").rstrip()
    assert pytest.__version__ == found.packages["pytest"]


def test_what_cannot_be_read_is_unknown(tmp_path):
    found = environment_of(machines.host(tmp_path, {}, cores=1))
    assert {"unknown"} == {found.machine_model, found.os, found.governor, found.memory_gib}
    assert ("unknown, memory unknown",) == found.devices
    assert ("unknown", (), {}, "") == (found.tcp, found.network, dict(found.driver), found.topology)
    assert "unknown; sockets: unknown; threads per core: unknown; cores used: 1" == found.cpu
    tools = {machines.SMI_FIELDS: ToolAnswer(problem="exit 9")}
    broken = machines.nvidia(tmp_path / "gpu", ["NVIDIA H200"], tools=tools)
    assert {"driver": "unknown", "ecc": "Enabled"} == dict(environment_of(broken).driver)


@pytest.mark.parametrize(
    ("files", "environ", "container"),
    [
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods/burstable/pod1\n"}, {}, "kubepods"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({"proc/1/cgroup": "0::/\n"}, {}, "none seen"),
    ],
)
def test_the_container_is_told_by_its_signs(tmp_path, files, environ, container):
    machines.write(machines.xeon(tmp_path), files)
    assert container == environment_of(machines.host(tmp_path, {}, environ=environ)).container


def test_every_field_of_an_environment_is_in_its_json(tmp_path):
    found = environment_of(machines.s4000(tmp_path))
    plain = json.loads(json.dumps(found.to_json()))
    assert [each.name for each in dataclasses.fields(Environment)] == list(plain)


@pytest.mark.parametrize("silent", [machines.SMI_FIELDS, "nvidia-smi topo -m"])
def test_a_tool_that_gives_no_answer_is_an_error_and_never_another_key(tmp_path, silent):
    hung = ToolAnswer(problem="no answer in 60 s", hung=True)
    host = machines.nvidia(tmp_path, ["NVIDIA H100 80GB HBM3"] * 2, tools={silent: hung})
    told = r"^nvidia-smi: no answer in 60 s, so the hardware is unknown .*persistenced"
    with pytest.raises(ConfigurationError, match=told):
        key_of(host)


def test_a_tool_that_is_not_installed_leaves_parts_unknown(tmp_path):
    missing = ToolAnswer(problem="not installed")
    host = machines.nvidia(tmp_path, ["NVIDIA H100 80GB HBM3"] * 2, tools={"nvidia-smi topo -m": missing})
    assert "unknown" == key_of(host).parts["links"]
