"""``perfsuite project --recipe``: project a published run on the machine of its report, with the printed latencies."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.mesh import MeshShape
from perfsuite.platforms import load_catalog
from perfsuite.projection.step import Projection
from perfsuite.published.lookup import PublishedFigure, select
from perfsuite.published.recipes import find
from perfsuite.record.result import Training

# Options that a recipe replaces.
_OPTIONS = (
    *("model", "global_batch", "world", "layout", "schedule", "stages_per_rank", "sequence_length", "override"),
    *("dtype", "compiled", "sequence_parallel"),
)
_DEFAULTS = {"micro_batch": 1, "sharding": "none", "checkpointing": "none"}


def recipe_argument(parser: argparse._ArgumentGroup) -> None:
    """Add --recipe."""
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="project this published run, such as 003-MP_1x32x1_16_3072x32 (default: the job of the other options)",
    )


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
        option = f"--{extra[0].replace('_', '-')}"
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


def _latencies(recipe: str, platform: str) -> list[PublishedFigure]:
    rows = find(recipe).rows
    return [
        figure
        for figure in select(platform=platform, metric="step_time_s")
        if (f"{figure.report}/{figure.table}", figure.line) in rows
    ]


def published_lines(recipe: str, found: Projection) -> Iterator[str]:
    """Yield each printed latency of the run on this platform, compared with the projection."""
    for figure in _latencies(recipe, found.platform):
        inside = "in the band" if found.low_s <= figure.metric_value <= found.high_s else "outside the band"
        yield f"{figure}: {inside}, projected/published {found.step_time_s / figure.metric_value:.2f}"
