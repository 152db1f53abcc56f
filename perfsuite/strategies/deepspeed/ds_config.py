"""A user's own ds_config.json: read, checked against the case, and completed; no DeepSpeed and no torch here.

DeepSpeed wants train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.  Fields that
the file leaves out or sets to "auto" come from the case; a field that says something else than the case is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.files import content, why
from perfsuite.record.codec import plain_json

MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
GLOBAL = "train_batch_size"
_DTYPE_SECTIONS = ("bf16", "fp16")
BUCKET, _PREFETCH_BUCKET = 500_000_000, 50_000_000
"""Numbers in DeepSpeed's buckets of its own choice (deepspeed/runtime/zero/config.py)."""


def read(path: str) -> dict[str, Any]:
    """The object in the file; raises InvalidParameter that names the file and what is wrong with it."""
    try:
        settings = plain_json(content(Path(path)))
    except OSError as error:
        raise InvalidParameter(f"config={path!r} cannot be read: {why(error)}; give a DeepSpeed JSON file") from None
    except ValueError as error:
        raise InvalidParameter(f"config={path!r} is no JSON: {error}; give a DeepSpeed JSON file") from None
    if not isinstance(settings, dict):
        kind = type(settings).__name__
        raise InvalidParameter(f"config={path!r} holds {kind}, not an object of DeepSpeed's settings")
    return settings


def batch_fields(config: Mapping[str, Any], path: str) -> dict[str, int]:
    """Those of the three batch fields that the file fixes.

    >>> batch_fields({"train_batch_size": 16, "gradient_accumulation_steps": "auto"}, "ds_config.json")
    {'train_batch_size': 16}
    """
    fixed = {}
    for name in (MICRO, ACCUMULATION, GLOBAL):
        value = config.get(name, "auto")
        if value == "auto":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidParameter(f"{path}: {name}={value!r} is no batch size; give a whole number from 1 or 'auto'")
        fixed[name] = value
    return fixed


def check_batches(fixed: Mapping[str, int], path: str, *, micro: int, accumulation: int, ranks: int) -> None:
    """Raise InvalidParameter where the file's batch fields contradict the case."""
    case = {MICRO: micro, ACCUMULATION: accumulation, GLOBAL: micro * accumulation * ranks}
    for name, value in fixed.items():
        if value != case[name]:
            rule = (
                f"is not micro_batch_size {micro} x accumulation {accumulation} x {ranks} ranks = {case[GLOBAL]}"
                if name == GLOBAL
                else f"is not the case's {case[name]}"
            )
            raise InvalidParameter(f"{path}: {name}={value} {rule}; change one of them, or set {name} to 'auto'")


def check_case(config: Mapping[str, Any], path: str, *, stage: int, dtype: str) -> None:
    """Raise InvalidParameter where the file's ZeRO stage, dtype or optimizer contradicts the case."""
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
        raise InvalidParameter(f"{path}: optimizer.type={kind!r} is not one that the case can step; choose AdamW")


def check_program(config: Mapping[str, Any], path: str, *, clip: float | None, loss_scale: float | None) -> None:
    """Raise InvalidParameter where the case clips or scales otherwise than the file; what it leaves open is the file's.

    DeepSpeed's own 0 means that nothing is clipped, and that the scale is dynamic.
    """
    fp16 = config.get("fp16", {})
    for name, written, case in (
        ("gradient_clipping", config.get("gradient_clipping", "auto"), clip),
        ("fp16.loss_scale", fp16.get("loss_scale", "auto"), loss_scale),
    ):
        if case is not None and written not in ("auto", case):
            raise InvalidParameter(
                f"{path}: {name}={written!r} is not the case's {case:g}; change one of them, or leave the case's out"
            )


def complete(
    config: Mapping[str, Any], *, stage: int, dtype: str, micro: int, accumulation: int, parameters: int
) -> dict[str, Any]:
    """The settings for DeepSpeed: the user's, with what they leave open.

    ZeRO's default buckets hold 5e8 numbers: 2 GB of fp32, whatever the model.  Here a bucket is at most the model, too.
    The optimizer is made outside, with the user's settings: DeepSpeed's own would be compiled first.
    """
    full = {name: value for name, value in config.items() if name not in ("optimizer", GLOBAL)}
    full[MICRO], full[ACCUMULATION] = micro, accumulation
    bucket = min(parameters, BUCKET)
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        ahead = min(parameters // 4, _PREFETCH_BUCKET)
        zero |= {"stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": 0}
    written = {name: value for name, value in config.get("zero_optimization", {}).items() if value != "auto"}
    full["zero_optimization"] = {**zero, **written, "stage": stage}
    for section in _DTYPE_SECTIONS:
        full[section] = {**config.get(section, {}), "enabled": dtype == section}
    full.setdefault("steps_per_print", 10**9)
    # Without it DeepSpeed refuses an optimizer of torch's beside offload, and would compile its own.
    full["zero_force_ds_cpu_optimizer"] = False
    full["zero_allow_untested_optimizer"] = True
    return full


def adam_settings(config: Mapping[str, Any], learning_rate: float) -> dict[str, Any]:
    """Keyword arguments of AdamW: the user's optimizer section, else ``learning_rate`` alone.

    >>> adam_settings({"optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": "auto"}}}, 1e-4)
    {'lr': 0.0002}
    """
    written = config.get("optimizer", {}).get("params", {})
    known = {
        name: tuple(value) if name == "betas" else value
        for name, value in written.items()
        if name in ("lr", "betas", "eps", "weight_decay") and value != "auto"
    }
    return {"lr": learning_rate, **known}
