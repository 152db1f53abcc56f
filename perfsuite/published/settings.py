"""What a run sets up, under one name for each setting, whether a report states it or a case has it as parameters.

A training step: model and its shape, sequence_length, vocabulary, dtype, strategy and its options, mesh,
micro_batch_size, num_micro_batches, global_batch_size, checkpointing, data, ...; other workloads: their fields.  Every
run: devices, nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perfsuite import models
from perfsuite.base.errors import PerfsuiteError
from perfsuite.base.mesh import AXES, MeshShape
from perfsuite.published.lookup import PublishedRun, snake

_NOT_SET_UP = ("builds", "loss_steps", "target_loss")
"""Fields of a training step that say what is looked at beside it."""
_NAMES_NO_SETTING = ("config", "device", "component", "collective", "parameters", "active_parameters")
"""What distinguishes rows of a table and sets up nothing, or follows from the model."""
_RENAMED = {"accumulation": "num_micro_batches", "stages": "pp", "sp": "cp"}
_SHAPED = {
    "layers",
    "width",
    "heads",
    "words",
    "words_multiple",
    "context",
    "sequence_length",
    "frames",
    "experts",
    "top_k",
}
"""Fields of a model that show in its shape."""
_BY_NAME = ("hidden_size", "num_layers", "num_heads", "vocabulary")
"""What the name of a model says without being printed."""


@dataclass(frozen=True, kw_only=True)
class Among:
    """Part of a setting is said: it is one of these."""

    choices: tuple[Any, ...]
    said: str

    def __str__(self) -> str:
        return self.said


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a row says of its run."""

    settings: Mapping[str, Any]
    """By name; an :class:`Among` where only a part is said."""
    by_name: Mapping[str, Any]
    """What the model's name says beside, which a recipe may have otherwise for a reason."""


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "strategy": "single",
        "data": "synthetic",
        "checkpointing": "none",
        "dtype": "fp32",
        "attention": "auto",
        "learning_rate": 1e-4,
        "seed": 0,
        "dataset_samples": 704,
    }
)
"""Of a training step's fields, where a recipe leaves them out."""
_BATCHES = ("micro_batch_size", "global_batch_size", "accumulation")


def settings_of_case(
    workload: str, parameters: Mapping[str, Any], world_size: int, nodes: int | None = None
) -> dict[str, Any]:
    """Settings of a case, or of a recipe, by its workload's parameters; what is None or off is not set."""
    given = {name: value for name, value in parameters.items() if value is not None}
    shape = _shape(given.pop("mesh", ""), world_size)
    settings: dict[str, Any] = {"devices": world_size, "mesh": _written(dict(shape.axes))}
    if nodes is not None:
        settings["nodes"] = nodes
    if snake(workload) == "train_step":
        return {**settings, **_training(given, shape)}
    return {**settings, **given}


def _training(given: Mapping[str, Any], shape: MeshShape) -> dict[str, Any]:
    fields = {**DEFAULTS, **given}
    overrides = fields.pop("overrides", {})
    options = {name: value for name, value in fields.pop("options", {}).items() if value is not None}
    if "data" in options:  # a training step has a field of that name
        options["data_axes"] = options.pop("data")
    if fields["data"] != "generated":
        del fields["dataset_samples"]
    plain_fields = {
        name: value
        for name, value in fields.items()
        if name in DEFAULTS or (name not in (*_BATCHES, *_NOT_SET_UP) and value)
    }
    return {
        **plain_fields,
        **options,
        **{name: value for name, value in overrides.items() if name not in _SHAPED},
        **_of_model(str(fields.get("model", "")), overrides, shape.size("tp")),
        **_batches(fields, shape.replicas),
    }


def _shape(mesh: str, world_size: int) -> MeshShape:
    return MeshShape.parse(mesh) if mesh else MeshShape.of(dp=world_size)


def _written(axes: Mapping[str, int]) -> str:
    """A mesh as text, axes of one rank left out."""
    kept = [f"{axis}{axes[axis]}" for axis in AXES if axes.get(axis, 1) > 1]
    return "-".join(kept) or "1"


def _of_model(name: str, overrides: Mapping[str, Any], tp: int) -> dict[str, Any]:
    try:
        model = models.find(name, overrides).padded(tp)
    except (PerfsuiteError, TypeError):  # somebody else's, or of an older perfsuite
        return {}
    routed = {"experts": model.experts, "top_k": getattr(model, "top_k", 0)} if model.experts else {}
    return {
        **models.stated({"model": name, "overrides": overrides}, tp),
        **routed,
        "sequence_length": model.tokens_per_sample,
    }


def _batches(given: Mapping[str, Any], replicas: int) -> dict[str, int]:
    """micro x accumulation x replicas = global, whichever of them is given."""
    steps = given.get("accumulation", 1)
    micro, whole = given.get("micro_batch_size"), given.get("global_batch_size")
    if micro is None:
        micro = 1 if whole is None else whole // (steps * replicas)
    return {"micro_batch_size": micro, "num_micro_batches": steps, "global_batch_size": micro * steps * replicas}


# -- rows --------------------------------------------------------------------------------------------------------


def settings_of_row(row: PublishedRun) -> Stated:
    """What a published row says of its run, its table's own settings included."""
    said: dict[str, Any] = {
        _RENAMED.get(name, name): value for name, value in row.parameters.items() if name not in _NAMES_NO_SETTING
    }
    if row.model:
        said["model"] = row.model
    if row.world_size:
        said["devices"] = row.world_size
    if row.workload != "train_step":
        return Stated(settings=said, by_name={})
    if said.get("experts") == 0:
        said = {name: value for name, value in said.items() if name not in ("experts", "top_k")}
    if said.get("dtype") == "amp":
        said["dtype"] = Among(choices=("bf16", "fp16"), said="amp")
    if said.get("strategy") == "sp":
        said.update(strategy="hybrid", sequence_parallel=True)
    if "method" in said:
        said.update(_method(said.pop("method")))
    said.update(_mesh(said))
    said.update(_row_batches(said))
    facts = _of_model(row.model, {}, 1)
    return Stated(settings=said, by_name={name: facts[name] for name in _BY_NAME if name in facts and name not in said})


def _method(method: str) -> dict[str, Any]:
    """Report 004's ways to attend: a plain kernel, a fused one, a fused one over a ring."""
    return (
        {"attention": "math"}
        if method == "standard"
        else {"attention": "flash", **({"context": "ring"} if method == "ring" else {})}
    )


def _mesh(said: dict[str, Any]) -> dict[str, Any]:
    """The mesh by its axes, taken out of ``said``; a part of it where the axes have fewer ranks than there are."""
    axes = {axis: said.pop(axis) for axis in AXES if axis in said}
    devices = said.get("devices", 0)
    if said.get("strategy") in ("ddp", "fsdp"):
        axes.setdefault("dp", devices)
    named = _written(axes)
    product = MeshShape.of(**axes).world_size
    if devices == 1 or (axes and product == devices):
        return {"mesh": named}
    return {"mesh": AmongMeshes(axes=axes)} if axes else {}


@dataclass(frozen=True, kw_only=True)
class AmongMeshes:
    """Some axes of the mesh are said."""

    axes: Mapping[str, int]

    @property
    def said(self) -> str:
        """As a mesh."""
        return f"{_written(self.axes)} and more"

    def __str__(self) -> str:
        return self.said

    def has(self, mesh: str) -> bool:
        """Whether a mesh has these axes."""
        shape = MeshShape.parse(mesh)
        return all(shape.size(axis) == size for axis, size in self.axes.items())


def _row_batches(said: dict[str, Any]) -> dict[str, Any]:
    """Batches in the three numbers that a case has, as far as they follow; taken out of ``said``."""
    local, vague = said.pop("local_batch_size", None), said.pop("batch_size", None)
    mesh, devices = said.get("mesh"), said.get("devices")
    replicas = MeshShape.parse(mesh).replicas if isinstance(mesh, str) else None
    whole, micro, steps = (said.get(name) for name in ("global_batch_size", "micro_batch_size", "num_micro_batches"))
    if local is None and micro and steps:
        local = micro * steps
    if whole is None and local and replicas:
        whole = local * replicas
    if local is None and whole and replicas:
        local = whole // replicas
    if micro is None and local and steps:
        micro = local // steps
    told = {"micro_batch_size": micro, "num_micro_batches": steps, "global_batch_size": whole}
    if local and not micro:
        told["local_batch_size"] = local
    if vague and whole is None:
        choices = tuple(dict.fromkeys((vague, vague * (devices or 1))))
        told["global_batch_size"] = Among(choices=choices, said=f"a batch of {vague}")
    return {name: value for name, value in told.items() if value is not None}
