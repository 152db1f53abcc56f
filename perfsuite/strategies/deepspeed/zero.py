"""DeepSpeed ZeRO, and a user's ds_config.json: read, compared with the case and completed, without DeepSpeed and torch.

Stage 0 is data parallelism, 1 also spreads optimizer state, 2 gradients, 3 parameters.

DeepSpeed wants train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.  Fields that
are absent or "auto" come from the case; a field that contradicts the case is refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.files import content, why
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Plan
from perfsuite.record.codec import plain_json
from perfsuite.record.workload import Process, Rank
from perfsuite.strategies.base import Strategy, require_choice

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer


MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
GLOBAL = "train_batch_size"
_DTYPE_SECTIONS = ("bf16", "fp16")
BUCKET, _PREFETCH_BUCKET = 500_000_000, 50_000_000
"""DeepSpeed's default bucket sizes, in numbers (deepspeed/runtime/zero/config.py)."""


def read_config(path: str) -> dict[str, Any]:
    """Return the object in the file; raises InvalidParameter that names the file and its error."""
    try:
        settings = plain_json(content(Path(path)))
    except OSError as error:
        raise InvalidParameter(f"config={path!r} cannot be read: {why(error)}; give a DeepSpeed JSON file") from None
    except ValueError as error:
        raise InvalidParameter(f"config={path!r} is not JSON: {error}; give a DeepSpeed JSON file") from None
    if not isinstance(settings, dict):
        kind = type(settings).__name__
        raise InvalidParameter(f"config={path!r} holds {kind}, not an object; give DeepSpeed's settings as an object")
    return settings


def batch_fields(config: Mapping[str, Any], path: str) -> dict[str, int]:
    """Return those of the three batch fields that the file sets.

    >>> batch_fields({"train_batch_size": 16, "gradient_accumulation_steps": "auto"}, "ds_config.json")
    {'train_batch_size': 16}
    """
    fixed = {}
    for name in (MICRO, ACCUMULATION, GLOBAL):
        value = config.get(name, "auto")
        if value == "auto":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidParameter(
                f"{path}: {name}={value!r} is not a batch size; give a whole number from 1 or 'auto'"
            )
        fixed[name] = value
    return fixed


def check_config(config: Mapping[str, Any], path: str, plan: Plan, *, stage: int, ranks: int) -> None:
    """Raise InvalidParameter if the file's batches, stage, dtype, optimizer, clipping or scale contradict the case.  Of
    clipping and scale a value set by one of them counts; DeepSpeed's 0 means no clipping, and a dynamic scale.
    """
    micro, accumulation, dtype = plan.micro_batch_size, plan.accumulation, plan.dtype
    case = {MICRO: micro, ACCUMULATION: accumulation, GLOBAL: micro * accumulation * ranks}
    for name, value in batch_fields(config, path).items():
        if value != case[name]:
            rule = (
                f"is not micro_batch_size {micro} x accumulation {accumulation} x {ranks} ranks = {case[GLOBAL]}"
                if name == GLOBAL
                else f"is not the case's {case[name]}"
            )
            raise InvalidParameter(f"{path}: {name}={value} {rule}; change one of them, or set {name} to 'auto'")

    written = config.get("zero_optimization", {}).get("stage", stage)
    if written not in (stage, "auto"):
        raise InvalidParameter(
            f"{path}: zero_optimization.stage={written!r} is not the stage of strategy zero{stage}; "
            f"run it with strategy zero{written}"
        )
    for section in _DTYPE_SECTIONS:
        enabled = config.get(section, {}).get("enabled", dtype == section)
        if enabled not in (dtype == section, "auto"):
            verb = "is enabled" if enabled else "is disabled"
            raise InvalidParameter(f"{path}: {section} {verb}, but the case has dtype={dtype!r}; change one of them")
    kind = config.get("optimizer", {}).get("type", "AdamW")
    if kind.lower() not in ("adam", "adamw"):
        raise InvalidParameter(f"{path}: optimizer.type={kind!r} is not supported; choose AdamW")

    fp16 = config.get("fp16", {})
    for name, value, asked in (
        ("gradient_clipping", config.get("gradient_clipping", "auto"), plan.clip),
        ("fp16.loss_scale", fp16.get("loss_scale", "auto"), plan.loss_scale),
    ):
        if asked is not None and value not in ("auto", asked):
            raise InvalidParameter(
                f"{path}: {name}={value!r} is not the case's {asked:g}; change one of them, or leave the case's out"
            )


def complete_config(config: Mapping[str, Any], plan: Plan, *, stage: int) -> dict[str, Any]:
    """Return the settings for DeepSpeed: the user's, completed from the case.  ZeRO's default buckets hold 5e8 numbers,
    2 GB of fp32; here a bucket is at most the model.  The optimizer is made outside with the user's settings, as
    DeepSpeed's own would be compiled first.
    """
    full = {name: value for name, value in config.items() if name not in ("optimizer", GLOBAL)}
    full[MICRO], full[ACCUMULATION] = plan.micro_batch_size, plan.accumulation
    parameters = plan.model.parameters
    bucket = min(parameters, BUCKET)
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        ahead = min(parameters // 4, _PREFETCH_BUCKET)
        zero |= {"stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": 0}
    written = {name: value for name, value in config.get("zero_optimization", {}).items() if value != "auto"}
    full["zero_optimization"] = {**zero, **written, "stage": stage}
    for section in _DTYPE_SECTIONS:
        full[section] = {**config.get(section, {}), "enabled": plan.dtype == section}
    full.setdefault("steps_per_print", 10**9)
    # Otherwise DeepSpeed refuses torch's optimizers together with offload, and compiles its own.
    full["zero_force_ds_cpu_optimizer"] = False
    full["zero_allow_untested_optimizer"] = True
    if plan.clip is not None:
        full["gradient_clipping"] = plan.clip
    if plan.loss_scale is not None:
        full["fp16"]["loss_scale"] = plan.loss_scale
    return full


def adam_settings(config: Mapping[str, Any], learning_rate: float) -> dict[str, Any]:
    """Return the keyword arguments of AdamW: the user's optimizer section, else ``learning_rate`` only.

    >>> adam_settings({"optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": "auto"}}}, 1e-4)
    {'lr': 0.0002}
    """
    written = config.get("optimizer", {}).get("params", {})
    names = ("lr", "betas", "eps", "weight_decay")
    chosen = {name: written[name] for name in names if written.get(name, "auto") != "auto"}
    if "betas" in chosen:
        chosen["betas"] = tuple(chosen["betas"])
    return {"lr": learning_rate, **chosen}


@dataclass(frozen=True, kw_only=True)
class Zero(Strategy):
    """Options of one ZeRO stage."""

    stage: int  # 0 to 3; it is part of the strategy's name.
    offload_optimizer: bool = False  # Keep optimizer state in host memory and step it there (stages 1 to 3).
    cpu_adam: bool = False
    """Step offloaded state by DeepSpeed's CPU Adam on a CPU too, instead of torch's Adam. The first case compiles it,
    once per installation: two files, 132 s on two cores."""
    offload_parameters: bool = False  # Keep parameters in host memory (stage 3).
    config: str = ""  # Path of a user's ds_config.json.

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
            written = read_config(self.config)
            check_config(written, self.config, plan, stage=self.stage, ranks=shape.replicas)

    def narrows(self, plan: Plan) -> bool:
        """Return whether the dtype is narrow: then DeepSpeed trains a narrow copy of the parameters."""
        return plan.half

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any] | None:
        """Return the sharding of the stage; None with offload or a ds_config.json, which the record cannot express."""
        if self.config or self.offload_optimizer or self.offload_parameters:
            return None
        bucket = min(plan.model.parameters, BUCKET)
        return {
            "sharding": ("none", "optimizer", "gradients", "parameters")[self.stage],
            # Source: deepspeed/runtime/zero/config.py: overlap_comm is on in stage 3 alone unless asked for.
            "overlap": self.stage == 3,
            "gradient_dtype": plan.dtype if plan.half else "fp32",
            "bucket_bytes": (2.0 if plan.half else 4.0) * bucket if self.stage else 0.0,
        }

    def settings(self, plan: Plan) -> dict[str, Any]:
        """Return the settings for DeepSpeed."""
        full = complete_config(read_config(self.config) if self.config else {}, plan, stage=self.stage)
        sections = {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_parameters}
        for section, offloaded in sections.items():
            if offloaded:
                full["zero_optimization"].setdefault(section, {"device": "cpu"})
        return full

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return a trainer with the engine over all ranks; raises UnsupportedCase if DeepSpeed is not installed."""
        require_deepspeed(rank, f"strategy {self.name}")
        if self.compiles(rank.device.type):
            require_compiler(rank.device.type)
        from perfsuite.strategies.deepspeed.engine import build_engine

        adam = adam_settings(read_config(self.config) if self.config else {}, plan.learning_rate)
        return build_engine(rank, plan, self.settings(plan), adam, compiled=self.compiles(rank.device.type))

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


def require_compiler(device: str) -> None:
    """Raise UnsupportedCase, with the missing programs, if DeepSpeed's CPU Adam for ``device`` cannot be compiled."""
    from deepspeed.git_version_info import installed_ops  # type: ignore[import-untyped]  # no types

    if installed_ops.get("cpu_adam"):
        return
    compiler = os.environ.get("CXX", "g++")
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    if missing:
        raise UnsupportedCase(
            f"DeepSpeed's CPU Adam, which steps offloaded state, is compiled at its first use, and "
            f"{' and '.join(missing)} cannot be found on the path; install it, or leave offload_optimizer out"
        )
    if device != "cuda":
        return
    from deepspeed import __version__
    from deepspeed.ops.op_builder import builder  # type: ignore[import-untyped]  # no types
    from torch.utils import cpp_extension

    # DeepSpeed 0.18.2 links it with CUDA's libraries, 0.19.8 does not.
    if hasattr(builder, "TorchCPUOpBuilder") and cpp_extension.CUDA_HOME is None:
        raise UnsupportedCase(
            f"CPU Adam of DeepSpeed {__version__} is linked with the CUDA toolkit, which cannot be found; set "
            "CUDA_HOME, install a newer DeepSpeed, or leave offload_optimizer out"
        )
