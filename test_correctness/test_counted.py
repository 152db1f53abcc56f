"""What a block moves and keeps, counted under fake tensors: equal to the rows that projections use."""

import dataclasses

import pytest
import torch

from perfsuite.models import find
from perfsuite.models.build import build
from perfsuite.projection.counted import (
    COMPILED,
    COUNTED,
    COUNTED_OF,
    KEPT_END_BYTES,
    OPTIMIZER_BYTES,
    OPTIMIZER_KERNELS,
    TENSORS,
    counted,
)
from perfsuite.projection.implementation import implementation_of, on_family
from perfsuite.record.step import Training
from tools.count_blocks import WAYS, Sizes, count_end, count_optimizer, count_row, kind_of, probe

FAST = [("gpt", "autocast")]
# Statistics of norms, rotary tables and words of captions grow with neither of what is counted.
SIZELESS = 0.1


@pytest.mark.parametrize(
    ("kind", "way"), [row if row in FAST else pytest.param(*row, marks=pytest.mark.slow) for row in COUNTED]
)
def test_row_is_what_a_dry_run_counts(kind, way):
    assert near(count_row(kind, way)) == dataclasses.asdict(COUNTED[kind, way])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), COMPILED)
def test_row_is_what_the_compiler_schedules(kind, way):
    assert near(count_row(kind, way, compiled=True)) == dataclasses.asdict(COMPILED[kind, way])


def near(counts):
    return {name: pytest.approx(value, abs=SIZELESS) for name, value in dataclasses.asdict(counts).items()}


def test_bytes_of_a_block_counted_by_hand():
    """GPT in 16 bits, forward: two norms move 4 + 4 bytes, two residuals 6 + 6; GELU reads 2 and writes 2."""
    row = COUNTED["gpt", "narrow"]
    assert (20, 4) == (row.forward_width_bytes, row.forward_hidden_bytes)
    # Casts of a parameter from 4 to 2 bytes and of its gradient back.
    assert (6, 6) == (COUNTED["gpt", "autocast"].forward_weight_bytes, COUNTED["gpt", "autocast"].backward_weight_bytes)


def test_a_compiler_joins_a_sum_with_the_norm_behind_it():
    """16 bits, forward: a norm 2 + 2; a sum with a norm 2 + 2 read, 2 + 2 written; a sum 4 + 2."""
    assert COMPILED["gpt", "narrow"].forward_width_bytes == 4 + 8 + 6
    for row in COMPILED:
        less, more = COMPILED[row], COUNTED[row]
        assert less.forward_width_bytes < more.forward_width_bytes
        assert less.forward_kernels < more.forward_kernels
    assert set(COMPILED) == {row for row in COUNTED if not row[0].startswith("moe")}


def test_a_compiled_step_moves_what_the_compiler_scheduled():
    model = find("llama2-7b")
    training = Training(model=model.name, dtype="bf16", compiled=True, checkpointing="full")
    code = implementation_of(model, training)
    assert code.forward_width_bytes == COMPILED["llama", "autocast"].forward_width_bytes
    assert code.source.endswith("llama2-7b, compiled")
    assert code.stops_early


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_a_block_and_of_the_rest(kind):
    one, two = (probe(find(COUNTED_OF[kind]), layers) for layers in (1, 2))
    with torch.device("meta"):
        few, many = (len(list(build(model).parameters())) for model in (one, two))
    block = (many - few) // (two.layers - one.layers)
    assert TENSORS[kind] == (block, few - one.layers * block)


@pytest.mark.parametrize(("kind", "way"), KEPT_END_BYTES)
def test_the_end_of_a_model_keeps_what_a_dry_run_counts(kind, way):
    """Rotary tables, which grow with no width, are a hundredth of a width here."""
    assert count_end(find(COUNTED_OF[kind]), WAYS[way]) == pytest.approx(KEPT_END_BYTES[kind, way], abs=0.2)


def test_optimizer_moves_what_the_row_says():
    assert (OPTIMIZER_BYTES, OPTIMIZER_KERNELS) == count_optimizer()


def test_block_of_a_step():
    assert counted(find("gpt3-13b"), Training(model="gpt3-13b", dtype="bf16")) is COUNTED["gpt", "autocast"]
    experts, training = find("moe-tiny"), Training(model="moe-tiny")
    assert counted(experts, training) is COUNTED["moe", "plain"]
    assert counted(experts, training, grouped=False) is COUNTED["moe-each", "plain"]


def test_rows_of_experts_counted_by_hand():
    """16 bits, forward: 2 to make rows, 4 to put an empty one behind, 4 to choose, 4 to weigh, 2 + 2 to add up."""
    assert COUNTED["moe", "narrow"].forward_row_bytes == 2 + 4 + 4 + 4 + 2 + 2


def test_experts_one_by_one_join_what_each_computes():
    one, each = COUNTED["moe", "plain"], COUNTED["moe-each", "plain"]
    # Three products, each with a copy of all its rows; gradients of matrices joined as well.
    assert each.forward_hidden_bytes - one.forward_hidden_bytes == 2 * 8
    assert each.forward_row_bytes - one.forward_row_bytes == 8
    assert each.backward_weight_bytes > one.backward_weight_bytes


def test_family_without_grouped_products_starts_experts_one_by_one():
    model, training = find("moe-tiny"), Training(model="moe-tiny")
    code = implementation_of(model, training)
    assert code.forward_row_bytes == COUNTED["moe", "plain"].forward_row_bytes
    assert on_family(code, model, training, "cuda") == code
    without = on_family(code, model, training, "musa")
    assert without.forward_row_bytes == COUNTED["moe-each", "plain"].forward_row_bytes
    assert without.block_tensors == 10


BESIDE_EXPERTS = Sizes(tokens=61, words=250, hidden=(168,), rows=244, width=96, experts=8, keys=24)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, 61, 96), "width"),
        ((123, 96), "width"),
        ((244, 96), "rows"),
        ((245, 96), "rows"),
        ((2, 61, 2, 96), "rows"),
        ((31, 96), "rows"),
        ((31, 168), "hidden"),
        ((2, 61, 8), "choices"),
        ((244,), "choices"),
        ((8, 96), "weights"),
        ((24, 96), "weights"),
        ((8, 96, 168), "weights"),
        ((250, 96), "weights"),
    ],
)
def test_shape_beside_experts(shape, kind):
    assert kind == kind_of(shape, BESIDE_EXPERTS)
