"""What cannot fit is refused with the figures; nothing is refused that might run."""

import pytest

from perfsuite.platforms import load_catalog
from perfsuite.published.recipes import find
from perfsuite.workloads.training.train_step import TrainStep, estimate, why_not_fit

MODELS = load_catalog(()).models


def test_a_step_that_does_not_fit_says_what_it_needs_and_what_there_is():
    step = TrainStep(model="gpt3-175b", strategy="fsdp", checkpointing="full", micro_batch_size=1)
    assert why_not_fit(step, 8, MODELS["a100"]) == (
        "gpt3-175b under fsdp on 8 ranks takes 407 GiB by estimate (81.3 weights, 162.6 optimizer state, 81.3 "
        "gradients, 81.3 the optimizer's own), and NVIDIA A100 SXM 80 GB has 80 GiB; take fewer samples at once, "
        "recompute more, or spread it over 64 ranks"
    )
    assert not why_not_fit(step, 64, MODELS["a100"])
    assert not why_not_fit(step, 8, MODELS["cpu"])


def test_where_more_ranks_would_not_help_none_are_named():
    step = TrainStep(**find("004-gpt3-175b-dp64-8x8").parameters)
    assert why_not_fit(step, 64, MODELS["a100"]).endswith("recompute more, or spread it")


def test_ranks_on_a_cpu_share_the_memory_of_their_host():
    step = TrainStep(**find("002-llama2_7b-bf16-1x8").parameters)
    assert "and CPU has 23.5 GiB for all of them; take fewer" in why_not_fit(step, 8, MODELS["cpu"], 23.5)
    assert not why_not_fit(step, 8, MODELS["cpu"], 256.0)


def test_runs_that_the_reports_measured_are_not_refused():
    for name, platform in (
        ("000-opensora-1x1", "s4000"),
        ("001-latte-l-b1-w16-1x8", "rtx4090"),
        ("001-latte-xl-b2-w16-4x8", "rtx6000ada"),
        ("002-llama2_7b-bf16-1x8", "s4000"),
        ("003-DP_1x1x1_2_1536x16", "v100"),
        ("003-MP_PP_1x8x4_512_2304x24", "v100"),
    ):
        recipe = find(name)
        assert not why_not_fit(TrainStep(**recipe.parameters), recipe.world_size, MODELS[platform])


XL = {"model": "gpt2-xl", "dtype": "bf16", "checkpointing": "full", "micro_batch_size": 4}


def test_a_step_beyond_the_card_by_estimate_is_told_part_by_part():
    s4000 = MODELS["s4000"]
    step = TrainStep(model="gpt2-xl", strategy="ddp", global_batch_size=32)
    assert why_not_fit(step, 1, s4000) == (
        "gpt2-xl under ddp on 1 rank takes 192 GiB by estimate (5.8 weights, 11.6 optimizer state, 5.8 gradients "
        "with activations, 150.5 activations, 6.1 logits, 12.3 temporary), and MTT S4000 has 48 GiB; take fewer "
        "samples at once, recompute more, or spread it"
    )
    assert not why_not_fit(TrainStep(strategy="ddp", **XL), 2, s4000)


@pytest.mark.parametrize(
    ("case", "left_out"),
    [
        ({"strategy": "fsdp", "options": {"offload": True}}, ("parameters", "gradients", "optimizer", "updating")),
        ({"strategy": "zero2", "options": {"offload_optimizer": True, "cpu_adam": True}}, ("optimizer", "updating")),
        ({"strategy": "zero3", "options": {"offload_parameters": True}}, ("parameters",)),
    ],
)
def test_state_on_the_host_is_no_part_of_the_estimate(case, left_out):
    s4000 = MODELS["s4000"]
    whole = estimate(TrainStep(**{**case, "options": {}}, **XL), 2, s4000)
    moved = estimate(TrainStep(**case, **XL), 2, s4000)
    assert all(getattr(moved, part) == 0 for part in left_out)
    assert moved.activations == whole.activations
    assert moved.total < whole.total


def test_what_nobody_can_estimate_is_begun(tmp_path):
    """A ds_config.json decides for itself, and the memory of a CPU's row is not known."""
    config = tmp_path / "ds_config.json"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    step = TrainStep(strategy="zero2", options={"config": str(config)}, **XL)
    assert estimate(step, 2, MODELS["s4000"]) is None
    assert not why_not_fit(step, 2, MODELS["rtx4090"])
    assert not why_not_fit(TrainStep(model="gpt3-175b", strategy="ddp"), 2, MODELS["cpu"])
