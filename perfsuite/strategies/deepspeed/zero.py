"""DeepSpeed ZeRO: stage 0 is plain data parallelism, 1 spreads optimizer state, 2 gradients too, 3 parameters too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Process, Rank
from perfsuite.strategies.base import Strategy, require_choice
from perfsuite.strategies.deepspeed import ds_config
from perfsuite.strategies.plan import Plan

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Zero(Strategy):
    """Options of one ZeRO stage."""

    stage: int
    """0 to 3; part of the strategy's name."""
    offload_optimizer: bool = False
    """Optimizer state lives in host memory and steps there (stages 1 to 3)."""
    cpu_adam: bool = False
    """Offloaded state steps by DeepSpeed's CPU Adam on a CPU too, where torch's does otherwise.  The first case that
    wants it compiles it, once for an installation: two files, 132 s on two cores."""
    offload_parameters: bool = False
    """Parameters live in host memory (stage 3)."""
    config: str = ""
    """Path of a ds_config.json of the user's."""

    process: ClassVar[Process] = Process()
    """DeepSpeed keeps groups and settings in its modules: whoever ran it can run nothing else."""
    preload: ClassVar[tuple[str, ...]] = ("deepspeed", "torch._inductor.compile_fx")
    """Its engine has functions that torch.compile decorates: seconds of importing torch's compiler in every rank."""
    ignorable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_choice(self.name, "stage", self.stage, (0, 1, 2, 3))
        if self.offload_optimizer and self.stage == 0:
            raise InvalidParameter("offload_optimizer needs spread optimizer state; choose zero1, zero2 or zero3")
        if self.cpu_adam and not self.offload_optimizer:
            raise InvalidParameter("cpu_adam steps optimizer state in host memory; set offload_optimizer too")
        if self.offload_parameters and self.stage != 3:
            raise InvalidParameter(
                f"offload_parameters needs spread parameters, which {self.name} has not; choose zero3"
            )

    @property
    def name(self) -> str:  # type: ignore[override] # the stage is part of it
        """zero0 to zero3."""
        return f"zero{self.stage}"

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter where a ds_config.json contradicts the case."""
        if not self.config:
            return
        written = ds_config.read(self.config)
        ds_config.check_batches(
            ds_config.batch_fields(written, self.config),
            self.config,
            micro=plan.micro_batch_size,
            accumulation=plan.accumulation,
            ranks=shape.replicas,
        )
        ds_config.check_case(written, self.config, stage=self.stage, dtype=plan.dtype)
        ds_config.check_program(written, self.config, clip=plan.clip, loss_scale=plan.loss_scale)

    def narrows(self, plan: Plan) -> bool:
        """In bf16 and fp16 DeepSpeed trains a narrow copy of the parameters."""
        return plan.half

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any] | None:
        """What the stage spreads; gradients travel in the dtype that is trained.

        None with a ds_config.json, whose every setting counts, and with offloading.
        """
        if self.config or self.offload_optimizer or self.offload_parameters:
            return None
        return {
            "sharding": ("none", "optimizer", "gradients", "parameters")[self.stage],
            # Source: deepspeed/runtime/zero/config.py: overlap_comm is on in stage 3 alone unless asked for.
            "overlap": self.stage == 3,
            "gradient_dtype": plan.dtype if plan.half else "fp32",
            "bucket_bytes": (2.0 if plan.half else 4.0) * min(plan.model.parameters, ds_config.BUCKET)
            if self.stage
            else 0.0,
        }

    def settings(self, plan: Plan) -> dict[str, Any]:
        """What DeepSpeed is given."""
        written = ds_config.read(self.config) if self.config else {}
        full = ds_config.complete(
            written,
            stage=self.stage,
            dtype=plan.dtype,
            micro=plan.micro_batch_size,
            accumulation=plan.accumulation,
            parameters=plan.model.parameters,
        )
        if plan.clip is not None:
            full["gradient_clipping"] = plan.clip
        if plan.loss_scale is not None:
            full["fp16"]["loss_scale"] = plan.loss_scale
        for asked, section in (
            (self.offload_optimizer, "offload_optimizer"),
            (self.offload_parameters, "offload_param"),
        ):
            if asked:
                full["zero_optimization"].setdefault(section, {"device": "cpu"})
        return full

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """The engine over all ranks.  Raises UnsupportedCase where DeepSpeed is not installed."""
        require_deepspeed(rank, f"strategy {self.name}")
        if self.compiles(rank.device.type):
            require_compiler()
        from perfsuite.strategies.deepspeed.engine import build_engine

        written = ds_config.read(self.config) if self.config else {}
        return build_engine(rank, plan, self.settings(plan), written, compiled=self.compiles(rank.device.type))

    def compiles(self, device: str) -> bool:
        """Whether the optimizer is DeepSpeed's CPU Adam, which is compiled when it is first wanted."""
        return self.offload_optimizer and (self.cpu_adam or device != "cpu")


def require_deepspeed(rank: Rank, who: str) -> None:
    """Import DeepSpeed for the rank's device.  Raises UnsupportedCase, which names ``who``, where it is missing."""
    if rank.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # type: ignore[import-untyped]  # noqa: F401 - no types; the first import, with the accelerator named
    except Exception as error:  # triton raises a RuntimeError in it where there is no GPU
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UnsupportedCase(
            f"{who} needs DeepSpeed, which cannot be imported ({reason}); install it with pip install 'perfsuite[zero]'"
        ) from None


def require_compiler() -> None:
    """Raises UnsupportedCase, which names what is missing, where DeepSpeed's CPU Adam cannot be compiled."""
    from deepspeed.git_version_info import installed_ops  # type: ignore[import-untyped]  # no types

    compiler = os.environ.get("CXX", "g++")
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    if missing and not installed_ops.get("cpu_adam"):
        raise UnsupportedCase(
            f"DeepSpeed's CPU Adam, which steps offloaded state, is compiled when it is first wanted, and "
            f"{' and '.join(missing)} cannot be found on the path; install it, or leave offload_optimizer out"
        )
