"""One layer of experts over the axis ``ep``, forward and backward: cost of routing, with separate all-to-alls.

Shapes: B samples of S tokens on all ranks, D width, F features of an expert, E experts, k of a token.
Checked against a plain loop over the experts: the whole layer if one process can hold it, else some tokens' output.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.moe import Moe, nearest_skew
from perfsuite.record.result import Work
from perfsuite.record.workload import ITEM_BYTES, Process, Rank, Step
from perfsuite.strategies import expert
from perfsuite.workloads.checks import MeshWorkload, NativeWorkload, require_choices

if TYPE_CHECKING:
    from perfsuite.workloads.moe_layer_ranks import LayerStep

_DTYPES = ("fp32", "tf32", "bf16")
_IMPLEMENTATIONS = ("perfsuite", "deepspeed")
_AXES = ("dp", "ep")
_COUNT_BYTES = 8
_WHOLE = 2**22  # Largest layer, by numbers in its experts, that every rank computes as a whole for the check


@dataclass(frozen=True, kw_only=True)
class MoeLayer(NativeWorkload, MeshWorkload):
    """Forward and backward of a router and its experts; ranks along ``ep`` hold equal numbers of experts."""

    mesh: str  # Shape of the mesh, such as ep8, or dp2-ep4 for two independent groups.
    batch_size: int  # Samples of all ranks (B).
    sequence_length: int  # Tokens of a sample (S).
    width: int  # Features of a token (D).
    hidden: int  # Features of an expert (F).
    experts: int  # Experts of all ranks along ep (E).
    top_k: int = 2  # Experts of one token.
    capacity_factor: float | None = None
    """Largest share of an expert in a sample's rows, over its even share; None: no limit."""
    skew: float | None = None  # Rows of the fullest expert over the mean, imposed; None: as the router chooses.
    dtype: str = "fp32"  # fp32, tf32 or bf16.
    implementation: str = "perfsuite"
    """perfsuite, or deepspeed for ``deepspeed.moe.layer.MoE``, whose capacity counts a rank's tokens."""

    def __post_init__(self) -> None:
        require_choices(self, dtype=_DTYPES, implementation=_IMPLEMENTATIONS)
        deepspeed = self.implementation == "deepspeed"
        if deepspeed and self.skew is not None:
            raise InvalidParameter(
                f"skew={self.skew!r} does not work with DeepSpeed's router, which always chooses; leave it out"
            )
        if deepspeed and self.capacity_factor is not None and self.top_k != 2:
            raise InvalidParameter(
                f"top_k={self.top_k} with capacity_factor={self.capacity_factor} cannot be checked: DeepSpeed's drops "
                "are specified for top_k=2 only; choose 2, or capacity_factor=None"
            )
        self._require_mesh(MeshShape.parse(self.mesh))

    def _require_mesh(self, shape: MeshShape) -> None:
        others = [axis for axis in shape.names if axis not in _AXES]
        if others:
            raise InvalidParameter(
                f"mesh {shape} has axis {', '.join(others)}, which does not spread a single layer; "
                f"give it {' and '.join(_AXES)}"
            )
        expert.require(self.config, shape)
        if type(self.batch_size) is not int or self.batch_size < 1 or self.batch_size % shape.world_size:
            below = max(shape.world_size, int(self.batch_size) // shape.world_size * shape.world_size)
            raise InvalidParameter(
                f"batch_size={self.batch_size!r} does not divide by the {shape.world_size} ranks of mesh {shape}; "
                f"choose {below} or {below + shape.world_size}"
            )

    @property
    def config(self) -> Moe:
        """Model of this one layer; raises InvalidParameter for sizes that do not fit together."""
        return Moe(
            name="moe_layer",
            layers=1,
            width=self.width,
            heads=1,
            kv_heads=1,
            hidden=self.hidden,
            sequence_length=self.sequence_length,
            experts=self.experts,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            balance_weight=0.0,
            skew=self.skew,
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Time of the layer, its parts if they are measured, and figures of routing.  Communication is measured as it
        happens, not replayed: from a rank's send until its last row arrives, so it includes the wait for ranks that
        compute longer.
        """
        times = ("compute_time_s", "communication_time_s", "communication_percent")
        own = (*times, "communication_bytes", "ep_busbw_gb_per_s") if self.implementation == "perfsuite" else ()
        return ("step_time_s", *own, "expert_imbalance", "dropped_percent", "tflops_per_device")

    @property
    def process(self) -> Process | None:
        """Processes of its own for DeepSpeed, which keeps groups in modules, so that they can run nothing else."""
        return Process() if self.implementation == "deepspeed" else None

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that are slow to import."""
        return ("deepspeed",) if self.implementation == "deepspeed" else ()

    @property
    def checked_whole(self) -> bool:
        """Whether one process can hold the layer."""
        return 3 * self.experts * self.width * self.hidden <= _WHOLE

    def message_bytes(self, shape: MeshShape) -> int:
        """Return the bytes that one rank sends along ep in a forward and backward; the mean over ranks if routing is
        uneven.

        Rows and their gradients are sent there and back: four all-to-alls of k rows for each of a rank's tokens, or of
        all places with a capacity.  Without a capacity the counts of rows are sent first, 8 bytes per expert.

        >>> layer = MoeLayer(mesh="ep2", batch_size=2, sequence_length=8, width=4, hidden=8, experts=4)
        >>> layer.message_bytes(MeshShape.parse("ep2")) == 4 * (8 * 2 * 4 * 4) + 4 * 8
        True
        """
        if shape.size("ep") == 1:
            return 0
        samples, routing = self.batch_size // shape.world_size, self.config.routing
        if routing.capacity is None:
            rows, counts = samples * self.sequence_length * self.top_k, self.experts * _COUNT_BYTES
        else:
            rows, counts = samples * self.experts * routing.capacity, 0
        return 4 * rows * self.width * ITEM_BYTES[self.dtype] + counts

    def work(self, shape: MeshShape) -> Work:
        """Return 6 operations per token for every number in the router and in k experts; dropped rows count."""
        self._require_mesh(shape)
        tokens = float(self.batch_size * self.sequence_length)
        active = self.width * self.experts + self.top_k * 3 * self.width * self.hidden
        return Work(
            flops={"exact": 6.0 * tokens * active}, dtype=self.dtype, samples=float(self.batch_size), tokens=tokens
        )

    def twin(self) -> MoeLayer | None:
        """Return the same routing on a small layer, which is checked as a whole; None if this one is."""
        if self.checked_whole:
            return None
        shape, tokens = MeshShape.parse(self.mesh), 16
        experts = shape.size("ep") * -(-max(4, 2 * self.top_k) // shape.size("ep"))
        skew = self.skew
        if skew is not None:
            skew = nearest_skew(skew, tokens=tokens, experts=experts, top_k=self.top_k)
        return dataclasses.replace(
            self,
            batch_size=2 * shape.world_size,
            sequence_length=tokens,
            width=32,
            hidden=48,
            experts=experts,
            skew=skew,
        )

    def build(self, rank: Rank) -> LayerStep:
        """Return router, this rank's experts and its samples; raises UnsupportedCase if DeepSpeed is not installed."""
        from perfsuite.workloads.moe_layer_ranks import LayerStep

        return LayerStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless output and gradients equal those of a plain loop over the experts."""
        from perfsuite.workloads.moe_layer_ranks import LayerStep, check_tokens, check_whole

        assert isinstance(step, LayerStep)
        (check_whole if self.checked_whole else check_tokens)(step)
