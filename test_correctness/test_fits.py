"""What cannot fit is refused with the figures; nothing is refused that might run."""

from __future__ import annotations

import pytest

from perfsuite.base.units import GIB
from perfsuite.platforms import load_catalog
from perfsuite.published.recipes import find
from perfsuite.workloads.training.fits import estimate, least_memory, why_beyond_estimate, why_not_fit
from perfsuite.workloads.training.train_step import TrainStep

PARAMETERS = 1_557_611_200
"""Of gpt2-xl."""


def state_bytes(world_size=4, **case):
    return least_memory(TrainStep(model="gpt2-xl", **case), world_size).state_bytes


@pytest.mark.parametrize(
    ("case", "bytes_of_a_parameter"),
    [
        ({"strategy": "ddp"}, 16),
        ({"strategy": "zero_redundancy"}, 8 + 8 / 4),
        ({"strategy": "fsdp"}, 16 / 4),
        ({"strategy": "fsdp", "options": {"reshard": False}}, 16 / 4 + 2),
        ({"strategy": "fsdp", "options": {"offload": True}}, 0),
        ({"strategy": "zero1"}, 4 + 12 / 4),
        ({"strategy": "zero2"}, 2 + 14 / 4),
        ({"strategy": "zero3"}, 16 / 4),
        ({"strategy": "hybrid", "mesh": "pp2-dp2"}, 16 / 4),
        ({"strategy": "hybrid", "mesh": "pp2-dp2", "options": {"data": "replicate"}}, 16 / 2),
        ({"strategy": "hybrid", "mesh": "pp4"}, 16 / 4),
    ],
)
def test_state_is_spread_as_the_strategy_spreads_it(case, bytes_of_a_parameter):
    assert bytes_of_a_parameter * PARAMETERS == pytest.approx(state_bytes(**case))


def test_what_is_refused_says_what_it_needs_and_what_there_is():
    recipe = find("004-strong-gpt3-175b-fsdp-1x8")
    step = TrainStep(**recipe.parameters)
    told = why_not_fit(step, 8, "NVIDIA A100 SXM 80 GB", 80.0)
    assert told == (
        "gpt3-175b under fsdp on 8 ranks needs at least 330 GiB on each (325 of state: 16 bytes x 174.6e9 parameters "
        "/ 8, 4 of blocks' inputs), and NVIDIA A100 SXM 80 GB has 80 GiB; it takes devices of 330 GiB, or 64 ranks"
    )
    spread = find("004-strong-gpt3-175b-fsdp-8x8")
    assert not why_not_fit(TrainStep(**spread.parameters), 64, "NVIDIA A100 SXM 80 GB", 80.0)
    assert not why_not_fit(step, 8, "CPU", None)


def test_where_more_ranks_would_not_help_none_are_named():
    step = TrainStep(**find("004-gpt3-175b-dp64-8x8").parameters)
    assert why_not_fit(step, 64, "an A100", 80.0).endswith("it takes devices of 2607 GiB")


def test_ranks_on_a_cpu_share_the_memory_of_their_host():
    step = TrainStep(**find("002-llama2_7b-bf16-1x8").parameters)
    told = why_not_fit(step, 8, "CPU", 23.5, shared=True)
    assert told.endswith("and CPU has 23.5 GiB for all of them; it takes a host of 125 GiB")
    assert not why_not_fit(step, 8, "CPU", 256.0, shared=True)


def test_runs_that_the_reports_measured_are_not_refused():
    """Report 000 to 002's cards held what they ran."""
    models = load_catalog(()).models
    for name, platform in (
        ("000-opensora-1x1", "s4000"),
        ("001-latte-l-b1-w16-1x8", "rtx4090"),
        ("001-latte-xl-b2-w16-4x8", "rtx6000ada"),
        ("002-llama2_7b-bf16-1x8", "s4000"),
        ("003-DP_1x1x1_2_1536x16", "v100"),
        ("003-MP_PP_1x8x4_512_2304x24", "v100"),
    ):
        recipe, device = find(name), models[platform]
        assert not why_not_fit(TrainStep(**recipe.parameters), recipe.world_size, device.title, device.memory.value)


def test_the_bound_is_below_what_a_step_was_seen_to_take():
    """GPT-2 1.5B in fp32 with a local batch of 8 took 62 GiB on an accelerator."""
    least = least_memory(TrainStep(model="gpt2-xl", strategy="ddp", micro_batch_size=8), 2)
    assert 16 * PARAMETERS / GIB < least.total_gib < 62


XL = {"model": "gpt2-xl", "dtype": "bf16", "checkpointing": "full", "micro_batch_size": 4}


def test_a_step_beyond_the_card_by_estimate_is_told_part_by_part():
    s4000 = load_catalog(()).find("s4000")
    step = TrainStep(model="gpt2-xl", strategy="ddp", global_batch_size=32)
    assert not why_not_fit(step, 1, s4000.title, s4000.memory.value)  # by the bound it might
    told = why_beyond_estimate(step, 1, s4000)
    assert told == (
        "gpt2-xl under ddp on 1 rank takes 192 GiB by estimate (5.8 weights, 11.6 optimizer state, 5.8 gradients "
        "with activations, 150.5 activations, 6.1 logits, 12.3 temporary), and MTT S4000 has 48 GiB; take fewer "
        "samples at once, recompute more, or spread it"
    )
    assert not why_beyond_estimate(TrainStep(strategy="ddp", **XL), 2, s4000)


@pytest.mark.parametrize(
    ("case", "left_out"),
    [
        ({"strategy": "fsdp", "options": {"offload": True}}, ("parameters", "gradients", "optimizer", "updating")),
        ({"strategy": "zero2", "options": {"offload_optimizer": True, "cpu_adam": True}}, ("optimizer", "updating")),
        ({"strategy": "zero3", "options": {"offload_parameters": True}}, ("parameters",)),
    ],
)
def test_state_on_the_host_is_no_part_of_the_estimate(case, left_out):
    s4000 = load_catalog(()).find("s4000")
    whole = estimate(TrainStep(**{**case, "options": {}}, **XL), 2, s4000)
    moved = estimate(TrainStep(**case, **XL), 2, s4000)
    assert all(getattr(moved, part) == 0 for part in left_out)
    assert moved.activations == whole.activations
    assert moved.total < whole.total


def test_what_nobody_can_estimate_is_begun(tmp_path):
    """A ds_config.json decides for itself, and the memory of a CPU's row is not known."""
    config = tmp_path / "ds_config.json"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    models = load_catalog(()).models
    step = TrainStep(strategy="zero2", options={"config": str(config)}, **XL)
    assert estimate(step, 2, models["s4000"]) is None
    assert not why_beyond_estimate(step, 2, models["rtx4090"])
    assert not why_beyond_estimate(TrainStep(model="gpt3-175b", strategy="ddp"), 2, models["cpu"])
