"""One linear layer split over ranks: every split against one process, its messages, its parts, what it refuses."""

from dataclasses import dataclass

import pytest
import torch

from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.record.result import Peaks, Work
from perfsuite.record.workload import Budget
from perfsuite.workloads.tensor_linear import SPLITS, TensorLinear, TensorLinearStep
from test_correctness.helpers.bare_rank import BareRank
from test_correctness.helpers.local_driver import WORKER, driver_fixture, run

QUICK = Budget(min_rounds=3, max_time_s=0.0, warmup_time_s=0.0, timeout_s=120.0)
SPLIT = [name for name in SPLITS if name != "none"]

driver = driver_fixture("torch", WORKER)


@dataclass(frozen=True, kw_only=True)
class ForgetfulLinear(TensorLinear):
    """Its collectives give what goes in, as often as it takes to have the right shape."""

    def build(self, rank):
        return _ForgetfulStep(self, rank)


class _ForgetfulStep(TensorLinearStep):
    def _exchange(self, collective, tensor, *, dim):
        if collective == "all_gather":
            return tensor.repeat(self._ranks if dim == 0 else 1, self._ranks if dim == 1 else 1)
        return self._own_part(tensor, dim) if collective == "reduce_scatter" else tensor


def linear(split, ranks, kind=TensorLinear, **changes):
    sizes = {"features_in": 24, "features_out": 40, "rows": 16}
    return kind(**{"split": split, "mesh": f"tp{ranks}" if ranks > 1 else "1", **sizes, **changes})


def measured(driver, workload):
    return run(driver, workload, workload.mesh, budget=QUICK)


def test_one_rank_computes_what_autograd_does():
    workload, rank = linear("none", 1), BareRank()
    rank.shape = MeshShape.parse("1")
    step = workload.build(rank)
    step.run()
    workload.check(rank, step)
    x, weight, gradient = step._whole()
    x.requires_grad_()
    weight.requires_grad_()
    output = torch.nn.functional.linear(x, weight)
    output.backward(gradient)
    for mine, theirs in ((step.output, output), (step.input_gradient, x.grad), (step.weight_gradient, weight.grad)):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("split", SPLIT)
def test_every_split_gives_what_one_process_computes(driver, split, ranks):
    found = measured(driver, linear(split, ranks))
    assert {"compute", "communication", "remainder"} == {span.name for span in found.spans}
    assert pytest.approx(found.median_s) == sum(span.time_s for span in found.spans)
    values = {
        each.name: each.value for each in derive(TensorLinear.metrics, work=Work(), measurement=found, peaks=Peaks())
    }
    times = {span.name: span.time_s for span in found.spans}
    assert values["communication_time_s"] == times["communication"]
    assert values["compute_time_s"] == times["compute"]
    moved = {"column": 24, "column_gather": 24 + 40 / 2, "row": 40, "row_scatter": 40}[split] * 16 * 4
    factor = 2 * (ranks - 1) / ranks  # of an all-reduce; an all-gather or a reduce-scatter has half of it
    assert pytest.approx(moved * factor / times["communication"] / 1e9) == values["tp_busbw_gb_per_s"]
    assert values["communication_bytes"] == sum(size for _, size in linear(split, ranks).messages())


@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_forgotten_message_is_found(driver, split, dtype):
    with pytest.raises(WrongResult, match=r"(Y|dX)( x)?\[.*elements beyond rounding"):
        measured(driver, linear(split, 2, ForgetfulLinear, dtype=dtype, rows=64))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
def test_other_dtypes_pass_their_check(driver, dtype):
    assert measured(driver, linear("column_gather", 4, dtype=dtype)).median_s > 0


def test_messages_of_report_004s_layer():
    """X of 8192 x 8192 in 16 bits is 128 MiB: the all-gather that makes column and row comparable is as large as one
    all-reduce, and costs half as much on every link."""
    whole = {"features_in": 8192, "features_out": 8192, "rows": 8192, "dtype": "bf16"}
    sent = {split: linear(split, 4, **whole).messages() for split in SPLIT}
    size = 2**27
    assert sent == {
        "column": (("all_reduce", size),),
        "column_gather": (("all_gather", size), ("all_reduce", size)),
        "row": (("all_reduce", size),),
        "row_scatter": (("reduce_scatter", size), ("all_gather", size)),
    }
    assert linear("none", 1, **whole).messages() == ()
    assert linear("row", 4, **whole).work(MeshShape.parse("tp4")).flops == {"exact": 6.0 * 8192**3}


@pytest.mark.parametrize(
    ("split", "ranks", "changes", "message"),
    [
        ("columns", 2, {}, "split='columns' is unknown; choose from none, column, column_gather, row, row_scatter"),
        ("row", 2, {"dtype": "int8"}, "dtype='int8' is unknown; choose from fp64, fp32, tf32, bf16, fp16"),
        ("none", 2, {}, "split='none' does not fit mesh tp2; choose mesh '1'"),
        ("row", 1, {}, "split='row' does not fit mesh 1; choose a mesh such as tp2"),
        ("row", 2, {"mesh": "dp2-tp2"}, "mesh dp2-tp2 has other axes than tp, which do not split a layer"),
        ("row", 2, {"rows": 0}, "rows=0 is not valid; choose a whole number from 1"),
        ("column", 3, {}, "features_out=40 does not divide by tp=3, .* choose 39 or 42"),
        ("row", 5, {}, "features_in=24 does not divide by tp=5, .* choose 20 or 25"),
        ("row_scatter", 3, {}, "rows=16 does not divide by tp=3, .* choose 15 or 18"),
    ],
)
def test_what_cannot_be_split_is_refused_with_legal_choices(split, ranks, changes, message):
    with pytest.raises(InvalidParameter, match=message):
        linear(split, ranks, **changes)
