"""Differences between a run and a published row: settings that both state and differ in, or that only one states.

A recipe may set a value that its row does not state, with a reason (:attr:`Recipe.reasons`); a case is then compared
with the recipe.  Without a difference every setting of both sides, defaults included, agrees or has a reason;
:func:`equality` lists the unknown ones.

A setting has one name, whether a report states it or a case has it as parameter.  A training step: model and its
shape, sequence_length, vocabulary, dtype, strategy and its options, mesh, micro_batch_size, num_micro_batches,
global_batch_size, checkpointing, data, ...; other workloads: their fields.  Every run: devices, nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perfsuite import models
from perfsuite.base.errors import PerfsuiteError
from perfsuite.base.mesh import AXES, MeshShape
from perfsuite.models.dit import Dit
from perfsuite.models.program import Program
from perfsuite.published.lookup import PublishedRun, plain, snake, table_of
from perfsuite.published.recipes import Recipe, recipe_of


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A case that ran, or would run."""

    workload: str  # Class with or without its module, or in snake case
    parameters: Mapping[str, Any]  # Fields of the workload
    world_size: int
    platform: str = ""  # Empty: any platform
    nodes: int | None = None  # Hosts; None if unknown


def differences(run: Ran | Recipe, row: PublishedRun) -> tuple[str, ...]:
    """Return the differences of ``run`` from a published row, one phrase per setting, sorted by name.

    >>> from perfsuite.published.lookup import select
    >>> row = select(platform="s4000", model="llama2-7b")[0]
    >>> differences(recipe_of("002/performance", row.line), row)
    ()
    >>> ran = Ran(workload="train_step", parameters={"model": "llama2-7b"}, world_size=8, platform="cpu", nodes=1)
    >>> [phrase.partition(" (")[0] for phrase in differences(ran, row)[:2]]
    ['platform s4000, not cpu', 'checkpointing full']
    """
    if snake(run.workload) != row.workload:
        return (f"workload {row.workload}, not {snake(run.workload)}",)
    return tuple(_compared(run, row))


def equality(run: Ran | Recipe, row: PublishedRun) -> str:
    """Return in words whether ``run`` is the published one.

    >>> from perfsuite.published.lookup import select
    >>> row = select(platform="v100", model="gpt-1536x16")[0]
    >>> equality(recipe_of("003/results", row.line), row)
    'equal as far as the report says: gradient clipping, EMA of the weights, loss scale not stated'
    """
    phrases = differences(run, row)
    return f"differs: {'; '.join(phrases)}" if phrases else f"equal{not_stated(row, run)}"


def not_stated(row: PublishedRun, run: Ran | Recipe) -> str:
    """Return the unknown settings of a row among those of ``run``, as the end of a sentence, or nothing."""
    recipe, settings = recipe_of(table_of(row), row.line), _settings_of_run(run)
    unknown = [words for name, words in (recipe.unknown if recipe else {}).items() if name in settings]
    return f" as far as the report says: {', '.join(unknown)} not stated" if unknown else ""


def _compared(run: Ran | Recipe, row: PublishedRun) -> Iterator[str]:
    if isinstance(run, Ran) and run.platform and run.platform not in row.platforms:
        yield f"platform {' or '.join(row.platforms)}, not {run.platform}"
    recipe = run if isinstance(run, Recipe) and not run.beside else recipe_of(table_of(row), row.line)
    settings = _settings_of_run(run)
    filled = settings if recipe is run else _settings_of_run(recipe) if recipe else {}
    reasons = recipe.reasons if recipe else {}
    stated, by_name = _settings_of_row(row)
    stated = {**{name: value for name, value in by_name.items() if name not in reasons}, **stated}
    local = stated.pop("local_batch_size", None)
    samples = settings.get("micro_batch_size", 1) * settings.get("num_micro_batches", 1)
    if local not in (None, samples):
        yield f"local_batch_size {local}, not {samples}"
    for name in sorted(set(stated) | set(settings) | (set(filled) & set(reasons))):
        published, own = stated.get(name), settings.get(name)
        partly = isinstance(published, _Partly)
        if own is not None and published is not None and not _agrees(published, own):
            yield f"{name} {published}, not {own}"
        elif published is not None and own is None:
            yield f"{name} {published}, not set here"
        elif (published is None or partly) and name not in reasons:
            yield f"{name} {own}, {'only partly' if partly else 'not'} stated by the report"
        elif (published is None or partly) and not _agrees(filled.get(name), own):
            yield f"{name} {filled.get(name)} (ours: {reasons[name]}), not {own}"


@dataclass(frozen=True, kw_only=True)
class _Partly:
    """A setting that a row states in part."""

    text: str
    allows: Callable[[Any], bool]  # Return whether a value is possible

    def __str__(self) -> str:
        return self.text


def _agrees(published: Any, own: Any) -> bool:
    return published.allows(own) if isinstance(published, _Partly) else plain(published) == plain(own)


# ---- of a case or a recipe ----

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
        "num_workers": 0,
    }
)
"""Defaults of a training step's fields."""
_PROGRAM: Mapping[str, Any] = MappingProxyType({field.name: field.default for field in dataclasses.fields(Program)})
"""Defaults of a training program's settings."""
_NOT_SET_UP = (
    "micro_batch_size", "global_batch_size", "accumulation", "builds", "loss_steps", "target_loss", "program",
)  # fmt: skip
"""Fields of a training step that are counted as batches, or that select untimed builds."""
_SHAPED = (
    "layers", "width", "heads", "words", "words_multiple", "context", "sequence_length", "frames", "experts", "top_k",
)  # fmt: skip
"""Fields of a model that its shape includes."""


def _settings_of_run(run: Ran | Recipe) -> dict[str, Any]:
    """Return the settings of a run's workload; a value of None or off is not set."""
    parameters = {name: value for name, value in run.parameters.items() if value is not None}
    mesh = parameters.pop("mesh", "")
    shape = MeshShape.on(run.world_size, mesh)
    settings: dict[str, Any] = {"devices": run.world_size, "mesh": _written(dict(shape.axes))}
    if run.nodes is not None:
        settings["nodes"] = run.nodes
    if snake(run.workload) != "train_step":
        return {**settings, **parameters}
    fields = {**DEFAULTS, **parameters}
    overrides = fields.pop("overrides", {})
    options = {name: value for name, value in fields.pop("options", {}).items() if value is not None}
    if "data" in options:  # a training step has a field of this name
        options["data_axes"] = options.pop("data")
    if fields["data"] not in ("generated", "video"):
        del fields["dataset_samples"]
    if fields["data"] == "synthetic":
        del fields["num_workers"]
    # micro x accumulation x replicas = global
    steps, replicas = fields.get("accumulation", 1), shape.replicas
    micro, whole = fields.get("micro_batch_size"), fields.get("global_batch_size")
    if micro is None:
        micro = 1 if whole is None else whole // (steps * replicas)
    return {
        **settings,
        **{name: value for name, value in fields.items() if name in DEFAULTS or (name not in _NOT_SET_UP and value)},
        **_of_program(fields),
        **options,
        **{name: value for name, value in overrides.items() if name not in _SHAPED},
        **_of_model(str(fields.get("model", "")), overrides, shape.size("tp")),
        "micro_batch_size": micro,
        "num_micro_batches": steps,
        "global_batch_size": micro * steps * replicas,
    }


def _of_program(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the training program without those that do not apply to the case."""
    settings = {**_PROGRAM, **fields.get("program", {})}
    settings = {name: "none" if value is None else value for name, value in settings.items()}
    if fields["dtype"] != "fp16":
        del settings["loss_scale"]
    elif settings["loss_scale"] == "none":
        settings["loss_scale"] = "dynamic"
    if not settings["ema_on_host"]:
        del settings["ema_on_host"]
    takes_videos = False
    with contextlib.suppress(PerfsuiteError):
        takes_videos = isinstance(models.find(str(fields.get("model", ""))), Dit)
    if settings["encoders"] == "none" and not takes_videos:
        del settings["encoders"]
    return settings


def _written(axes: Mapping[str, int]) -> str:
    """Return a mesh as text, without axes of one rank."""
    return "-".join(f"{axis}{axes[axis]}" for axis in AXES if axes.get(axis, 1) > 1) or "1"


def _of_model(name: str, overrides: Mapping[str, Any], tp: int) -> dict[str, Any]:
    try:
        model = models.find(name, overrides).padded(tp)
    except (PerfsuiteError, TypeError):  # not a model of this perfsuite
        return {}
    routed = {"experts": model.experts, "top_k": getattr(model, "top_k", 0)} if model.experts else {}
    shape = models.stated({"model": name, "overrides": overrides}, tp)
    return {**shape, **routed, "sequence_length": model.tokens_per_sample}


# ---- of a published row ----

_NAMES_NO_SETTING = ("config", "device", "component", "collective", "parameters", "active_parameters")
"""Settings that distinguish rows but do not change the run, or follow from the model."""
_RENAMED = {"accumulation": "num_micro_batches", "stages": "pp", "sp": "cp"}


def _settings_of_row(row: PublishedRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a published row by name, those of its table included, and those that its model's name
    implies.  A recipe may change the second with a reason.
    """
    settings: dict[str, Any] = {
        _RENAMED.get(name, name): value for name, value in row.parameters.items() if name not in _NAMES_NO_SETTING
    }
    settings |= {name: value for name, value in (("model", row.model), ("devices", row.world_size)) if value}
    if row.workload != "train_step":
        return settings, {}
    if settings.get("experts") == 0:
        settings = {name: value for name, value in settings.items() if name not in ("experts", "top_k")}
    if settings.get("dtype") == "amp":
        settings["dtype"] = _Partly(text="amp", allows=("bf16", "fp16").__contains__)
    if settings.get("strategy") == "sp":
        settings.update(strategy="hybrid", sequence_parallel=True)
    if method := settings.pop("method", ""):  # report 004: a plain kernel, a fused one, a fused one in a ring
        settings |= {"attention": "math" if method == "standard" else "flash"}
        settings |= {"context": "ring"} if method == "ring" else {}
    settings |= _mesh(settings)
    settings |= _row_batches(settings)
    facts = _of_model(row.model, {}, 1)
    names = ("hidden_size", "num_layers", "num_heads", "vocabulary")
    return settings, {name: facts[name] for name in names if name in facts and name not in settings}


def _mesh(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the mesh, with its axes removed from ``settings``; a part of it if the axes lack ranks."""
    axes = {axis: settings.pop(axis) for axis in AXES if axis in settings}
    devices = settings.get("devices", 0)
    if settings.get("strategy") in ("ddp", "fsdp"):
        axes.setdefault("dp", devices)
    if devices == 1 or (axes and MeshShape.of(**axes).world_size == devices):
        return {"mesh": _written(axes)}

    def has_axes(mesh: object) -> bool:
        shape = MeshShape.parse(str(mesh))
        return all(shape.size(axis) == size for axis, size in axes.items())

    return {"mesh": _Partly(text=f"{_written(axes)} and more", allows=has_axes)} if axes else {}


def _row_batches(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the three batch sizes of a case as far as they follow, removed from ``settings``."""
    local, vague = settings.pop("local_batch_size", None), settings.pop("batch_size", None)
    mesh, devices = settings.get("mesh"), settings.get("devices")
    replicas = MeshShape.parse(mesh).replicas if isinstance(mesh, str) else None
    batches = {name: settings.get(name) for name in ("micro_batch_size", "num_micro_batches", "global_batch_size")}
    micro, steps, whole = batches.values()
    if local is None and micro and steps:
        local = micro * steps
    if whole is None and local and replicas:
        whole = local * replicas
    if local is None and whole and replicas:
        local = whole // replicas
    if micro is None and local and steps:
        micro = local // steps
    batches = {"micro_batch_size": micro, "num_micro_batches": steps, "global_batch_size": whole}
    if local and not micro:
        batches["local_batch_size"] = local
    if vague and whole is None:
        choices = (vague, vague * (devices or 1))
        batches["global_batch_size"] = _Partly(text=f"a batch of {vague}", allows=choices.__contains__)
    return {name: value for name, value in batches.items() if value is not None}
