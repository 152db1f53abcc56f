"""Detection of the machine: devices, the platform asked for, reasons of absence."""

import os
import re
import signal
import subprocess
import sys
from operator import attrgetter
from types import MappingProxyType

import pytest

from perfsuite.base.errors import UnsupportedCase
from perfsuite.base.units import GIB, MIB
from perfsuite.platforms import detect_machine, families, load_catalog, why_absent
from perfsuite.platforms.base import DetectedDevice
from perfsuite.platforms.cpu import read_processor
from perfsuite.platforms.detection import visible
from perfsuite.platforms.host import Host, ToolAnswer, run_tool
from test_correctness.helpers import machines
from test_correctness.helpers.local_driver import ROOT
from test_correctness.helpers.processes import run_python


def test_without_an_accelerator_the_machine_is_the_cpu_and_no_tool_is_run(tmp_path):
    machines.xeon(tmp_path)

    def run(command):
        raise AssertionError(f"{command} was run")

    machine = machines.detected(Host(root=tmp_path, environ={}, run=run, cores=112))
    assert ("cpu", 1, "gloo", "fork", "small") == SUMMARY(machine)
    assert machine.family.shareable
    assert "Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz" == machine.devices[0].reported_name
    assert 1056000000 * 1024 == machine.devices[0].memory_bytes
    assert "no peak is published for a CPU" in machine.peaks().unknown
    assert (True, True, False, True, False) == tuple(map(machine.natively, ("fp32", "fp64", "bf16", "int8", "tf32")))
    assert (
        "no native bf16 on 1 x Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz: "
        "bf16 needs one of the CPU flags avx512_bf16, amx_bf16, bf16"
    ) == machine.why_not_native("bf16")


SUMMARY = attrgetter("name", "device_count", "family.backend", "family.start_method", "scale")


def test_eight_s4000_are_found_by_their_nodes_and_the_vendors_tool(tmp_path):
    machine = machines.detected(machines.s4000(tmp_path))
    assert ("s4000", 8, "mccl", "exec", "full") == SUMMARY(machine)
    assert machine.devices[7] == DetectedDevice(
        index=7,
        reported_name="MTT S4000",
        uuid="0a1b2c3d-0000-0000-0000-000000000007",
        memory_bytes=48 * GIB,
        link="pcie5x16",
    )
    assert 100.0 == machine.peaks().tflops["bf16"].value
    assert "MT2" == machine.family.links()
    assert {"driver": "2.7.0", "musa_toolkits": "3.1.0", "mccl": "2.11.4"} == dict(machine.family.software())
    assert (True, True, False) == tuple(map(machine.natively, ("bf16", "int8", "fp64")))
    assert any("mp_22" in remark for remark in machine.remarks())


def test_the_tools_table_serves_where_it_knows_no_query(tmp_path):
    machines.write(tmp_path, {"dev/mtgpu.0": "", "proc/cpuinfo": ""})
    machine = machines.detected(machines.host(tmp_path, {"mthreads-gmi": machines.GMI_TABLE}))
    assert ("s80", 1) == (machine.name, machine.device_count)
    assert ("MTT S80", 16 * GIB) == (machine.devices[0].reported_name, machine.devices[0].memory_bytes)
    assert "2.7.0" == machine.family.software()["driver"]
    assert (True, False) == (machine.natively("fp16"), machine.natively("bf16"))


@pytest.mark.parametrize("tool", [{}, {"mthreads-gmi -q": ToolAnswer(problem="no answer in 10 s")}])
def test_a_device_that_no_tool_names_is_measured_without_peaks_or_named_by_the_user(tmp_path, tool):
    machines.write(machines.xeon(tmp_path), {"dev/mtgpu.0": "", "dev/mtgpu.1": "", "dev/mtgpu-ctl": ""})
    host = machines.host(tmp_path, tool)
    machine = machines.detected(host)
    assert ("musa", 2) == (machine.name, machine.device_count)
    assert "mthreads-gmi does not show which device this is" in machine.peaks().unknown
    assert (True, False) == (machine.natively("bf16"), machine.natively("int8"))
    assert any("assumed native" in remark for remark in machine.remarks())
    named = machines.detected(host, "s4000")
    assert ("s4000", 2, 100.0) == (named.name, named.device_count, named.peaks().tflops["bf16"].value)


def test_h200_by_nvidia_smi(tmp_path):
    machine = machines.detected(machines.nvidia(tmp_path, ["NVIDIA H200"] * 2))
    assert ("h200", 2, "nccl", "fork", "full") == SUMMARY(machine)
    found = attrgetter("uuid", "memory_bytes", "link", "capability")(machine.devices[1])
    assert ("GPU-1aaa", 143771 * MIB, "pcie5x16", "9.0") == found
    assert ("NV18", ("700.00 W", "700.00 W")) == (machine.family.links(), machine.family.power_caps())
    assert "580.159.03" == machine.family.software()["driver"]
    assert 4800.0 == machine.peaks().memory_bandwidth.value  # type: ignore[union-attr]
    assert machine.natively("fp8")


@pytest.mark.parametrize(("mode", "told"), [("Enabled", "Enabled"), ("Disabled", "Disabled"), ("[N/A]", "none")])
def test_error_correction_is_in_the_environment_because_it_costs_bandwidth(tmp_path, mode, told):
    machine = machines.detected(machines.nvidia(tmp_path, ["NVIDIA L40S"] * 2, ecc=mode))
    assert told == machine.family.software().get("ecc", "none")


def test_an_old_nvidia_smi_is_asked_again_without_the_field_it_does_not_know(tmp_path):
    refused = ToolAnswer(problem='exit 2: Field "compute_cap" is not a valid field to query.')
    tools = {machines.SMI_DETAILS: refused, machines.SMI_OLDER_DETAILS: "0, 250.00, 3, 16, Enabled, [N/A]\n"}
    machine = machines.detected(machines.nvidia(tmp_path, ["Tesla V100-SXM2-16GB"], tools=tools))
    assert ("v100", "pcie3x16", "") == (machine.name, machine.devices[0].link, machine.devices[0].capability)
    assert (True, False) == (machine.natively("fp16"), machine.natively("bf16"))  # the row knows more than nobody


def test_an_unknown_device_has_no_peaks_and_says_why(tmp_path):
    machine = machines.detected(machines.nvidia(tmp_path, ["NVIDIA L2"], capability="8.9"))
    assert ("cuda", "NVIDIA L2") == (machine.name, machine.model.title)
    told = "unknown device 'NVIDIA L2': add a row with its peaks (perfsuite docs add-a-platform)"
    assert told == machine.peaks().unknown == machine.remarks()[0]
    assert {} == dict(machine.peaks().tflops)
    assert (True, True) == (machine.natively("bf16"), machine.natively("int8"))
    older = machines.detected(machines.nvidia(tmp_path, ["Tesla T4"], capability="7.5"))
    assert not older.natively("bf16")
    assert "bf16 needs compute capability 8, this device has 7.5" in older.why_not_native("bf16")


def test_devices_that_differ_have_no_common_peaks(tmp_path):
    host = machines.nvidia(tmp_path, ["NVIDIA GeForce RTX 4090", "NVIDIA RTX 6000 Ada Generation"])
    machine = machines.detected(host)
    assert ("cuda", 2) == (machine.name, machine.device_count)
    assert "devices differ (1 x NVIDIA GeForce RTX 4090 and 1 x NVIDIA RTX 6000 Ada" in machine.peaks().unknown
    host.environ = {"CUDA_VISIBLE_DEVICES": "1"}
    assert "rtx6000ada" == machines.detected(host).name


MIG_LIST = """GPU 0: NVIDIA H200 (UUID: GPU-0aaa)
  MIG 3g.71gb     Device  0: (UUID: MIG-111)
  MIG 1g.18gb     Device  1: (UUID: MIG-222)
GPU 1: NVIDIA H200 (UUID: GPU-1aaa)
  MIG 7g.141gb    Device  0: (UUID: MIG-333)
"""


@pytest.mark.parametrize(
    ("setting", "slice_", "uuid"),
    [(None, "MIG 3g.71gb", "MIG-111"), ("MIG-222", "MIG 1g.18gb", "MIG-222"), ("1", "MIG 7g.141gb", "MIG-333")],
)
def test_a_mig_slice_is_one_device_without_peaks(tmp_path, setting, slice_, uuid):
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    tools = {"nvidia-smi -L": MIG_LIST}
    host = machines.nvidia(tmp_path, ["NVIDIA H200"] * 2, mig="Enabled", environ=environ, tools=tools)
    machine = machines.detected(host)
    (device,) = machine.devices
    assert ("h200", slice_, uuid) == (machine.name, device.partition, device.uuid)
    assert "no peaks are published for a slice" in machine.peaks().unknown


def test_without_nvidia_smi_the_drivers_files_tell_and_without_them_the_nodes(tmp_path):
    machines.xeon(tmp_path)
    machines.write(tmp_path, {"dev/nvidia0": ""})
    bare = machines.detected(machines.host(tmp_path, {}))
    assert ("cuda", 1) == (bare.name, bare.device_count)
    information = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\nGPU UUID: \t GPU-0aaa\n"
    machines.write(tmp_path, {"proc/driver/nvidia/gpus/0000:17:00.0/information": information})
    machine = machines.detected(machines.host(tmp_path, {}))
    assert ("h200", "GPU-0aaa") == (machine.name, machine.devices[0].uuid)


def test_a_platform_asked_for_is_taken_or_its_absence_explained(tmp_path):
    catalog = load_catalog()
    here = machines.xeon(tmp_path / "cpu")
    absent = detect_machine(catalog, "s4000", host=machines.host(here, {}))
    assert (
        "MTT S4000 not found: no /dev/mtgpu* here; run inside the vendor's image on a machine that has one, "
        "or see perfsuite docs musa"
    ) == absent.absent
    assert ("s4000", 0) == (absent.name, absent.device_count)
    gpu = machines.nvidia(tmp_path / "gpu", ["NVIDIA H200"])
    told = "NVIDIA H100 SXM not found: this machine has 1 x NVIDIA H200; run on one that has it"
    assert told == detect_machine(catalog, "h100", host=gpu).absent
    assert "no /dev/nvidia* here" in detect_machine(catalog, "cuda", host=machines.host(here, {})).absent
    assert ("cpu", "") == attrgetter("name", "absent")(detect_machine(catalog, "cpu", host=gpu))
    assert "h200" == detect_machine(catalog, "h200", host=gpu).name == detect_machine(catalog, "cuda", host=gpu).name
    hidden = machines.nvidia(tmp_path / "hidden", ["NVIDIA H200"], environ={"CUDA_VISIBLE_DEVICES": ""})
    assert "cpu" == detect_machine(catalog, host=hidden).name
    assert "CUDA_VISIBLE_DEVICES='' hides 1 x NVIDIA H200" in detect_machine(catalog, "h200", host=hidden).absent


def test_why_another_platform_cannot_run_in_this_session(tmp_path):
    catalog = load_catalog()
    machine = detect_machine(catalog, host=machines.nvidia(tmp_path, ["NVIDIA H200"]))
    assert "" == why_absent("h200", machine=machine, catalog=catalog)
    assert "no /dev/mtgpu* here" in why_absent("s4000", machine=machine, catalog=catalog)
    told = "this session runs on h200; choose this platform with --perf-platform=cpu"
    assert told == why_absent("cpu", machine=machine, catalog=catalog)
    assert "this machine has 1 x NVIDIA H200" in why_absent("a100", machine=machine, catalog=catalog)


FOUR = tuple(DetectedDevice(index=index, reported_name="d", uuid=f"GPU-{index}ab") for index in range(4))


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),
        ("1,-1,2", [1]),
        ("GPU-2ab,0", [2, 0]),
        ("GPU-3", [3]),
        ("0,0,1", [0]),
        ("none", []),
    ],
)
def test_visible_devices_as_the_vendor_defines_them(setting, uuids):
    found = visible(FOUR, setting)
    assert [f"GPU-{index}ab" for index in uuids] == [device.uuid for device in found]
    assert list(range(len(uuids))) == [device.index for device in found]


def test_an_arm_cpu_is_named_by_its_part_and_computes_what_its_features_say(tmp_path):
    machines.write(tmp_path, {"proc/cpuinfo": machines.ARM})
    processor = read_processor(machines.host(tmp_path, {}))
    assert ("Arm 0x41 0xd4f", "0x41 0x0 0xd4f 0") == (processor.model, processor.identity)
    assert (None, None) == (processor.threads_per_core, processor.sockets)
    assert all(processor.natively(dtype) for dtype in ("fp64", "fp32", "bf16", "fp16", "int8"))


def test_a_tool_that_hangs_fails_or_is_missing_says_so():
    assert "not installed" == run_tool(["perfsuite-has-no-such-tool"]).problem
    assert "no answer in 0.2 s" == run_tool(["sleep", "30"], timeout_s=0.2).problem
    failed = run_tool([sys.executable, "-c", "print('driver gone\\nmore'); raise SystemExit(9)"])
    assert ("", "exit 9: driver gone more") == (failed.text, failed.problem)
    late = [sys.executable, "-c", "import time; time.sleep(0.3); print('late')"]
    assert "late\n" == run_tool(late, timeout_s=60).text
    assert "C\n" == run_tool([sys.executable, "-c", "import os; print(os.environ['LC_ALL'])"]).text


def test_an_interrupted_wait_leaves_no_tool_running(monkeypatch):
    started = []

    def communicate(tool, timeout):
        started.append(tool)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(KeyboardInterrupt):
        run_tool(["sleep", "600"])
    try:
        assert -signal.SIGKILL == started[0].wait(timeout=10)
    finally:
        started[0].kill()


def test_a_tool_that_hung_is_not_asked_again(tmp_path):
    asked = []

    def run(command):
        asked.append(command)
        return ToolAnswer(problem="no answer in 10 s", hung=True)

    machines.write(machines.xeon(tmp_path), {"dev/nvidia0": ""})
    machine = machines.detected(Host(root=tmp_path, environ={}, run=run, cores=1))
    assert "nvidia-smi does not show which device this is (no answer in 10 s)" in machine.peaks().unknown
    assert ("", ()) == (machine.family.topology(), machine.family.power_caps())
    assert 1 == len(asked)


def test_links_are_those_between_the_visible_devices(tmp_path):
    cells = ["X NV1 NV1 SYS", "NV1 X SYS NV2", "NV1 SYS X NV2", "SYS NV2 NV2 X"]
    rows = [f"GPU{index} {row} PIX" for index, row in enumerate(cells)]
    matrix = "\x1b[4m GPU0 GPU1 GPU2 GPU3 mlx5_0\x1b[0m\n" + "\n".join(rows) + "\n\nLegend:\n  X    = Self\n"
    for setting, kinds in ((None, "NV1 NV2 SYS"), ("3,1", "NV2"), ("GPU-0aaa,3", "SYS"), ("2", "")):
        environ = {"CUDA_VISIBLE_DEVICES": setting} if setting else {}
        tools = {"nvidia-smi topo -m": matrix}
        host = machines.nvidia(tmp_path, ["Tesla V100-SXM2-16GB"] * 4, environ=environ, tools=tools)
        family = machines.detected(host).family
        assert kinds == family.links()
        assert "\x1b" not in family.topology()


def test_counting_the_cores_leaves_the_process_where_it_was_bound():
    bound_to = os.sched_getaffinity(0)
    assert Host().cores() >= len(bound_to)
    assert bound_to == os.sched_getaffinity(0)


def test_the_driver_side_does_not_import_torch():
    program = (
        "import sys; from perfsuite import platforms as p; c = p.load_catalog(); m = p.detect_machine(c); "
        "p.fingerprint(m); p.read_environment(m); m.family.telemetry().read(); "
        "import perfsuite.platforms.quiet, perfsuite.cli.main; print('torch' in sys.modules)"
    )
    assert "False\n" == run_python("-c", program, cwd=ROOT).stdout


def test_the_networks_settings_of_report_004_have_a_word_in_every_library_that_has_them():
    known = families()
    for family, prefix in (("cuda", "NCCL"), ("musa", "MCCL")):
        settings = known[family].communication_settings
        names = {"no-infiniband": "IB_DISABLE", "gpu-direct": "NET_GDR_LEVEL", "outer-interfaces": "SOCKET_IFNAME"}
        for word, name in names.items():
            assert (f"{prefix}_{name}",) == tuple(settings[word])


@pytest.mark.parametrize(
    ("version", "algorithm"),
    [("2.18.3", "Tree"), ("2.21.5", "Tree"), ("2.24.3", "allreduce:tree"), ("2.30.7", "allreduce:tree")],
)
def test_the_tree_of_nccl_is_asked_for_as_its_version_reads_it(version, algorithm):
    cuda = families()["cuda"]
    assert {"NCCL_ALGO": algorithm} == cuda.communication_setting("tree", backend="nccl", version=version)
    assert {"NCCL_ALGO": "Ring"} == cuda.communication_setting("ring", backend="nccl", version=version)


@pytest.mark.parametrize(
    ("family", "word", "backend", "version", "said"),
    [
        ("cuda", "tree", "nccl", "", "setting tree depends on the version of nccl, which is unknown here; NCCL_ALGO"),
        ("cuda", "ring", "gloo", "2.30.7", "setting ring is for nccl, but these ranks use gloo"),
        ("musa", "tree", "mccl", "2.11.4", "the communication library of musa has no setting tree; it has default, "),
    ],
)
def test_a_setting_that_the_library_would_not_read_is_a_skip(family, word, backend, version, said):
    with pytest.raises(UnsupportedCase, match=re.escape(said)):
        families()[family].communication_setting(word, backend=backend, version=version)


def test_a_setting_newer_than_the_library_is_a_skip_that_names_both_versions():
    class Newer(type(families()["cuda"])):  # type: ignore[misc]  # a class of the registry
        communication_settings = MappingProxyType({"new": {"NCCL_NEW": {"2.30": "1"}}})

    with pytest.raises(UnsupportedCase, match=r"which is 2\.29\.7 here; NCCL_NEW has '1' from 2\.30 on"):
        Newer(Host()).communication_setting("new", backend="nccl", version="2.29.7")
    assert {"NCCL_NEW": "1"} == Newer(Host()).communication_setting("new", backend="nccl", version="2.30.7")
