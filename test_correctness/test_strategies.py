"""Strategies without processes: options, meshes, a user's ds_config.json, and the rule that each breaks."""

import contextlib
import fcntl
import json
import re
import shutil
import sys
import types

import pytest
import torch

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.models import find as find_model
from perfsuite.strategies import STRATEGIES, Plan, find
from perfsuite.strategies.deepspeed.engine import compiling
from perfsuite.strategies.deepspeed.zero import adam_settings, require_compiler
from perfsuite.strategies.trainer import _require_compiler
from perfsuite.workloads.training.parity import tolerance_on


def plan(**changes):
    return Plan(**{"model": find_model("gpt2-tiny"), "dtype": "fp32", "micro_batch_size": 2, **changes})


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_carries_its_name(name):
    assert find(name).name == name


def test_what_keeps_groups_in_its_modules_needs_processes_of_its_own():
    assert {name for name in STRATEGIES if find(name).process} == {"hybrid", "zero0", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpp", None, "strategy 'dpp' is unknown; did you mean ddp"),
        ("ddp", {"bucket": 3}, "strategy ddp has no option bucket; choose from bucket_mib, overlap"),
        ("single", {"overlap": True}, "strategy single has no option overlap; it has none"),
        ("zero1", {"stage": 2}, "strategy zero1 has no option stage"),
        ("ddp", {"compression": "fp8"}, "compression='fp8' of strategy ddp is unknown; choose 'none', 'fp16', 'bf16'"),
        ("ddp", {"bucket_mib": 0}, "bucket_mib=0 of strategy ddp is not valid"),
        ("zero_redundancy", {"bucket_mib": -1}, "bucket_mib=-1 of strategy zero_redundancy is not valid"),
        ("zero0", {"offload_optimizer": True}, "offload_optimizer needs spread optimizer state"),
        ("zero2", {"cpu_adam": True}, "cpu_adam needs optimizer state in host memory; set offload_optimizer too"),
        ("zero2", {"offload_parameters": True}, "offload_parameters needs spread parameters, and zero2 spreads none"),
    ],
)
def test_bad_options_name_the_rule(name, options, message):
    with pytest.raises(InvalidParameter, match=message):
        find(name, options)


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("single", "dp2", "strategy single runs on 1 rank, the case has 2; choose ddp"),
        ("ddp", "dp2-tp2", "mesh dp2-tp2 has axis tp, along which strategy ddp cannot train; give it dp or"),
        ("zero3", "pp2-dp2", "mesh pp2-dp2 has axis pp, along which strategy zero3"),
        ("fsdp", "dp_shard4", "mesh dp_shard4 has only one of dp_replicate and dp_shard; strategy fsdp needs both"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(name, mesh, message):
    with pytest.raises(InvalidParameter, match=message):
        find(name).require(MeshShape.parse(mesh))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at:All", "strategy 'nowhere.at:All': nowhere.at cannot be imported"),
        ("perfsuite.base.mesh:MeshShape", "strategy 'perfsuite.base.mesh:MeshShape' is not a subclass of"),
    ],
)
def test_a_strategy_of_somebody_else_has_to_be_one(name, message):
    with pytest.raises(InvalidParameter, match=message):
        find(name)


def test_mixed_precision_in_full_precision_is_refused():
    with pytest.raises(InvalidParameter, match="mixed_precision of strategy fsdp has no effect with dtype='fp32'"):
        find("fsdp", {"mixed_precision": True}).check_plan(plan(), MeshShape.of(dp=2))
    find("fsdp", {"mixed_precision": True}).check_plan(plan(dtype="bf16"), MeshShape.of(dp=2))


def check_config(tmp_path, config, *, stage=2, ranks=2, **changes):
    path = tmp_path / "ds_config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    strategy = find(f"zero{stage}", {"config": str(path)})
    strategy.check_plan(plan(**changes), MeshShape.of(dp=ranks))
    return strategy.settings(plan(**changes))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": 64}, "train_batch_size=64 is not micro_batch_size 2 x accumulation 1 x 2 ranks = 4"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu=3 is not the case's 2"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 is not the case's 1"),
        ({"train_batch_size": "many"}, "train_batch_size='many' is not a batch size"),
        ({"zero_optimization": {"stage": 3}}, "stage=3 is not the stage of strategy zero2; run it with strategy zero3"),
        ({"bf16": {"enabled": True}}, "bf16 is enabled, but the case has dtype='fp32'"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type='Lamb' is not supported"),
        ("[1]", "holds list, not an object"),
        ("{", "is not JSON"),
    ],
)
def test_a_config_that_contradicts_the_case_is_refused(tmp_path, config, message):
    with pytest.raises(InvalidParameter, match=message):
        check_config(tmp_path, config)


def test_a_config_that_agrees_is_honoured_and_completed(tmp_path):
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 777, "overlap_comm": True},
    }
    settings = check_config(tmp_path, config)
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["gradient_clipping"] == 1.0
    zero = settings["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["overlap_comm"]) == (2, 777, True)
    assert zero["allgather_bucket_size"] == find_model("gpt2-tiny").parameters
    assert settings["zero_force_ds_cpu_optimizer"] is False


def test_a_config_s_optimizer_settings_are_used():
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "torch_adam": True}}}
    assert adam_settings(config, 1e-4) == {"lr": 2e-4, "betas": (0.9, 0.95)}
    assert adam_settings({}, 1e-4) == {"lr": 1e-4}


def test_offload_is_written_where_deepspeed_reads_it():
    strategy = find("zero3", {"offload_optimizer": True, "offload_parameters": True})
    zero = strategy.settings(plan())["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}


def test_what_must_be_compiled_names_the_compiler_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    built = types.ModuleType("deepspeed.git_version_info")
    built.installed_ops = {"cpu_adam": False}
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.git_version_info", built)
    with pytest.raises(UnsupportedCase, match=r"CPU Adam.* is compiled .* g\+\+ and ninja cannot be found"):
        require_compiler("cpu")
    (tmp_path / "g++").touch(mode=0o755)
    with pytest.raises(UnsupportedCase, match=r"first use, and ninja cannot be found"):
        require_compiler("cpu")
    (tmp_path / "ninja").touch(mode=0o755)
    require_compiler("cpu")
    (tmp_path / "ninja").unlink()
    built.installed_ops["cpu_adam"] = True  # by DS_BUILD_CPU_ADAM=1 when DeepSpeed was installed
    require_compiler("cpu")


@pytest.mark.parametrize(
    ("links_cuda", "device", "cuda_home", "skips"),
    [
        (True, "cuda", None, True),
        (True, "cuda", "/usr/local/cuda", False),
        (True, "cpu", None, False),
        (True, "musa", None, False),
        (False, "cuda", None, False),  # DeepSpeed 0.19
    ],
)
def test_offload_without_the_toolkit_that_an_older_deepspeed_links_is_a_skip(
    monkeypatch, links_cuda, device, cuda_home, skips
):
    pytest.importorskip("deepspeed")
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import builder
    from torch.utils import cpp_extension

    monkeypatch.setitem(installed_ops, "cpu_adam", False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", cuda_home)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    if links_cuda:
        monkeypatch.setattr(builder, "TorchCPUOpBuilder", type("TorchCPUOpBuilder", (), {}), raising=False)
    else:
        monkeypatch.delattr(builder, "TorchCPUOpBuilder", raising=False)
    refused = pytest.raises(
        UnsupportedCase, match=r"CPU Adam of DeepSpeed \S+ is linked with the CUDA toolkit, .*CUDA_HOME"
    )
    with refused if skips else contextlib.nullcontext():
        require_compiler(device)


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_device"), [({}, False, False), ({"offload_optimizer": True}, False, True)]
)
def test_offloaded_state_of_a_device_is_stepped_by_what_must_be_compiled(options, on_cpu, on_device):
    strategy = find("zero2", options)
    assert (on_cpu, on_device) == (strategy.compiles("cpu"), strategy.compiles("cuda"))


@pytest.mark.parametrize(
    ("device", "variable", "said"),
    [
        ("cpu", "CXX", "torch.compile for cpu needs a C++ compiler: CXX is not set, and g++ is not found"),
        ("meta", "CC", "torch.compile for meta needs a C compiler: CC is not set, and gcc or clang is not found"),
    ],
)
def test_torch_compile_without_a_compiler_is_a_skip_that_names_it(monkeypatch, tmp_path, device, variable, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UnsupportedCase, match=re.escape(said)):
        _require_compiler(torch.device(device))
    compiler = "g++" if device == "cpu" else "gcc"
    (tmp_path / compiler).touch(mode=0o755)
    with contextlib.suppress(UnsupportedCase):  # no code generator for meta: the next question
        _require_compiler(torch.device(device))
    monkeypatch.setenv(variable, "missing-cc")
    with pytest.raises(UnsupportedCase, match=f"compiler: {variable}=missing-cc is not found"):
        _require_compiler(torch.device(device))


def test_the_lock_of_a_killed_compilation_is_cleared_and_a_living_one_s_is_waited_for(tmp_path):
    with compiling(tmp_path) as folder:
        left = folder / "cpu_adam" / "lock"
        left.parent.mkdir()
        left.touch()
        with (folder / "compiling").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert left.exists()  # as a process that is killed while torch compiles leaves it
    with compiling(tmp_path):
        assert not left.exists()


@pytest.mark.parametrize(
    ("device", "dtype", "allowed"),
    [("cpu", "fp32", 1e-5), ("musa", "fp32", 1e-5), ("cuda", "fp32", 5e-5), ("cuda", "bf16", 2e-2)],
)
def test_a_twin_in_fp32_may_differ_by_what_kernels_of_the_device_do(device, dtype, allowed):
    """CUDA's fp32 attention multiplies in three parts of TF32, ring attention by plain products."""
    assert allowed == tolerance_on(device, find("ddp"), plan(dtype=dtype))
