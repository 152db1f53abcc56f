"""What perfsuite's device code uses exists in every version of torch_musa that it supports; its quirks are honoured.

No such device is at hand: the names were derived from the vendor's sources (torch_musa_names/*.json, each with the
commit and the files that were read), the uses are found in ours.
"""

import ast
import configparser
import fnmatch
import importlib
import json
import re
import shlex
from functools import reduce
from pathlib import Path

import pytest
import torch

from perfsuite.platforms import read_environment
from perfsuite.platforms.accelerator import AttentionBlock
from perfsuite.platforms.musa import Musa, MusaFlash
from perfsuite.platforms.quirks import all_quirks, quirks
from test_correctness.helpers import device_names, machines

PACKAGE = Path(__file__).parent.parent / "perfsuite"
NAMES = Path(__file__).with_name("torch_musa_names")


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


VERSIONS = {path.stem: load(path) for path in sorted(NAMES.glob("[0-9]*.json"))}
TELEMETRY = {path.stem: load(path) for path in sorted(NAMES.glob("pymtml-*.json"))}
AVOID = tuple(name for quirk in all_quirks("musa") for name in quirk.avoid)


@pytest.fixture(scope="module")
def uses():
    """Those of our sources; to read them takes seconds, which only who runs these tests waits for."""
    return device_names.uses(device_names.device_layer(PACKAGE))


def said(source, version="2.7.1"):
    """What the contract says about a file of this source."""
    found = device_names.uses({"mine.py": source})
    return list(device_names.complaints(found, VERSIONS[version], AVOID))


def test_the_versions_are_those_that_torch_2_5_to_2_7_have():
    assert {"2.1.0": "2.5.0", "2.1.1": "2.5.0", "2.5.0": "2.5.0", "2.7.0": "2.7.1", "2.7.1": "2.7.1"} == {
        version: found["torch"] for version, found in VERSIONS.items()
    }
    for version, found in VERSIONS.items():
        assert version == found["version"]
        assert (f"v{version}", 40) == (found["source"]["tag"], len(found["source"]["commit"]))
        assert "torch_musa/__init__.py" in found["source"]["files"]


@pytest.mark.extended
@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_of_the_device_layer_exists(version, uses):
    assert [] == list(device_names.complaints(uses, VERSIONS[version], AVOID))


@pytest.mark.parametrize("version", VERSIONS)
def test_backend_and_entry_point_are_there(version):
    assert Musa.backend in VERSIONS[version]["distributed_backends"]
    assert ["torch_musa = torch_musa:_autoload"] == VERSIONS[version]["entry_points"]["torch.backends"]


def test_the_uses_that_are_known_by_heart_are_among_those_found(uses):
    places = {(use.place.partition(":")[0], use.full) for use in uses}
    assert {
        ("perfsuite/platforms/accelerator.py", "torch.musa.set_device"),
        ("perfsuite/platforms/accelerator.py", "torch.musa.reset_peak_memory_stats"),
        ("perfsuite/platforms/accelerator.py", "torch.musa.Event"),  # through a constructor's parameter
        ("perfsuite/platforms/accelerator.py", "torch.musa.Event.elapsed_time"),  # through an opaque stamp
        ("perfsuite/platforms/musa.py", "torch.backends.mudnn.allow_tf32"),
        ("perfsuite/platforms/musa.py", "torch.musa.get_device_capability"),
        ("perfsuite/workloads/training/memory.py", "torch.musa.max_memory_reserved"),  # through an attribute
        ("perfsuite/workloads/collective.py", "torch.musa.synchronize"),
    } <= places


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("m = torch.get_device_module(d)\nm.made_up", "torch.musa.made_up does not exist"),
        ("from torch.musa import made_up", "torch.musa.made_up does not exist"),
        ("getattr(torch.musa, 'made_up')", "torch.musa.made_up does not exist"),
        ("torch.backends.mudnn.made_up = True", "torch.backends.mudnn.made_up does not exist"),
        ("torch.musa.current_stream().made_up()", "torch.musa.Stream.made_up does not exist"),
        ("with torch.musa.Stream() as s:\n    pass\ntorch.musa.Event().made_up()", "torch.musa.Event.made_up does not"),
        ("torch.musa.get_device_properties(0).L2_cache_size", "device properties.L2_cache_size does not exist"),
        ("torch.musa.synchronize(0, 1)", "takes (device=) and is given 2 arguments"),
        ("torch.musa.Event(timing=True)", "takes (enable_timing=, blocking=, interprocess=) and is given timing="),
        ("torch.musa.reset_max_memory_allocated()", "torch.musa.reset_max_memory_allocated is to be avoided"),
        ("from torch import accelerator as a\na.memory_allocated()", "torch.accelerator.memory_allocated is to be"),
        ("torch.cuda.synchronize()", "torch.cuda.synchronize is another vendor's"),
        (
            "class A:\n def __init__(self, m): self.m = m\n def f(self): self.m.made_up()\nA(torch.musa)",
            "mine.py:3: torch.musa.made_up does not exist",
        ),
        (
            "class B:\n def _load(self): return torch.get_device_module('x')\n"
            "class C(B):\n def __init__(self): self.m = self._load()\n def f(self): self.m.made_up()",
            "mine.py:5: torch.musa.made_up does not exist",
        ),
        (
            "class K:\n m = torch.musa\n def stamp(self):\n  e = torch.musa.Event()\n  return e\n"
            " def wait(self, stamp): cast(Any, stamp).made_up()",
            "mine.py:6: torch.musa.Event.made_up does not exist",
        ),
    ],
)
def test_what_would_fail_there_is_found(source, complaint):
    (found,) = said(source)
    assert complaint in found


@pytest.mark.parametrize(
    "source",
    [
        "torch.musa.synchronize()\ntorch.musa.synchronize(device=0)",
        "getattr(torch.musa, 'made_up', None)",
        "getattr(torch.musa.get_device_properties(0), 'L2_cache_size', 0)",
        "torch.musa.Event(enable_timing=True).record()",
        "torch.made_up()\nother.made_up()",
        "torch.musa.Stream(*arguments)",
    ],
)
def test_what_works_there_is_not_complained_about(source):
    assert [] == said(source)


def test_a_version_without_a_submodule_is_no_fault_where_it_was_asked_for_with_a_default():
    assert [] == said("m = getattr(torch.musa, 'mccl', None)\nm.version()", "2.1.1")
    assert ["mine.py:1: torch.musa.mccl does not exist in torch_musa 2.1.1"] == said("torch.musa.mccl", "2.1.1")
    assert [] == said("torch.musa.mccl.version()", "2.7.1")


def test_a_broken_function_is_found_without_any_quirk():
    found = device_names.uses({"mine.py": "torch.musa.reset_max_memory_cached()"})
    (complaint,) = device_names.complaints(found, VERSIONS["2.1.0"])
    assert complaint.endswith("is broken in torch_musa 2.1.0: warnings is not defined in torch_musa/core/memory.py")


# --------------------------------------------------------------------------------------------------- the operators


FLASH = "_scaled_dot_product_attention_flash_musa"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_attention_kernel_s_operators_take_what_they_are_given(version, monkeypatch):
    given = {}

    def operator(name, *results):
        monkeypatch.setattr(torch.ops.aten, name, lambda *each: given.update({name: each}) or results, raising=False)

    query, key, mask = torch.ones(2, 4, 6, 8), torch.ones(2, 2, 6, 8), torch.empty(0, dtype=torch.bool)
    block = AttentionBlock(query=query, key=key, value=key + 1, causal=True)
    operator(FLASH, query, query[..., 0], mask)
    operator(f"{FLASH}_backward", query, key, key)
    whole = MusaFlash().forward(block)
    MusaFlash().backward(query + 1, block, whole)
    signatures = VERSIONS[version]["operators"]
    named = {name: bound(f"aten::{name}{signatures[f'aten::{name}']}", each) for name, each in given.items()}
    inputs = {"query": block.query, "key": block.key, "value": block.value}
    assert_equal({**inputs, "attn_mask": None, "dropout_p": 0.0, "is_causal": True}, named[FLASH])
    outputs = {"output": whole.out, "logsumexp": whole.log_sum, "dropout_mask": mask}
    assert_equal({"grad_out": query + 1, **inputs, **outputs, "is_causal": True}, named[f"{FLASH}_backward"])


def bound(signature, given):
    """What an operator of this signature makes of positional arguments."""
    arguments = torch._C.parse_schema(signature).arguments
    assert all(each.has_default_value() for each in arguments[len(given) :])
    assert not any(each.kwarg_only for each in arguments[: len(given)])
    return {each.name: value for each, value in zip(arguments, given, strict=False)}


def assert_equal(expected, actual):
    assert list(expected) == list(actual)
    for name, value in expected.items():
        assert torch.equal(value, actual[name]) if isinstance(value, torch.Tensor) else value == actual[name], name


# ------------------------------------------------------------------------------------------------------ the quirks


def named(version, architecture=None):
    return {quirk.name for quirk in quirks("musa", version=version, architecture=architecture)}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_quirks_are_what_the_sources_say(version):
    facts, found = VERSIONS[version]["facts"], named(version, 22)
    assert facts["counts_devices_when_imported"] == ("fork-poisoned" in found)
    assert facts["tf32_default"] == ("tf32-on-by-default" in found)
    assert facts["tf32_default"] != ("tf32-off-by-default" in found)
    assert facts["guard_has_synchronizeDevice"] != ("no-device-guard-for-accelerator" in found)
    assert ("mccl" not in VERSIONS[version]["names"]["torch.musa"]) == ("no-mccl-version" in found)
    assert ("is_bf16_supported" not in VERSIONS[version]["names"]["torch.musa"]) == ("no-is-bf16-supported" in found)
    (overlap,) = (quirk for quirk in all_quirks("musa") if quirk.name == "fsdp2-does-not-overlap")
    assert facts["fsdp2_overlaps_from_architecture"] == overlap.below
    (memory,) = (quirk for quirk in all_quirks("musa") if quirk.name == "reset-max-memory-raises")
    assert (set(memory.avoid), True) == (set(VERSIONS[version]["broken"]), memory.name in found)


def test_versions_and_architectures_tell_the_quirks_apart():
    assert {"fsdp2-does-not-overlap"} == named("2.7.1", 22) - named("2.7.1", 31)
    older, newer = named("2.1.1+abc1234", 22), named("2.7.1", 22)
    assert {"tf32-off-by-default", "no-mccl-version", "loaders-pin-for-cuda"} == older - newer
    assert {"tf32-on-by-default"} == named("2.7.0a0", 22) - named("2.5.0", 22)
    assert "no-is-bf16-supported" in named("2.0.1")
    everything = {quirk.name for quirk in all_quirks("musa")}
    assert everything == named("") == named("unknown")
    assert () == all_quirks("cuda")


@pytest.mark.parametrize("quirk", all_quirks("musa"), ids=lambda quirk: quirk.name)
def test_every_quirk_names_a_place_that_honours_it(quirk):
    module, _, path = quirk.honoured_by.partition(":")
    assert reduce(getattr, path.split("."), importlib.import_module(module)) is not None
    assert all((quirk.says, quirk.does, quirk.source))


# --------------------------------------------------------------------------------------------------- the telemetry


def mtml_calls():
    """Name and number of arguments of every call of the vendor's library in our telemetry."""
    tree = ast.parse((PACKAGE / "platforms" / "musa.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [(node.func.attr, len(node.args)) for node in calls if node.func.attr.startswith(("mtml", "nvml"))]


@pytest.mark.parametrize("version", TELEMETRY)
def test_every_call_of_the_telemetry_exists(version):
    names, calls = TELEMETRY[version]["names"], mtml_calls()
    assert {"mtmlLibraryInit", "mtmlGpuGetClock", "mtmlDeviceGetPowerUsage"} <= {name for name, _ in calls}
    for name, arguments in calls:
        assert name in names, f"{name} does not exist in {version}"
        assert arguments == len([each for each in names[name].strip("()").split(", ") if each]), name


def test_the_telemetry_asked_for_is_the_oldest_that_has_the_calls():
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    oldest = min(TELEMETRY, key=lambda name: [int(part) for part in name.removeprefix("pymtml-").split(".")])
    assert f'"mthreads-ml-py>={oldest.removeprefix("pymtml-")}"' in project


# ---------------------------------------------------------------------------------------------- the vendor's image

PAGE = (PACKAGE.parent / "docs" / "how-to" / "musa.md").read_text(encoding="utf-8")
START = (PACKAGE.parent / "docs" / "tutorials" / "musa-quickstart.md").read_text(encoding="utf-8")


def image_environment():
    """tox's environment for a vendor's image: key -> lines."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(PACKAGE.parent / "tox.ini", encoding="utf-8")
    return {key: value.strip().splitlines() for key, value in parser["testenv:musa"].items()}


def requirement_names(lines):
    return [re.split(r"[<>=;\s]", line)[0] for line in lines]


def test_the_image_keeps_its_torch():
    found = image_environment()
    assert (["skip"], ["true"], []) == (found["package"], found["system_site_packages"], found["extras"])
    assert {"torch", "torch-musa", "deepspeed", "perfsuite"}.isdisjoint(requirement_names(found["deps"]))
    (by_hand,) = re.findall(r"^python -m pip install (\"pytest.*)$", START, re.MULTILINE)
    assert set(shlex.split(by_hand)) == {line for line in found["deps"] if not line.startswith("tomli")}
    assert "python -m pip install --no-deps --no-build-isolation -e ." in PAGE
    assert not re.search(r"^python -m pip install (?!\"pytest|--no-deps)", PAGE + START, re.MULTILINE)


def test_every_variable_of_the_page_reaches_the_tests_and_the_record(tmp_path):
    table = PAGE[PAGE.index("| variable | versions of torch_musa | meaning |") : PAGE.index("## What perfsuite does")]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    names = {name.rstrip("*") for row in rows for name in re.findall(r"`([A-Z0-9_]+\*?)", row)}
    assert {"MUSA_VISIBLE_DEVICES", "PYTORCH_MUSA_ALLOC_CONF", "MCCL_", "TORCH_MCCL_BLOCKING_WAIT"} <= names
    passed = image_environment()["pass_env"]
    environ = {name + ("X" if name.endswith("_") else ""): "1" for name in names}
    for name in environ:
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in passed), name
    machine = machines.detected(machines.host(machines.xeon(tmp_path), {}, environ=environ))
    assert set(environ) == set(read_environment(machine).variables)


def test_the_page_says_of_the_versions_what_their_sources_say():
    rows = re.findall(r"^\| ([\d., ]+) \| ([\d.]+) \| yes \| (on|off) \|$", PAGE, re.MULTILINE)
    said = {version: (torch, default) for versions, torch, default in rows for version in versions.split(", ")}
    assert said == {
        version: (found["torch"], "on" if found["facts"]["tf32_default"] else "off")
        for version, found in VERSIONS.items()
    }
