"""DeepSpeed ZeRO: stage 0 is data parallelism, 1 also spreads optimizer state, 2 gradients, 3 parameters."""

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
    """0 to 3; it is part of the strategy's name."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory and step it there (stages 1 to 3)."""
    cpu_adam: bool = False
    """Step offloaded state by DeepSpeed's CPU Adam on a CPU too, instead of torch's Adam. The first case compiles it,
    once per installation: two files, 132 s on two cores."""
    offload_parameters: bool = False
    """Keep parameters in host memory (stage 3)."""
    config: str = ""
    """Path of a user's ds_config.json."""

    process: ClassVar[Process] = Process()
    """Processes of its own: DeepSpeed keeps groups and settings in modules, so they can run nothing else."""
    preload: ClassVar[tuple[str, ...]] = ("deepspeed", "torch._inductor.compile_fx")
    """Its engine uses torch.compile, whose import takes seconds on every rank."""
    ignorable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_choice(self.name, "stage", self.stage, (0, 1, 2, 3))
        if self.offload_optimizer and self.stage == 0:
            raise InvalidParameter("offload_optimizer needs spread optimizer state; choose zero1, zero2 or zero3")
        if self.cpu_adam and not self.offload_optimizer:
            raise InvalidParameter("cpu_adam needs optimizer state in host memory; set offload_optimizer too")
        if self.offload_parameters and self.stage != 3:
            raise InvalidParameter(
                f"offload_parameters needs spread parameters, and {self.name} spreads none; choose zero3"
            )

    @property
    def name(self) -> str:  # type: ignore[override] # the stage is part of it
        """zero0 to zero3."""
        return f"zero{self.stage}"

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter if a ds_config.json contradicts the case."""
        if self.config:
            written = ds_config.read(self.config)
            ds_config.check(written, self.config, plan, stage=self.stage, ranks=shape.replicas)

    def narrows(self, plan: Plan) -> bool:
        """Return whether the dtype is narrow: then DeepSpeed trains a narrow copy of the parameters."""
        return plan.half

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any] | None:
        """Return the sharding of the stage; gradients are sent in the trained dtype.  None with offload, and with a
        ds_config.json, whose settings the record cannot express.
        """
        if self.config or self.offload_optimizer or self.offload_parameters:
            return None
        bucket = min(plan.model.parameters, ds_config.BUCKET)
        return {
            "sharding": ("none", "optimizer", "gradients", "parameters")[self.stage],
            # Source: deepspeed/runtime/zero/config.py: overlap_comm is on in stage 3 alone unless asked for.
            "overlap": self.stage == 3,
            "gradient_dtype": plan.dtype if plan.half else "fp32",
            "bucket_bytes": (2.0 if plan.half else 4.0) * bucket if self.stage else 0.0,
        }

    def settings(self, plan: Plan) -> dict[str, Any]:
        """Return the settings for DeepSpeed."""
        full = ds_config.complete(ds_config.read(self.config) if self.config else {}, plan, stage=self.stage)
        sections = {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_parameters}
        for section, offloaded in sections.items():
            if offloaded:
                full["zero_optimization"].setdefault(section, {"device": "cpu"})
        return full

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return a trainer with the engine over all ranks; raises UnsupportedCase if DeepSpeed is not installed."""
        require_deepspeed(rank, f"strategy {self.name}")
        if self.compiles(rank.device.type):
            require_compiler()
        from perfsuite.strategies.deepspeed.engine import build_engine

        written = ds_config.read(self.config) if self.config else {}
        return build_engine(rank, plan, self.settings(plan), written, compiled=self.compiles(rank.device.type))

    def compiles(self, device: str) -> bool:
        """Return whether the optimizer is DeepSpeed's CPU Adam, which is compiled at its first use."""
        return self.offload_optimizer and (self.cpu_adam or device != "cpu")


def require_deepspeed(rank: Rank, who: str) -> None:
    """Import DeepSpeed for the rank's device; raises UnsupportedCase that names ``who`` needs it."""
    if rank.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # type: ignore[import-untyped]  # noqa: F401 - no types; the first import, with the accelerator named
    except Exception as error:  # its triton raises a RuntimeError without a GPU
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UnsupportedCase(
            f"{who} needs DeepSpeed, which cannot be imported ({reason}); install it with pip install 'perfsuite[zero]'"
        ) from None


def require_compiler() -> None:
    """Raise UnsupportedCase, with the missing programs, if DeepSpeed's CPU Adam cannot be compiled."""
    from deepspeed.git_version_info import installed_ops  # type: ignore[import-untyped]  # no types

    compiler = os.environ.get("CXX", "g++")
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    if missing and not installed_ops.get("cpu_adam"):
        raise UnsupportedCase(
            f"DeepSpeed's CPU Adam, which steps offloaded state, is compiled at its first use, and "
            f"{' and '.join(missing)} cannot be found on the path; install it, or leave offload_optimizer out"
        )
