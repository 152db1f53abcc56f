"""Settings of a case by the names of columns: parameters, sizes of the mesh's axes, batches and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfsuite import models
from perfsuite.base.errors import InvalidParameter, PerfsuiteError
from perfsuite.base.mesh import AXES, DATA_PARALLEL, MeshShape
from perfsuite.base.units import format_bytes, significant
from perfsuite.workloads.tensor_linear import SPLITS

_OF_STAGES = ("schedule", "stages_per_rank")
"""Options of a strategy that have columns of their own."""
_SCHEDULES = ("naive", "gpipe", "1f1b")
"""In report 004's order."""


def settings_of(parameters: Mapping[str, Any], platform: str, ranks: int, hosts: int | None) -> dict[str, Any]:
    """Parameters of a case under the names that columns have, its mesh taken apart."""
    settings = {name: value for name, value in parameters.items() if value not in (None, "", {}, [])}
    settings.update(ranks=ranks, layout=_layout(platform, ranks, hosts), nodes=hosts, platform=platform)
    settings.update(_mesh(parameters, ranks))
    settings.update({name: value for name, value in _mapping(parameters, "options").items() if name in _OF_STAGES})
    settings.update(models.stated(parameters, settings.get("tp", 1)))
    settings.update(_experts(parameters))
    split = "-".join(f"{axis}{settings[axis]}" for axis in ("cp", "tp") if int(settings.get(axis, 1)) > 1)
    settings.update(axes=_axes(settings), sequence_split=split, method=_method(settings, parameters))
    if "accumulation" in parameters:
        settings["num_micro_batches"] = parameters["accumulation"]
    settings.update(_size(parameters))
    if "stages_per_rank" in settings and "pp" in settings:
        settings["stages"] = settings["pp"] * settings["stages_per_rank"]
    if "schedule" in settings:
        settings["schedule_order"] = schedule_place(str(settings["schedule"]))
        settings["strategy"] = f"pipeline, {settings['schedule']}"
    if "pp" in settings:
        settings["devices_per_stage"] = ranks // settings["pp"]
    if "mesh" in settings:
        settings["mesh_order"] = f"{ranks:06} {settings['mesh']}"
    if "split" in settings:
        settings["split_order"] = list(SPLITS).index(settings["split"]) if settings["split"] in SPLITS else len(SPLITS)
    if hosts and ranks % hosts == 0:
        settings["devices_per_node"] = ranks // hosts
    settings["fix_hp"] = _listed(parameters.get("overrides")) or "/"
    settings["variant"] = ", ".join(
        filter(None, map(_listed, (parameters.get("overrides"), parameters.get("program"))))
    )
    settings["options"] = _options(parameters)
    if "loss" not in (parameters.get("builds") or ()):
        settings.pop("loss_steps", None)
        settings.pop("target_loss", None)
    return settings


def schedule_place(name: str) -> str:
    """Sorts schedules as report 004 does, those that it has not behind them.

    >>> sorted(["1F1B", "zbv", "GPipe", "naive"], key=schedule_place)
    ['naive', 'GPipe', '1F1B', 'zbv']
    """
    place = _SCHEDULES.index(name.lower()) if name.lower() in _SCHEDULES else len(_SCHEDULES)
    return f"{place} {name.lower()}"


def _size(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Size of a kernel or message as ids write it, and the number to sort it by."""
    if {"m", "k", "n"} <= set(parameters):
        sides = [parameters[name] for name in "mkn"]
        return {"size": "x".join(map(str, sides)), "size_order": sides[0] * sides[1] * sides[2]}
    if {"features_in", "features_out"} <= set(parameters):
        sides = [parameters[name] for name in ("features_in", "features_out")]
        return {"features": "x".join(map(str, sides)), "features_order": sides[0] * sides[1]}
    for name in ("message_bytes", "buffer_bytes"):
        if name in parameters:
            return {"size": format_bytes(int(parameters[name])), "size_order": int(parameters[name])}
    return {}


def _options(parameters: Mapping[str, Any]) -> str:
    """Return the settings other than model, strategy and batch: ``overlap=False, accumulation=4``."""
    options = {name: value for name, value in _mapping(parameters, "options").items() if name not in _OF_STAGES}
    chosen = [_listed(options), _listed(parameters.get("environment"))]
    if parameters.get("accumulation", 1) != 1:
        chosen.append(f"accumulation={parameters['accumulation']}")
    if parameters.get("checkpointing", "none") != "none":
        chosen.append(f"checkpointing={parameters['checkpointing']}")
    chosen += ["compiled"] if parameters.get("compiled") else []
    return ", ".join(filter(None, chosen))


def _mapping(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values = parameters.get(name)
    return values if isinstance(values, Mapping) else {}


def _listed(values: Any) -> str:
    if not isinstance(values, Mapping):
        return ""
    texts = {name: significant(value) if isinstance(value, float) else value for name, value in sorted(values.items())}
    return ", ".join(f"{name}={value}" for name, value in texts.items())


def _layout(platform: str, ranks: int, hosts: int | None) -> str:
    """``1 x 8 s4000``: hosts, ranks of each, platform; a ``?`` where the number of hosts is not kept."""
    if hosts is None:
        return f"{ranks} {platform}"
    return f"{hosts} x {ranks // hosts} {platform}" if ranks % hosts == 0 else f"{ranks} on {hosts} {platform}"


def _mesh(parameters: Mapping[str, Any], ranks: int) -> dict[str, int]:
    written = parameters.get("mesh")
    try:
        shape = MeshShape.on(ranks, written if isinstance(written, str) else "")
    except InvalidParameter:
        return {}
    others = {axis: shape.size(axis) for axis in AXES if axis not in DATA_PARALLEL}
    return {"dp": shape.replicas // shape.size("ep"), **others}


def _axes(settings: Mapping[str, Any]) -> str:
    """``TP-only``, ``2D (PP+TP)``: the axes along which there is more than one rank, as report 004 calls them."""
    spread = [axis.upper() for axis in ("dp", "pp", "tp", "cp", "ep") if int(settings.get(axis, 1)) > 1]
    return f"{len(spread)}D ({'+'.join(spread)})" if len(spread) > 1 else "".join(f"{axis}-only" for axis in spread)


def _method(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    if int(settings.get("cp", 1)) > 1:
        return str(_mapping(parameters, "options").get("context", "zigzag"))
    attention = str(parameters.get("attention", "auto"))
    return {"math": "standard"}.get(attention, attention)


def _experts(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in all and those that a token meets; experts of each block, 0 for the dense sibling of a model."""
    overrides = _mapping(parameters, "overrides")
    try:
        model = models.find(str(parameters.get("model")), overrides)
    except (PerfsuiteError, TypeError):
        return {}
    facts = {"parameters": model.parameters, "active_parameters": model.active_parameters}
    if model.experts or model.name.endswith("-dense"):
        facts["experts"] = model.experts
    if model.experts:
        facts["top_k"] = getattr(model, "top_k", 0)
    return facts


def sizes_of(settings: Mapping[str, Any], samples: float, tokens: float) -> dict[str, Any]:
    """Batches and length as the work of one step has them: GBS = LBS x GAS x DP x EP."""
    if not samples:
        return {}
    shares = settings.get("dp", 1) * settings.get("ep", 1)
    spread = shares * settings.get("accumulation", 1)
    sizes: dict[str, Any] = {"global_batch_size": whole(samples), "local_batch_size": whole(samples / spread)}
    steps = settings.get("num_micro_batches", 1)
    sizes["micro_times_dp"] = whole(samples / steps)
    sizes["micro_batch_size"] = whole(samples / shares / steps)
    if tokens:
        sizes["sequence_length"] = whole(tokens / samples)
    return sizes


def whole(number: float) -> float:
    """An integer where it is one: 8 and not 8.0 in a cell."""
    return int(number) if number == int(number) else number
