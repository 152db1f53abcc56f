"""Every strategy and its options against one process: loss, gradients, and the loss after a step, on real ranks."""

import importlib.util
import re
from pathlib import Path

import pytest

from perfsuite.base.errors import WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.strategies import STRATEGIES
from perfsuite.workloads.training.parity import TrainParity
from test_correctness.helpers.local_driver import COMPILER, FSDP, WORKER, driver_fixture

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "how-to" / "add-a-strategy.md"
ONCE = Budget(smoke=True, timeout_s=300.0)
MODELS = ("gpt2", "llama2-70b", "latte-l", "opensora")
NARROW = {"strategy": "fsdp", "options": {"mixed_precision": True}, "dtype": "bf16"}
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None

driver = driver_fixture("torch", FSDP, COMPILER, WORKER, *(["deepspeed"] if DEEPSPEED else []))


def parity(driver, world_size, mesh="", **case):
    shape = MeshShape.parse(mesh) if mesh else None
    job = Job(workload=TrainParity(**case), world_size=world_size, shape=shape, budget=ONCE)
    return {record.name: record.value for record in driver.run(job).records}["parity_error"]


def needs_deepspeed(strategy):
    if strategy.startswith("zero") and strategy[-1].isdigit() and not DEEPSPEED:
        pytest.skip("needs deepspeed")


FAST = [
    (2, "ddp", {"options": {"overlap": False}}),
    (2, "ddp", {"options": {"bucket_mib": 0.01, "static_graph": True}, "model": "opensora"}),
    (3, "ddp", {"options": {"compression": "bf16"}}),
    (2, "fsdp", {"options": {"reshard": False}, "accumulation": 2, "model": "latte-l"}),
    (2, "fsdp", {"options": {"offload": True}}),
    (2, "fsdp", {"options": {"mixed_precision": True}, "dtype": "bf16", "model": "llama2-70b"}),
    (2, "ddp", {"dtype": "bf16", "checkpointing": "selective"}),
]


@pytest.mark.parametrize(("world_size", "strategy", "case"), FAST, ids=[f"{c[1]}-{n}" for n, c in enumerate(FAST)])
def test_options_change_no_result(driver, world_size, strategy, case):
    error = parity(driver, world_size, **{"model": "gpt2", "strategy": strategy, **case})
    loose = case.get("dtype") == "bf16" or case["options"].get("compression")
    assert error <= (2e-2 if loose else 1e-5)


def test_the_documented_strategy_of_somebody_else(driver, tmp_path, monkeypatch):
    files = dict(re.findall(r"^```python\n# file: (\S+)\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL))
    (tmp_path / "late.py").write_text(files["late.py"])
    (tmp_path / "deaf.py").write_text(files["late.py"].replace("parameter.grad /= dist.get_world_size(group)", "pass"))
    monkeypatch.syspath_prepend(tmp_path)
    assert parity(driver, 2, model="gpt2", strategy="late:Late", accumulation=2) <= 1e-5
    with pytest.raises(WrongResult, match=r"gradient of .* under deaf:Late on mesh dp2, accumulation 1"):
        parity(driver, 2, model="gpt2", strategy="deaf:Late")
    assert 'strategy="late:Late"' in files["test_late.py"]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"single", "hybrid"}))
def test_the_grid_in_full_precision(driver, strategy, model, world_size, accumulation):
    needs_deepspeed(strategy)
    assert parity(driver, world_size, model=model, strategy=strategy, accumulation=accumulation) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"hybrid"}))
def test_the_grid_in_half_precision(driver, strategy, model):
    needs_deepspeed(strategy)
    ranks = 1 if strategy == "single" else 2
    assert parity(driver, ranks, model=model, strategy=strategy, dtype="bf16") <= 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero_redundancy", "zero1", "zero2"])
def test_the_grid_of_checkpointing(driver, strategy, checkpointing):
    needs_deepspeed(strategy)
    ranks = 1 if strategy == "single" else 2
    assert parity(driver, ranks, model="llama2-70b", strategy=strategy, checkpointing=checkpointing) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *({"model": model, "strategy": "zero3", "checkpointing": "full"} for model in MODELS),
        *({"model": model, **NARROW} for model in MODELS),
        {"strategy": "zero1", "options": {"offload_optimizer": True}},
        {"strategy": "zero2", "options": {"offload_optimizer": True}},
        {"strategy": "zero2", "options": {"offload_optimizer": True, "cpu_adam": True}},
        {"strategy": "zero3", "options": {"offload_optimizer": True, "offload_parameters": True}},
        {"model": "opensora", "strategy": "fsdp", "accumulation": 2, "mesh": "dp_replicate2-dp_shard2"},
        *({"strategy": strategy, "compiled": True} for strategy in ("single", "ddp", "fsdp")),
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_more_than_the_grids(driver, case):
    needs_deepspeed(case["strategy"])
    ranks = 1 if case["strategy"] == "single" else 4 if "mesh" in case else 2
    mesh = [case["mesh"]] if "mesh" in case else []
    fields = {"model": "gpt2", **{name: value for name, value in case.items() if name != "mesh"}}
    assert parity(driver, ranks, *mesh, **fields) <= (2e-2 if "dtype" in case else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients(driver, model, compression):
    options = {"compression": compression}
    assert 1e-6 < parity(driver, 2, model=model, strategy="ddp", options=options) <= 2e-2
