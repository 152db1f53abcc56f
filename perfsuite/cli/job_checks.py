"""Options of a projected job: their checks, published runs as jobs (--recipe), and the gains of --sensitivity."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.base.mesh import MeshShape
from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.scaling import LLAMA3_MTBF_DEVICE_H, worlds_between
from perfsuite.projection.softwares import OWN, SOFTWARES, fitted_constants
from perfsuite.projection.step import Projection, projector_of
from perfsuite.published.lookup import select, table_of
from perfsuite.published.recipes import find
from perfsuite.record.step import Training

MOST_DEVICES = 1_000_000
LEAST, MOST = 0.001, 1_000_000.0
"""Range of the GB/s of a network and of the seconds of a checkpoint; products of larger numbers would overflow."""
MOST_HOURS = 1e9
_COUNTS: Mapping[str, int] = {
    "world": MOST_DEVICES,
    "global_batch": 1_000_000_000,
    "micro_batch": 1_000_000,
    "stages_per_rank": 1_000,
    "sequence_length": 100_000_000,
    "top": 1_000_000,
}
"""Options that are counts, with their largest values."""
_OF_CURVE = ("weak", "strong", "mtbf")


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for a count, rate or time out of range, or an option without the one that it needs."""
    values = vars(options)
    for name, most in _COUNTS.items():
        value = values.get(name)
        if value is not None and not 1 <= value <= most:
            raise ConfigurationError(
                f"{_spelled(name)}={value} is not a valid count; give a whole number from 1 to {most:,}"
            )
    for name, unit in (("network", "GB/s"), ("checkpoint_s", "seconds")):
        value = values.get(name)
        if value is not None and not LEAST <= value <= MOST:
            raise ConfigurationError(
                f"{_spelled(name)}={value:g} is not valid; give {unit} from {LEAST:g} to {MOST:,.0f}"
            )
    for name in _OF_CURVE:
        if values.get(name) and not values["curve"]:
            raise ConfigurationError(f"{_spelled(name)} needs a curve; add --curve, for example --curve 8..1024")
    if values.get("checkpoint_s") is not None and not values["mtbf"]:
        raise ConfigurationError("--checkpoint-s needs a goodput; add --mtbf, for example --mtbf llama3")


def read_curve(text: str) -> list[int]:
    """Return the numbers of devices of the range ``A..B``.  Raises ConfigurationError if it is not a range."""
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or len(last) > len(str(MOST_DEVICES)):
        raise ConfigurationError(
            f"--curve={text} is not a range of devices; give two numbers from 1 to {MOST_DEVICES:,}, such as 8..1024"
        )
    return worlds_between(int(first), int(last))


def read_mtbf(text: str | None) -> float | None:
    """Return the device-hours between failures; None without --mtbf.  Raises ConfigurationError if out of range."""
    if text is None:
        return None
    if text == "llama3":
        return LLAMA3_MTBF_DEVICE_H
    try:
        hours = float(text)
    except ValueError:
        raise ConfigurationError(f"--mtbf={text} is not a number of hours; {did_you_mean(text, ['llama3'])}") from None
    if not 1 <= hours <= MOST_HOURS:
        raise ConfigurationError(
            f"--mtbf={text} is not a time between failures; give device-hours from 1 to {MOST_HOURS:,.0f}, or llama3"
        )
    return hours


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_FASTER = 0.01
_RATES: Mapping[str, str] = {
    "matmul": "matmul_",
    "attention": "attention_",
    "memory": "memory_gb_per_s",
    "link": "link_",
    "network": "network_",
}
"""Resource -> prefix of the names of its constants."""
_KERNELS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("matmul", "grouped_matmul"),
    "attention": ("attention_forward", "attention_backward"),
}


def elasticities(job: TrainingJob, calibration: Calibration) -> dict[str, float]:
    """Return the percent by which the step gets shorter for one percent more of each resource, 0 to 1."""
    base = projector_of(job, calibration).step(job.layout, simulated=False).seconds
    moved = {}
    for resource in _RATES:
        time = projector_of(job, _faster(calibration, resource)).step(job.layout, simulated=False).seconds
        moved[resource] = (base / time - 1) / _FASTER
    return moved


def _faster(calibration: Calibration, resource: str) -> Calibration:
    more = 1 + _FASTER
    constants, kernels, collectives = dict(calibration.constants), [], []
    for name, one in constants.items():
        if name.startswith(_RATES[resource]):
            value = one.value / more if one.unit == "us" else one.value * more
            constants[name] = dataclasses.replace(one, value=value)
    for point in calibration.kernels:
        faster = dataclasses.replace(point, time_s=point.time_s / more)
        kernels.append(faster if point.kind in _KERNELS.get(resource, ()) else point)
    for line in calibration.collectives:
        quick = dataclasses.replace(line, alpha_us=line.alpha_us / more, beta_gb_per_s=line.beta_gb_per_s * more)
        collectives.append(quick if resource == ("link" if line.nodes == 1 else "network") else line)
    return dataclasses.replace(calibration, constants=constants, kernels=tuple(kernels), collectives=tuple(collectives))


# Options that a recipe replaces.
_OPTIONS = (
    *("model", "global_batch", "world", "layout", "schedule", "stages_per_rank", "sequence_length", "override"),
    *("dtype", "compiled", "sequence_parallel"),
)
_DEFAULTS = {"micro_batch": 1, "sharding": "none", "checkpointing": "none"}


def choose_recipe(options: argparse.Namespace) -> Training | None:
    """Return the training step of --recipe and set its machine or platform in ``options``; None without --recipe.

    Raises ConfigurationError without a recipe and a job, or with both; if the recipe is not a training step; and if
    the report describes no machine and --platform is missing.
    """
    if not options.recipe:
        if not options.model or not options.global_batch:
            raise ConfigurationError("a projection needs a training step; give --model and --global-batch, or --recipe")
        return None
    extra = [name for name in _OPTIONS if getattr(options, name)]
    extra += [name for name, value in _DEFAULTS.items() if getattr(options, name) != value]
    if extra:
        option = _spelled(extra[0])
        raise ConfigurationError(f"--recipe and {option} both define the training step; leave {option} out")
    recipe = find(options.recipe)
    if recipe.workload != "train_step":
        raise ConfigurationError(f"recipe {recipe.name} is of workload {recipe.workload}; only train_step is projected")
    if not options.machine:
        catalog = load_catalog(options.platform_file)
        platforms = (
            [options.platform] if options.platform else [catalog.machines[name].platform for name in recipe.machines]
        )
        if not platforms:
            raise ConfigurationError(f"the report of recipe {recipe.name} describes no machine; give --platform")
        machine = recipe.machine(catalog, platforms[0])
        options.machine = machine.name if machine else None
    from perfsuite.workloads.training.train_step import TrainStep  # a projection without a recipe loads no workload

    step = TrainStep(**recipe.parameters)
    work = step.work(MeshShape.on(recipe.world_size, step.mesh))
    assert work.training is not None
    return work.training


def published_lines(recipe: str, found: Projection) -> Iterator[str]:
    """Yield each printed latency of the run on this platform, compared with the projection."""
    rows = find(recipe).rows
    for figure in select(platform=found.platform, metric="step_time_s"):
        if (table_of(figure), figure.line) in rows:
            inside = "in the band" if found.low_s <= figure.metric_value <= found.high_s else "outside the band"
            yield f"{figure}: {inside}, projected/published {found.step_time_s / figure.metric_value:.2f}"


def software_lines() -> Iterator[str]:
    """Yield every software with the published steps behind its constants, and the source of its traits."""
    yield f"{OWN}: the suite's own modules, counted by dry runs"
    for one in fitted_constants():
        yield f"{one.software}: {one.rows} steps on {one.device}, up to {one.world} devices ({one.table})"
        yield "  " + ", ".join(f"{name} {value:.3g}" for name, value in one.values.items())
        yield f"  release: {one.release}; {one.later}"
        yield f"  traits: {SOFTWARES[one.software].source}"
