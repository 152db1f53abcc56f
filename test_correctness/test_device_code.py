"""The rank side of platforms: clocks, memory, TF32, out of memory; families of other packages."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.base.errors import ConfigurationError, DeviceUnusable, UnsupportedCase
from perfsuite.base.units import GIB, MIB
from perfsuite.platforms import DeviceCode, detect_machine, device_code, families, load_catalog
from perfsuite.platforms.accelerator import Accelerator
from perfsuite.platforms.cpu import CpuDevice
from perfsuite.platforms.cuda import CudaDevice
from perfsuite.platforms.musa import MusaDevice
from test_correctness.helpers import machines
from test_correctness.helpers.markdown import blocks

DOCUMENT = Path(__file__).parent.parent / "docs" / "how-to" / "add-a-platform.md"


def test_cpu_device_code_is_torchs_cpu_with_perf_counter():
    code = device_code("cpu")
    assert ("cpu", "cpu") == (code.family, str(code.open(3)))
    start, end = code.clock.stamp(), code.clock.stamp()
    code.clock.wait(end)
    assert 0 <= code.clock.elapsed_s(start, end)
    assert (0.25e-3,) == (pytest.approx(code.clock.elapsed_s(1_000_000, 1_250_000)),)
    facts = code.clock.facts()
    assert "perf_counter" == facts.name
    assert facts.resolution_s > 0
    assert facts.cost_s > 0
    assert facts is code.clock.facts()
    assert code.peak_memory_bytes() is None
    free, total = code.memory_bytes() or (0, 0)
    assert 0 < free <= total
    assert code.cache_bytes() >= 64 * 1024
    code.synchronize()
    code.set_tf32(True)
    code.reset_peak_memory()
    code.release()
    assert {"torch", "cpu_capability", "omp_num_threads"} == set(code.versions())


def test_the_cpu_allocators_error_is_out_of_memory_and_others_are_not():
    code = device_code("cpu")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 48)
    assert code.is_out_of_memory(caught.value)
    assert code.is_out_of_memory(MemoryError())
    assert not code.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not code.is_out_of_memory(ValueError("can't allocate memory"))


def test_the_cache_of_the_highest_level_is_flushed(tmp_path):
    base = "sys/devices/system/cpu/cpu0/cache"
    sizes = {"index0": ("1", "48K"), "index2": ("2", "1280K"), "index3": ("3", "42M")}
    for index, (level, size) in sizes.items():
        machines.write(tmp_path, {f"{base}/{index}/level": level, f"{base}/{index}/size": size})
    assert 42 * MIB == CpuDevice(machines.host(tmp_path, {})).cache_bytes()
    assert 64 * MIB == CpuDevice(machines.host(tmp_path / "none", {})).cache_bytes()


def test_the_yardstick_of_a_device_measures_the_device():
    """Products of a CPU's size take a device four launches, and its copy stays in the cache."""
    rows = [row for row in load_catalog().models.values() if row.family in ("cuda", "musa") and "fp32" in row.tflops]
    assert len(rows) > 20
    for row in rows:
        assert 4 * 2 * Accelerator.yardstick_side**3 / (row.tflops["fp32"].value * 1e12) > 0.5e-3, row.name
    assert 256 * MIB == Accelerator.yardstick_bytes
    assert (192, 4 * MIB) == (CpuDevice.yardstick_side, CpuDevice.yardstick_bytes)


class FakeModule:
    """A device module whose clock moves by 2 us per event; nothing but the names that the device layer may use."""

    def __init__(self):
        self.calls: list[Any] = []
        self.now_ms = 0.0
        module = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                module.now_ms += 0.002
                self.at_ms = module.now_ms

            def synchronize(self):
                module.calls.append("event.synchronize")

            def elapsed_time(self, end):
                return end.at_ms - self.at_ms

        self.Event = Event

    def __getattr__(self, name):
        answers = {
            "set_device": None,
            "synchronize": None,
            "max_memory_allocated": 5 * MIB,
            "reset_peak_memory_stats": None,
            "mem_get_info": (3 * GIB, 4 * GIB),
            "current_device": 1,
            "get_device_properties": SimpleNamespace(L2_cache_size=50 * MIB),
            "get_device_capability": (2, 2),
            "empty_cache": None,
        }
        if name not in answers:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            return answers[name]

        return call


@pytest.mark.parametrize("kind", [CudaDevice, MusaDevice])
def test_an_accelerator_uses_only_what_every_device_module_has(kind):
    module = FakeModule()
    code = kind(module)
    start, end = code.clock.stamp(), code.clock.stamp()
    code.clock.wait(end)
    assert pytest.approx(2e-6) == code.clock.elapsed_s(start, end)
    facts = code.clock.facts()
    assert (f"{kind.family}.Event", [pytest.approx(2e-6)] * 2) == (facts.name, [facts.resolution_s, facts.cost_s])
    code.synchronize()
    code.reset_peak_memory()
    code.release()
    assert (5 * MIB, 50 * MIB) == (code.peak_memory_bytes(), code.cache_bytes())
    assert (3 * GIB, 4 * GIB) == code.memory_bytes()
    assert "event.synchronize" in module.calls


def test_an_accelerator_is_opened_by_index_or_named_as_unusable(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the device code sets it, for the rest of its process
    module = FakeModule()
    assert "cuda:1" == str(CudaDevice(module).open(1))
    assert ("set_device", 1) in module.calls
    if not torch.cuda.is_available():
        with pytest.raises(DeviceUnusable, match=r"cannot open device cuda:0 \(.*\); install a torch built for"):
            device_code("cuda").open(0)


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be asynchronously"
NOT_READY = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions? Error 802: system not yet"
MISMATCH = "Error 803: system has unsupported display driver / cuda driver combination"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError(BUSY), "another process holds it; end it, or allow several (nvidia-smi -c DEFAULT)"),
        (RuntimeError("CUDA error: out of memory\nmore"), "other programs hold its memory; end them"),
        (RuntimeError(f"{NOT_READY} initialized"), "start nvidia-fabricmanager in the driver's version"),
        (RuntimeError(MISMATCH), "install one version of the driver's module and library, or restart the host"),
        (RuntimeError("The NVIDIA driver on your system is too old"), "install a torch built for this device"),
        (type("DeferredCudaCallError", (Exception,), {})("CUDA call failed lazily"), "install a torch built for"),
    ],
    ids=["busy", "full", "fabric", "mismatch", "old driver", "deferred"],
)
def test_a_device_that_cannot_be_opened_has_the_remedy_of_its_cause(error, remedy):
    module = FakeModule()

    def touch():  # CUDA makes the context of device 0 at its first use, which set_device(0) is not
        raise error

    module.synchronize = touch
    with pytest.raises(DeviceUnusable) as caught:
        CudaDevice(module).open(0)
    said = str(caught.value)
    assert f"cannot open device cuda:0 ({str(error).splitlines()[0]})" in said
    assert remedy in said
    assert 1 == len(said.splitlines())


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_50", "sm_80", "sm_90"], (8, 6), True),  # machine code runs on later devices of its major version
        (["sm_50", "sm_80", "sm_90"], (10, 0), False),
        (["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"], (7, 0), False),
        (["sm_75", "sm_90", "sm_120", "compute_120"], (12, 1), True),
        (["sm_80", "compute_80"], (12, 0), True),  # the driver translates PTX for newer devices
        (["sm_90a"], (9, 0), True),
        (["gfx942"], (9, 4), True),  # unknown names: no statement
        ([], (9, 0), True),
    ],
)
def test_a_torch_without_kernels_for_the_device_is_refused_before_any_case(built, capability, runs):
    module = FakeModule()
    module.get_arch_list = lambda: built
    module.get_device_capability = lambda index: capability
    if runs:
        assert "cuda:0" == str(CudaDevice(module).open(0))
        return
    major, minor = capability
    with pytest.raises(DeviceUnusable, match=rf"no kernels for compute capability {major}\.{minor}, only for sm_.*sm_"):
        CudaDevice(module).open(0)


@pytest.mark.parametrize(("before", "after"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_cuda_devices_have_the_numbers_of_nvidia_smi_unless_the_user_orders_them(monkeypatch, before, after):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", before or "")  # noted, so that its value of before comes back
    if not before:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
    device_code("cuda")
    assert after == os.environ["CUDA_DEVICE_ORDER"]


@pytest.mark.parametrize(("version", "shares"), [("2.21.5", False), ("2.29.7", False), ("2.30.7", True), ("", True)])
def test_ranks_share_a_device_where_nccl_lets_them(monkeypatch, version, shares):
    monkeypatch.setattr(CudaDevice, "versions", lambda self: {"nccl": version} if version else {})
    refused = pytest.raises(UnsupportedCase, match=f"NCCL {version} refuses several .* use --perf-backend=gloo")
    with contextlib.nullcontext() if shares else refused:
        CudaDevice(FakeModule()).require_sharing()


def test_out_of_memory_of_an_accelerator():
    code = CudaDevice(FakeModule())
    assert code.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    for what in (
        "MUSA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 6291456 bytes",
    ):
        assert code.is_out_of_memory(RuntimeError(what))
    assert not code.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not code.is_out_of_memory(RuntimeError("Call to ibv_reg_mr failed with error Cannot allocate memory"))
    assert not code.is_out_of_memory(MemoryError())


def test_utilisation_is_what_the_vendor_tells_and_unknown_without(monkeypatch):
    monkeypatch.delenv("MUSA_VISIBLE_DEVICES", raising=False)
    assert CpuDevice().utilisation_percent() is None
    module = FakeModule()
    assert CudaDevice(module).utilisation_percent() is None
    module.utilization = lambda: 97
    assert 97.0 == CudaDevice(module).utilisation_percent()
    reading = SimpleNamespace(utilisation_percent=64.0)
    opened = []

    def tell(devices):
        opened.extend(devices)
        return SimpleNamespace(read=lambda: (reading,))

    monkeypatch.setattr("perfsuite.platforms.musa.MtmlTelemetry.open", tell)
    assert 64.0 == MusaDevice(FakeModule()).utilisation_percent()
    assert [1] == [device.index for device in opened]
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "3")  # there device 1 is another one
    assert MusaDevice(FakeModule()).utilisation_percent() is None


def test_a_reading_is_what_nvml_tells_of_the_device_that_torch_names(monkeypatch):
    opened = []

    def tell(devices):
        opened.extend(devices)
        return SimpleNamespace(read=lambda: (SimpleNamespace(throttle=("thermal",)),))

    monkeypatch.setattr("perfsuite.platforms.cuda.NvmlTelemetry.open", tell)
    module = FakeModule()
    module.get_device_properties = lambda index: SimpleNamespace(uuid=f"00-{index}")
    assert ("thermal",) == CudaDevice(module).reading().throttle
    assert "GPU-00-1" == CudaDevice(module).uuid()
    assert "" == CudaDevice(FakeModule()).uuid()
    assert ["GPU-00-1"] == [device.uuid for device in opened]
    monkeypatch.setattr("perfsuite.platforms.cuda.NvmlTelemetry.open", lambda devices: None)
    assert [None, None] == [CudaDevice(module).reading(), CpuDevice().reading()]


def test_tf32_is_set_by_the_switches_of_the_family(monkeypatch):
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    try:
        for allowed in (True, False):
            CudaDevice(FakeModule()).set_tf32(allowed)
            assert (allowed, allowed) == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert {"torch", "cuda", "cudnn", "tf32"} <= set(CudaDevice(FakeModule()).versions())
    with pytest.raises(UnsupportedCase, match=r"torch.backends.mudnn is missing"):
        MusaDevice(FakeModule()).set_tf32(True)
    mudnn = SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(torch.backends, "mudnn", mudnn, raising=False)
    MusaDevice(FakeModule()).set_tf32(False)
    assert not mudnn.allow_tf32
    versions = MusaDevice(FakeModule()).versions()
    assert ("mp_22", "False", "unknown") == (versions["architecture"], versions["tf32"], versions["torch_musa"])


def test_a_tf32_switch_that_torch_refuses_to_read_is_unknown(monkeypatch):

    class Mixed:
        @property
        def allow_tf32(self):
            raise RuntimeError("you have used mix of the legacy and new APIs to set the TF32 status")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Mixed())
    assert "unknown" == CudaDevice(FakeModule()).versions()["tf32"]


def test_torch_musa_is_asked_for_where_torch_has_no_musa():
    if hasattr(torch, "musa"):
        pytest.skip("this torch has a musa device")
    with pytest.raises(DeviceUnusable, match=r"torch_musa cannot be imported .* run inside the vendor's image"):
        device_code("musa")


def test_an_unknown_family_is_refused():
    with pytest.raises(ConfigurationError, match="'tpu' is not installed; choose from musa, cuda, rocm, ascend, cpu"):
        device_code("tpu")


def distribution(monkeypatch, root, name, entry_points):
    """Install metadata with these entry points into a folder of the import path."""
    folder = f"{name}-1.0.dist-info"
    metadata = {f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"}
    machines.write(root, {**metadata, f"{folder}/entry_points.txt": entry_points})
    monkeypatch.syspath_prepend(root)


def test_the_documents_family_runs(tmp_path, monkeypatch):
    module = next(block for block in blocks(DOCUMENT, "python") if block.startswith("# toyfamily.py"))
    group, point = re.search(r'entry-points\."([\w.]+)"\]\n(.*)\n', "".join(blocks(DOCUMENT, "toml"))).groups()  # type: ignore[union-attr]
    distribution(monkeypatch, tmp_path, "toyfamily", f"[{group}]\n{point.replace(chr(34), '')}\n")
    machines.write(tmp_path, {"toyfamily.py": module})
    monkeypatch.delitem(sys.modules, "toyfamily", raising=False)
    machines.write(tmp_path, {"toy.toml": '[platform.toy1]\ntitle = "Toy 1"\nfamily = "toy"\nmatch = ["Toy 1"]\n'})
    catalog = load_catalog([tmp_path / "toy.toml"])
    host = machines.host(machines.xeon(tmp_path / "host"), {})
    assert ["musa", "cuda", "toy", "rocm", "ascend", "cpu"] == list(families(host))
    assert "cpu" == detect_machine(catalog, host=host).name  # simulated: never found, only asked for
    machine = detect_machine(catalog, "toy", host=host)
    assert ("toy1", 2, True) == (machine.name, machine.device_count, machine.simulated)
    code = device_code("toy")
    assert isinstance(code, DeviceCode)
    start, end = code.clock.stamp(), code.clock.stamp()
    assert (1e-3, "cpu") == (code.clock.elapsed_s(start, end), str(code.open(1)))
    sys.modules.pop("toyfamily", None)


def test_a_family_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    points = "[perfsuite.families]\ngone = no_such_module:Gone\nnotone = pathlib:Path\n"
    distribution(monkeypatch, tmp_path, "gone", points)
    for name, told in (
        ("gone", r"family 'gone' \(no_such_module:Gone\) cannot be imported: No module"),
        ("notone", r"family 'notone' is .*its entry point must name a subclass of Family"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            device_code(name)
