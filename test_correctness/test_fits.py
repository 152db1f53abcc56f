"""What cannot fit is refused with the figures; nothing is refused that might run."""

from __future__ import annotations

import pytest

from perfsuite.base.units import GIB
from perfsuite.platforms import load_catalog
from perfsuite.published.recipes import find
from perfsuite.workloads.training.fits import least_memory, why_not_fit
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
