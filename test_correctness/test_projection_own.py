"""What torch does beside the model in perfsuite's own steps: the optimizer's kernels, memory of sharded parameters."""

from __future__ import annotations

import pytest

from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Calibration, Constant
from perfsuite.projection.engine import Projector
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.memory import memory_of
from perfsuite.projection.operations import end_parameters
from perfsuite.record.result import Training

SMALL = {"layers": 3, "width": 64, "heads": 4, "words": 16, "words_multiple": 1, "context": 8}


def job(platform="s4000", **training):
    given = {"model": "gpt2-tiny", "overrides": SMALL, "dtype": "fp32", "attention": "math", **training}
    return TrainingJob.of(Training(**given), load_catalog().find(platform))


def optimizer_s(made):
    """Where a kernel takes a second and nothing else takes any time."""
    constants = {"kernel_us": 1e6, "matmul_fp32_tflops": 1e12, "link_gb_per_s": 1e12}
    known = {name: Constant(value=value, unit="", source="") for name, value in constants.items()}
    calibration = Calibration(device=made.device.name, constants=known)
    projector = Projector(
        model=made.architecture,
        code=made.implementation,
        calibration=calibration,
        devices_per_node=made.devices_per_node,
        dtype="fp32",
    )
    return sum(seconds for name, _, seconds in projector.step(made.layout).parts if name == "optimizer")


def test_the_optimizer_starts_kernels_for_a_list_of_tensors_or_for_each():
    tensors = 3 * 12 + 4
    assert 13 == pytest.approx(optimizer_s(job("h100")))
    assert 13 * tensors == pytest.approx(optimizer_s(job("s4000")))
    # DeepSpeed's parameters are one flat tensor.
    assert 13 == pytest.approx(optimizer_s(job("s4000", strategy="zero1", layout="dp2", sharding="optimizer")))
    # A stage has its own blocks, and no more.
    assert 13 * (12 + 2) == pytest.approx(optimizer_s(job("s4000", layout="pp3", strategy="pipeline", schedule="1f1b")))


def passes(made):
    """Bytes beside what a rank keeps for good, at the fullest moment."""
    found = memory_of(made.architecture, made.layout, made.implementation)
    return found.activations + found.logits + found.temporary, found


@pytest.mark.parametrize("batch", [1, 256])
def test_sharded_parameters_at_the_fullest_moment(batch):
    """Few tokens: behind the middle block, whose gradients are there beside those that are scattered; many: inside the
    last block."""
    made = job(strategy="fsdp", layout="dp2", sharding="parameters", micro_batch_size=batch)
    model, layout = made.architecture, made.layout
    total, found = passes(made)
    tokens, element = batch * model.tokens, 4
    block, ends = element * model.block_parameters(), element * end_parameters(model, layout, first=True, last=True)
    head = element * (model.vocabulary * model.width + 2 * model.width)
    flowing, ends_kept = element * tokens * model.width, 8 * tokens * model.width
    kept = (found.activations - ends_kept) / model.layers
    if batch == 1:  # whole: its own parameters, the next block's, two blocks' gradients; the last one's were halved
        expected = kept + ends + head + flowing + 4 * block + block / 2
    else:
        products = element * (tokens * model.hidden + model.hidden * model.width)
        expected = 3 * kept + ends + head + flowing + 2 * block + products
    assert pytest.approx(expected) == total


def test_buckets_wait_beside_the_gradients_of_several_micro_batches():
    one, three = (passes(job(strategy="ddp", layout="dp2", num_micro_batches=count))[1] for count in (1, 3))
    assert (one.gradients, 2 * one.gradients) == (one.accumulated, three.accumulated)
