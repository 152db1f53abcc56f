"""One linear layer split over the ranks of a tensor-parallel mesh: forward and backward, with separate communication.

R rows of the input (tokens), I and O features of input and output.  Y (R, O) = X (R, I) W^T with W (O, I); the backward
computes dX = dY W and dW = dY^T X.  ``column`` and ``row`` are Megatron's names for W^T: split along O, along I.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.errors import InvalidParameter, nearest_multiples
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import ITEM_BYTES, Rank, Step
from perfsuite.workloads.checks import (
    ROUNDING,
    MeshWorkload,
    NativeWorkload,
    require_choices,
    require_counts,
    require_product,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Split:
    """The part of a layer on each rank, and its collectives."""

    cut: Literal["", "output", "input"]  # Features that are split
    forward: Literal["", "all_gather", "all_reduce", "reduce_scatter"] = ""
    """Collective that completes the layer's output."""
    before_backward: Literal["", "all_gather"] = ""  # Collective that completes the gradient of the output
    after_backward: Literal["", "all_reduce"] = ""  # Collective that completes the gradient of the input


SPLITS: Mapping[str, Split] = {
    "none": Split(cut=""),
    "column": Split(cut="output", after_backward="all_reduce"),
    "column_gather": Split(cut="output", forward="all_gather", after_backward="all_reduce"),
    "row": Split(cut="input", forward="all_reduce"),
    "row_scatter": Split(cut="input", forward="reduce_scatter", before_backward="all_gather"),
}
"""``column`` leaves the output split, for a row-parallel layer; ``column_gather`` gathers it. ``row_scatter`` leaves
each rank whole rows of the output, as sequence parallelism does."""


@dataclass(frozen=True, kw_only=True)
class TensorLinear(NativeWorkload, MeshWorkload):
    """Forward and backward of one linear layer without bias; the axis ``tp`` splits its weight."""

    split: str  # none, column, column_gather, row or row_scatter.
    mesh: str  # Shape of the mesh, such as tp4; 1 for ``none``.
    features_in: int  # Input features (I).
    features_out: int  # Output features (O).
    rows: int  # Rows (R), the same on every mesh.
    dtype: str = "fp32"  # fp64, fp32, tf32, bf16 or fp16.

    metrics: ClassVar[tuple[str, ...]] = (
        *("step_time_s", "compute_time_s", "communication_time_s", "communication_percent"),
        *("communication_bytes", "tp_busbw_gb_per_s"),
    )

    def __post_init__(self) -> None:
        require_counts(self, "features_in", "features_out", "rows")
        require_choices(self, split=SPLITS, dtype=ROUNDING)
        self._require_mesh(MeshShape.parse(self.mesh))

    def _require_mesh(self, shape: MeshShape) -> None:
        ranks = shape.size("tp")
        if shape.world_size != ranks:
            raise InvalidParameter(f"mesh {shape} has other axes than tp, which do not split a layer; give it only tp")
        if (ranks > 1) != bool(self.how.cut):
            legal = "mesh '1'" if ranks > 1 else "a mesh such as tp2"
            raise InvalidParameter(f"split={self.split!r} does not fit mesh {shape}; choose {legal}")
        split = {"output": ["features_out"], "input": ["features_in"], "": []}[self.how.cut]
        for name in [*split, *(["rows"] if self.how.forward == "reduce_scatter" else [])]:
            if getattr(self, name) % ranks:
                raise InvalidParameter(
                    f"{name}={getattr(self, name)} does not divide by tp={ranks}, over which split={self.split!r} "
                    f"spreads it; choose {nearest_multiples(getattr(self, name), ranks)}"
                )

    @property
    def how(self) -> Split:
        """The split of this name."""
        return SPLITS[self.split]

    def messages(self) -> tuple[tuple[str, int], ...]:
        """Return (collective, bytes of nccl-tests' S) of one rank's forward and backward, in order.

        >>> TensorLinear(split="column_gather", mesh="tp2", rows=4, features_in=8, features_out=16).messages()
        (('all_gather', 256), ('all_reduce', 128))
        """
        how, row_bytes, out = self.how, ITEM_BYTES[self.dtype] * self.rows, self.features_out
        steps = ((how.forward, out), (how.before_backward, out), (how.after_backward, self.features_in))
        return tuple((collective, row_bytes * features) for collective, features in steps if collective)

    def work(self, shape: MeshShape) -> Work:
        """Return 2 R I O operations for the output and as many for each gradient, over all ranks, for any split."""
        self._require_mesh(shape)
        return Work(flops={"exact": 6.0 * self.rows * self.features_in * self.features_out}, dtype=self.dtype)

    def build(self, rank: Rank) -> TensorLinearStep:
        """Return this rank's part of X, W and dY."""
        return TensorLinearStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless output and gradients are this rank's part of the results of one process."""
        assert isinstance(step, TensorLinearStep)
        step.check()


class TensorLinearStep(Step):
    """One rank's part of the layer: inputs from seeds that all ranks share, products and messages."""

    def __init__(self, workload: TensorLinear, rank: Rank) -> None:
        self._workload, self._rank = workload, rank
        self._ranks = rank.shape.size("tp")
        self._group = rank.group("tp") if self._ranks > 1 else None
        self._dtype = rank.dtype(workload.dtype)
        messages = workload.messages()
        moved = sum(size * busbw_factor(collective, self._ranks) for collective, size in messages)
        rank.record("communication_bytes", sum(size for _, size in messages), unit="bytes", reduce="equal")
        rank.record("tp_bus_bytes", moved, unit="bytes", reduce="equal")
        self.refill()

    def _whole(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return X (R, I), W (O, I), dY (R, O), standard normal, the same on every rank."""
        import torch

        case = self._workload
        shapes = ((case.rows, case.features_in), (case.features_out, case.features_in), (case.rows, case.features_out))
        generator = self._rank.generator(1)
        x, weight, gradient = (
            torch.empty(shape, dtype=self._dtype, device=self._rank.device).normal_(generator=generator)
            for shape in shapes
        )
        return x, weight, gradient

    def _own_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part along ``dim``."""
        return whole.chunk(self._ranks, dim=dim)[self._rank.rank].contiguous()

    def refill(self) -> None:
        """Fill the inputs from their seeds and clear the results."""
        x, weight, gradient = self._whole()
        how = self._workload.how
        if how.cut == "output":
            weight, gradient = self._own_part(weight, 0), gradient if how.forward else self._own_part(gradient, 1)
        if how.cut == "input":
            x, weight = self._own_part(x, 1), self._own_part(weight, 1)
        if how.before_backward:
            gradient = self._own_part(gradient, 0)
        self._x, self._weight, self._gradient = x, weight, gradient
        self.output = self.input_gradient = self.weight_gradient = x.new_empty(0)

    def run(self) -> None:
        """Run the forward, then both gradients, without overlap, so that the cost of the split is visible."""
        how = self._workload.how
        with self._rank.span("compute"):
            output = self._x @ self._weight.T
        self.output = self._exchange(how.forward, output, dim=1 if how.cut == "output" else 0)
        gradient = self._exchange(how.before_backward, self._gradient, dim=0)
        with self._rank.span("compute"):
            if how.cut == "output" and how.forward:  # this rank's columns of the whole gradient
                gradient = self._own_part(gradient, 1)
            input_gradient = gradient @ self._weight
            self.weight_gradient = gradient.T @ self._x
        self.input_gradient = self._exchange(how.after_backward, input_gradient, dim=0)

    def _exchange(self, collective: str, tensor: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Return the tensor after one of torch's functional collectives, which its tensor parallelism uses."""
        if not collective:
            return tensor
        import torch.distributed._functional_collectives as functional

        assert self._group is not None, "one rank needs no collective"
        with self._rank.span("communication"):
            if collective == "all_gather":
                sent = functional.all_gather_tensor(tensor, dim, self._group)
            elif collective == "reduce_scatter":
                sent = functional.reduce_scatter_tensor(tensor, "sum", dim, self._group)
            else:
                sent = functional.all_reduce(tensor, "sum", self._group)
            return functional.wait_tensor(sent)

    def check(self) -> None:
        """Check as :meth:`TensorLinear.check`."""
        x, weight, gradient = self._whole()
        how, parts = self._workload.how, self._ranks
        rows, columns = x, weight.T
        if how.forward == "reduce_scatter":
            rows = self._own_part(rows, 0)
        if how.cut == "output" and not how.forward:
            columns = self._own_part(columns, 1)
        self._require("Y", rows, columns, self.output, parts=parts if how.cut == "input" else 1)
        inputs = self._own_part(weight, 1) if how.cut == "input" else weight
        self._require("dX", gradient, inputs, self.input_gradient, parts=parts if how.after_backward else 1)
        outputs = self._own_part(gradient, 1) if how.cut == "output" else gradient
        of_input = self._own_part(x, 1) if how.cut == "input" else x
        self._require("dW", outputs.T, of_input, self.weight_gradient, parts=1)

    def _require(self, name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, parts: int) -> None:
        owner = f"{self._workload} on rank {self._rank.rank}"
        require_product(name, owner, a, b, out, dtype=self._workload.dtype, parts=parts)

    def close(self) -> None:
        """Free the tensors."""
        del self._x, self._weight, self._gradient, self.output, self.input_gradient, self.weight_gradient
