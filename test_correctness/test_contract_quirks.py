"""What torch_musa does otherwise is shown and acted upon: with a described machine and a stand-in for the module."""

import doctest
from types import SimpleNamespace

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.cli import platforms
from perfsuite.platforms import detect_machine, families, load_catalog, quirks, read_environment
from perfsuite.platforms.musa import MusaDevice
from perfsuite.plugin import launch
from perfsuite.runtime.transports.local import LocalTransport
from test_correctness.helpers import machines
from test_correctness.helpers.command_line import printed
from tools import derive_torch_musa_names
from tools.derive_torch_musa_names import derive

torch = pytest.importorskip("torch")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make this version of torch_musa's distribution be installed; the package itself is not."""

    def install(version):
        site = tmp_path / f"site-{version}"
        metadata = f"Metadata-Version: 2.1\nName: torch_musa\nVersion: {version}\n"
        machines.write(site, {f"torch_musa-{version}.dist-info/METADATA": metadata})
        monkeypatch.syspath_prepend(site)

    return install


def notes(root, title="MTT S4000"):
    """The notes of the environment of a machine with these devices."""
    tools = {"mthreads-gmi -q": machines.gmi_query([title])}
    machine = detect_machine(load_catalog(), host=machines.s4000(root, count=1, tools=tools))
    return list(read_environment(machine).notes)


def test_the_environment_shows_the_quirks_of_the_installed_version(tmp_path, installed):
    installed("2.7.1")
    found = notes(tmp_path)
    assert found[0].startswith("architecture mp_22: compute capability 2.2; ")
    assert "quirks of torch_musa 2.7.1, perfsuite docs musa:" == found[1]
    names = [note.split(":")[0].split(" ")[0] for note in found[2:]]
    assert [
        "fork-poisoned",
        "tf32-on-by-default",
        "barrier-guesses-the-device",
        "fsdp2-does-not-overlap",
        "fsdp2-is-patched-by-name",
        "fsdp1-on-one-stream",
        "no-device-guard-for-accelerator",
        "reset-max-memory-raises",
    ] == names
    assert all("; perfsuite: " in note for note in found[2:])


def test_an_unknown_version_may_have_all_quirks(tmp_path):
    unknown = notes(tmp_path)
    assert any(note.startswith("tf32-on") for note in unknown)
    assert any(note.startswith("tf32-off") for note in unknown)
    assert "quirks of torch_musa (version unknown: any of these), perfsuite docs musa:" == unknown[1]


def test_the_command_line_prints_them(tmp_path, installed, monkeypatch, capsys):
    installed("2.7.1")
    host = machines.s4000(tmp_path)
    monkeypatch.setattr(platforms, "Host", lambda: host)
    out = printed(capsys, "env")
    assert "fork-poisoned: importing torch counts the devices" in out
    assert "    torch-musa" in out  # among the packages


def test_no_other_family_has_any(tmp_path):
    machine = detect_machine(load_catalog(), host=machines.nvidia(tmp_path, ["NVIDIA H200"]))
    assert () == machine.family.quirks(machine.model)
    assert tuple(machine.remarks()) == tuple(read_environment(machine).notes)


# ----------------------------------------------------------------------------------------------------- acted upon


def test_a_poisoned_fork_is_never_used(tmp_path):
    host = machines.s4000(tmp_path)
    family = detect_machine(load_catalog(), host=host).family
    assert "exec" == family.start_method == families(host)["musa"].start_method
    transport = LocalTransport(start_method=family.start_method, preload=launch.PRELOAD, log_directory=tmp_path)
    assert launch.PRELOAD
    assert () == transport._preload  # torch is loaded in the rank's own interpreter, after it was started


class Module(SimpleNamespace):
    """As much of ``torch.musa`` as MusaDevice asks, for a device of this architecture."""

    def __init__(self, architecture, **more):
        super().__init__(get_device_capability=lambda: architecture, Event=object, **more)


@pytest.mark.parametrize("default", [False, True])
def test_tf32_is_set_whatever_its_default_and_whatever_came_before(monkeypatch, default):
    from perfsuite.runtime.ranks.rank import Membership, Meshes, WorkerRank

    mudnn = SimpleNamespace(allow_tf32=default)
    monkeypatch.setattr(torch.backends, "mudnn", mudnn, raising=False)
    member = Membership(
        rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), code=MusaDevice(Module((2, 2))), backend="mccl"
    )
    meshes = Meshes(MeshShape.of(dp=1), device_type="cpu")
    seen = []
    for dtype in ("", "tf32", "bf16", "tf32", "fp32", "tf32", ""):
        rank = WorkerRank(member, meshes, "time", SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        if dtype:  # a test of one's own may never ask for a dtype
            rank.dtype(dtype)
        seen.append(mudnn.allow_tf32)
    assert [False, True, False, True, False, True, False] == seen


DISABLE, LEVEL = "TORCH_MUSA_FSDP2_DISABLE_OVERLAP", "TORCH_MUSA_FSDP2_OVERLAP_LEVEL"


@pytest.mark.parametrize(
    ("architecture", "environ", "overlap"),
    [
        ((2, 2), {}, "off by default"),
        ((3, 1), {}, "on by default"),
        ((2, 2), {DISABLE: "0"}, f"by {DISABLE}=0, else off"),
        ((3, 1), {DISABLE: "0", LEVEL: "2"}, f"by {LEVEL}=2, else on"),
    ],
)
def test_a_rank_records_whether_fsdp2_overlaps(monkeypatch, architecture, environ, overlap):
    for name in (DISABLE, LEVEL):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = MusaDevice(Module(architecture)).versions()
    assert overlap == found["fsdp2_overlap"]
    assert ("fsdp2-does-not-overlap" in found["quirks"]) == (architecture < (3, 1))


def test_a_rank_records_mccl_where_it_tells_and_an_architecture_that_cannot_be_read_as_unknown():
    with_mccl = MusaDevice(Module((2, 2), mccl=SimpleNamespace(version=lambda: (2, 11, 4)))).versions()
    assert ("2.11.4", "mp_22") == (with_mccl["mccl"], with_mccl["architecture"])
    silent = MusaDevice(SimpleNamespace(Event=object)).versions()
    assert "mccl" not in silent
    assert ("unknown", "unknown by default") == (silent["architecture"], silent["fsdp2_overlap"])


# ------------------------------------------------------------------------------------- where the names come from

SOURCES = {
    "version.txt": "9.9.9\n",
    "setup.py": 'setup(entry_points={"torch.backends": ["torch_musa = torch_musa:_autoload"]})\n',
    "torch_musa/__init__.py": """
import sys
from packaging.version import Version
try:
    from .version import __version__
except ImportError:
    pass
TORCH_MIN_VERSION = Version("2.5.0")
from .core.device import Device as device, synchronize
from .core import memory
from .core.memory import *
from .core.stream import Event, Stream
from .core.mudnn import *
def ipc_collect():
    pass
""",
    "torch_musa/core/__init__.py": "",
    "torch_musa/core/device.py": "class Device: pass\ndef synchronize(device=None): pass\ndef hidden(): pass\n",
    "torch_musa/core/memory.py": (
        '__all__ = ["mem_get_info", "reset"]\nimport torch_musa\n'
        "def mem_get_info(device=None, *, raw, flag=1, **rest): pass\ndef reset(): warnings.warn('x')\n"
        "def not_public(): pass\nsetattr(torch_musa, 'added', mem_get_info)\n"
    ),
    "torch_musa/core/stream.py": (
        "class Event:\n    def __new__(cls, enable_timing=False): pass\n    def record(self, stream=None): pass\n"
        "class Stream:\n    def wait_stream(self, stream): pass\n"
    ),
    "torch_musa/core/mudnn.py": (
        "import sys\ndef version(): pass\nclass M:\n    allow_tf32 = 1\nsys.modules[__name__] = M()\n"
    ),
    "torch_musa/csrc/core/Event.cpp": 'PyMethodDef methods[] = {\n    {(char*)"query", f, 0},\n    {"wait", g},\n',
    "torch_musa/csrc/core/Module.cpp": '.def_readonly("name", &x)\n .def_readonly(\n "total_memory", &y)',
    "torch_musa/csrc/distributed/Register.cpp": 'register_backend(\n      "mccl",',
    "torch_musa/csrc/aten/utils/Context.h": "bool allow_tf32_ = true;",
    "torch_musa/distributed/_composable/fsdp/patch.py": "if _get_musa_arch() < 31:\n    pass\n",
    "torch_musa/csrc/aten/ops/musa_functions.yaml": "- func: add.Tensor\n- func: fast\n  dispatch:\n",
    "torch_patches/aten_src_ATen_native_native_functions.yaml.patch": (
        "+- func: fast(Tensor x, *, float? scale=None) -> (Tensor y)\n+- func: not_computed(Tensor x) -> Tensor\n"
    ),
}


def test_names_are_derived_from_sources_without_running_them():
    found = derive(SOURCES.get)
    assert ("9.9.9", "2.5.0", ["mccl"]) == (found["version"], found["torch"], found["distributed_backends"])
    assert {
        "Event": "class",
        "Stream": "class",
        "TORCH_MIN_VERSION": "value",
        "__version__": "value",
        "added": "(device=, *, raw, flag=, **rest)",
        "core": "module",
        "device": "class",
        "ipc_collect": "()",
        "mem_get_info": "(device=, *, raw, flag=, **rest)",
        "memory": "module",
        "reset": "()",
        "synchronize": "(device=)",
    } == found["names"]["torch.musa"]
    assert {"allow_tf32": "value", "version": "()", "M": "class"} == found["names"]["torch.backends.mudnn"]
    event = {"__init__": "(enable_timing=)", "query": "method", "record": "(stream=)", "wait": "method"}
    assert event == found["names"]["torch.musa.Event"]
    assert ["name", "total_memory"] == list(found["names"]["device properties"])
    assert {"torch.musa.reset": "warnings is not defined in torch_musa/core/memory.py"} == found["broken"]
    assert {
        "tf32_default": True,
        "counts_devices_when_imported": False,
        "guard_has_synchronizeDevice": False,
        "fsdp2_overlaps_from_architecture": 31,
    } == found["facts"]
    assert {"torch.backends": ["torch_musa = torch_musa:_autoload"]} == found["entry_points"]
    assert {"aten::fast": "(Tensor x, *, float? scale=None) -> (Tensor y)"} == found["operators"]


@pytest.mark.parametrize("module", [quirks, derive_torch_musa_names])
def test_the_worked_examples_are_right(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0
