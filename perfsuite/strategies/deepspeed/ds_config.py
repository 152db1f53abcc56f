"""A user's ds_config.json: read, compared with the case and completed, without DeepSpeed and torch.

DeepSpeed wants train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.  Fields that
are absent or "auto" come from the case; a field that contradicts the case is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.files import content, why
from perfsuite.record.codec import plain_json
from perfsuite.strategies.plan import Plan

MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
GLOBAL = "train_batch_size"
_DTYPE_SECTIONS = ("bf16", "fp16")
BUCKET, _PREFETCH_BUCKET = 500_000_000, 50_000_000
"""DeepSpeed's default bucket sizes, in numbers (deepspeed/runtime/zero/config.py)."""


def read(path: str) -> dict[str, Any]:
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


def check(config: Mapping[str, Any], path: str, plan: Plan, *, stage: int, ranks: int) -> None:
    """Raise InvalidParameter if the file's batches, stage, dtype, optimizer, clipping or scale contradict the case.

    Of clipping and scale a value set by one of them counts; DeepSpeed's 0 means no clipping, and a dynamic scale.
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


def complete(config: Mapping[str, Any], plan: Plan, *, stage: int) -> dict[str, Any]:
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
