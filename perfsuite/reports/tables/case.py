"""One case as a table sees it: settings by the names of columns, values by name, and why a value is missing.

A case comes from a result, of a journal or of a baseline's newest run, or was not measured at all: then it has
the settings of a sibling that was, and a reason instead of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfsuite import models
from perfsuite.base.errors import InvalidParameter, PerfsuiteError
from perfsuite.base.mesh import AXES, DATA_PARALLEL, MeshShape
from perfsuite.base.units import GIB, format_bytes, format_seconds, seconds_to_us, significant
from perfsuite.metrics.memory import residence
from perfsuite.metrics.spec import devices_used
from perfsuite.record.result import Result
from perfsuite.record.run import Projected
from perfsuite.record.step import Component, Traffic, Training
from perfsuite.reports.ids import class_of, kernel_of, ranks_in, without_ranks
from perfsuite.reports.stored import StoredResult
from perfsuite.reports.tables.case_names import log_name, name_in
from perfsuite.reports.tables.published import is_recipe
from perfsuite.workloads.tensor_linear import SPLITS

_OF_STAGES = ("schedule", "stages_per_rank")  # Options of a strategy that have columns of their own.
_SCHEDULES = ("naive", "gpipe", "1f1b")  # In report 004's order.


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
    changed = (_listed(parameters.get(name)) for name in ("overrides", "program"))
    settings["variant"] = ", ".join(filter(None, changed))
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
    for name, sides in (("size", ("m", "k", "n")), ("features", ("features_in", "features_out"))):
        if set(sides) <= set(parameters):
            lengths = [parameters[side] for side in sides]
            return {name: "x".join(map(str, lengths)), f"{name}_order": math.prod(lengths)}
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


@dataclass(frozen=True, kw_only=True)
class TableCase:
    """One case, ready to be put into rows."""

    case: str  # pytest node id.
    platform: str
    workload: str  # Class or function without its module: TrainStep.
    ranks: int
    parameters: Mapping[str, Any]  # Fields of the workload.
    settings: Mapping[str, Any]  # Settings by name: ranks, layout, model, local_batch_size, dp, schedule, ...
    values: Mapping[str, float] = field(default_factory=dict)  # Values by name of the metric.
    reasons: Mapping[str, str] = field(default_factory=dict)  # Why a metric has no value.
    bases: Mapping[str, str] = field(default_factory=dict)  # The base of a ratio: ``speedup`` -> ``1 rank``.
    base_ranks: int = 0  # Ranks that a speed-up is counted from; 0 without one.
    kind: str = ""  # weak, strong or mixed, for a case with others of its series on other numbers of ranks.
    shared: bool = False  # Whether the ranks share one device with those of the base.
    missing: str = ""  # Why nothing was measured: skipped, failed, OOM at X GiB of Y; empty when something was.
    projected: bool = False  # Whether the values are projected; ``missing`` then has the band of the step.
    fingerprint: str = ""
    simulated: bool = False
    traffic: tuple[Traffic, ...] = ()  # Messages of a step, from a separate build.
    components: tuple[Component, ...] = ()  # Parts of that step.

    @property
    def model(self) -> str:
        """Name of the model; empty for kernels and collectives."""
        return str(self.settings.get("model", ""))


def from_result(result: Result) -> TableCase:
    """The case of a journal's result, or of a baseline's, of which the newest run counts."""
    measurement = result.measurement
    values = {metric.name: metric.value for metric in result.metrics if metric.value is not None}
    missing = result.detail
    if result.outcome == "smoke":
        values, missing = {}, "built, checked and run once: nothing was measured"
    hosts: int | None = None
    if result.outcome == "measured" and measurement is not None:
        hosts = len({rank.host for rank in measurement.ranks})
        steps = [record.value for record in measurement.records if record.name == "steps_per_epoch"]
        values.update({"steps_per_epoch": steps[0]} if steps else {})
    if result.outcome == "measured" and (measurement is not None or isinstance(result, StoredResult)):
        values["median_s"] = result.median_s
    settings = settings_of(result.parameters, result.platform, result.world_size, hosts)
    settings.update(sizes_of(settings, result.work.samples, result.work.tokens))
    settings["kernel"] = kernel_of(result.workload, result.parameters, result.work.collective)
    if result.work.collective:
        settings["collective"] = result.work.collective
    if measurement is not None:
        settings["residence"] = residence(result.work, measurement).partition(":")[0]
    if measurement is not None and measurement.timeline is not None:
        timeline = measurement.timeline
        settings.update(
            schedule=timeline.schedule,
            schedule_order=schedule_place(timeline.schedule),
            stages=1 + max((event.stage for event in timeline.events), default=0),
            num_micro_batches=1 + max((event.micro_batch for event in timeline.events), default=0),
        )
    settings.update(_named(result.case))
    if "case_name" in settings:
        settings["log_name"] = log_name(settings)
    return TableCase(
        case=result.case,
        platform=result.platform,
        workload=class_of(result.workload),
        ranks=result.world_size,
        parameters=result.parameters,
        settings={**settings, "devices": devices_used(measurement) if measurement is not None else None},
        values=_derived(values),
        reasons={metric.name: metric.note for metric in result.metrics if metric.value is None and metric.note},
        missing=missing,
        fingerprint=result.fingerprint,
        simulated=result.simulated,
        traffic=measurement.traffic if measurement is not None else (),
        components=measurement.components if measurement is not None else (),
    )


def from_projection(one: Projected) -> TableCase:
    """Return the case of a projection, with its step time and memory."""
    values = {metric.name: metric.value for metric in one.metrics if metric.value is not None}
    samples, tokens = (
        float(round(values.get(f"{what}_per_s", 0.0) * one.step_time_s)) for what in ("samples", "tokens")
    )
    parameters = one.parameters or _of_training(one.training)
    settings = settings_of(parameters, one.platform, one.world_size, None)
    settings.update(sizes_of(settings, samples, tokens), **_named(one.case))
    settings["layout"] = f"projected: {settings['layout']}"
    if one.memory_bytes:
        values["peak_gib"] = one.memory_bytes / GIB
    bound = "at least " if one.lower_bound else ""
    band = f"{format_seconds(one.low_s)} to {format_seconds(one.high_s)}"
    simulated = " of a simulated device" if one.simulated else ""
    return TableCase(
        case=one.case,
        platform=one.platform,
        workload=class_of(one.workload) or "TrainStep",
        ranks=one.world_size,
        parameters=parameters,
        settings=settings,
        values=_derived({**values, "median_s": one.step_time_s}),
        missing=f"projected{simulated}; step {bound}{band} in the 80 % band",
        projected=True,
        simulated=one.simulated,
    )


def _of_training(training: Training | None) -> dict[str, Any]:
    """Return parameters from the training, for a projection that was stored without any."""
    if training is None:
        return {}
    names = ("model", "overrides", "strategy", "micro_batch_size", "dtype", "checkpointing", "attention", "compiled")
    parameters = {name: getattr(training, name) for name in names}
    if training.strategy == "hybrid":
        parameters["mesh"] = training.layout
    if training.schedule:
        parameters["options"] = {"schedule": training.schedule, "stages_per_rank": training.stages_per_rank}
    return {**parameters, "accumulation": training.num_micro_batches}


def _named(node: str) -> dict[str, str]:
    name = name_in(node)
    if name is None:
        return {}
    return {"group": name.group, "group_order": name.place, "case_name": name.text, "case_name_order": name.place}


def unmeasured(cases: Sequence[TableCase], reasons: Mapping[str, str]) -> tuple[list[TableCase], dict[str, str]]:
    """Return cases without a result: rows with the settings of a sibling on other ranks, and the other reasons."""
    siblings = {without_ranks(case.case): case for case in reversed(cases) if case.ranks}
    measured = {case.case for case in cases}
    rows, rest = [], {}
    for node, reason in reasons.items():
        sibling, ranks = siblings.get(without_ranks(node)), ranks_in(node)
        if node in measured:
            continue
        if sibling is None or ranks is None or (is_recipe(node) and reason.startswith("skipped")):
            rest[node] = reason  # the published row of a recipe has the reason
            continue
        rows.append(
            TableCase(
                case=node,
                platform=sibling.platform,
                workload=sibling.workload,
                ranks=ranks,
                parameters=sibling.parameters,
                settings=_as_on(sibling, ranks),
                missing=reason,
                kind=sibling.kind,
                fingerprint=sibling.fingerprint,
                simulated=sibling.simulated,
            )
        )
    return rows, rest


def _as_on(sibling: TableCase, ranks: int) -> dict[str, Any]:
    """Return a sibling's settings on another number of ranks; a fixed global batch stays, else the local one."""
    hosts = 1 if sibling.settings.get("nodes") == 1 else None
    settings = settings_of(sibling.parameters, sibling.platform, ranks, hosts)
    settings.update({name: value for name, value in sibling.settings.items() if name not in settings})
    spread = settings.get("dp", 1) * settings.get("ep", 1) * settings.get("accumulation", 1)
    if sibling.parameters.get("global_batch_size"):
        settings["local_batch_size"] = whole(settings["global_batch_size"] / spread)
    elif "local_batch_size" in sibling.settings:
        settings["local_batch_size"] = sibling.settings["local_batch_size"]
        settings["global_batch_size"] = settings["local_batch_size"] * spread
    return settings


def _derived(values: Mapping[str, float]) -> dict[str, float]:
    """Values that follow from metrics: 1 / step time, the share of communication, MFU in PaLM's convention."""
    derived = dict(values)
    if derived.get("step_time_s"):
        derived["iterations_per_s"] = 1 / derived["step_time_s"]
    for end in ("", "_low", "_high"):
        if f"exposed_communication{end}_percent" in derived:
            derived[f"communication_share{end}"] = derived[f"exposed_communication{end}_percent"] / 100
    if 0 <= derived.get("communication_share", 1.0) < 1:
        derived["communication_overhead"] = derived["communication_share"] / (1 - derived["communication_share"])
    if "mfu_percent" in derived and derived.get("tflops_per_device") and "palm_tflops_per_device" in derived:
        derived["mfu_palm_percent"] = (
            derived["mfu_percent"] * derived["palm_tflops_per_device"] / derived["tflops_per_device"]
        )
    if "median_s" in derived:
        derived["median_us"] = seconds_to_us(derived["median_s"])
    return derived
