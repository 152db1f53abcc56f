"""``perfsuite project --recipe``: a published run on the machine of its report, beside the latencies printed there."""

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

# Options that say what is trained and how it is spread: a recipe says that.
_SAID = (
    *("model", "global_batch", "world", "layout", "schedule", "stages_per_rank", "sequence_length", "override"),
    *("dtype", "compiled", "sequence_parallel"),
)
_DEFAULTS = {"micro_batch": 1, "sharding": "none", "checkpointing": "none"}


def recipe_argument(parser: argparse.ArgumentParser) -> None:
    """The option."""
    parser.add_argument(
        "--recipe", metavar="NAME", help="project this published run, for example 003-MP_1x32x1_16_3072x32"
    )


def choose_recipe(options: argparse.Namespace) -> Training | None:
    """Return what a recipe trains, and name its machine or platform in ``options``; None without --recipe.

    Raises ConfigurationError where neither a recipe nor a job is given, or both; where the recipe is not a training
    step; and where its report describes no machine and no platform is given.
    """
    if not options.recipe:
        if not options.model or not options.global_batch:
            raise ConfigurationError("--model and --global-batch are needed: what is trained; or give --recipe")
        return None
    given = [name for name in _SAID if getattr(options, name)]
    given += [name for name, value in _DEFAULTS.items() if getattr(options, name) != value]
    if given:
        raise ConfigurationError(f"--recipe says what is trained; leave --{given[0].replace('_', '-')} out")
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
    """Each latency that the report prints of the run on this platform, and where it lies against the projection."""
    for figure in _latencies(recipe, found.platform):
        inside = "in the band" if found.low_s <= figure.metric_value <= found.high_s else "outside the band"
        yield f"{figure}: {inside}, projected/published {found.step_time_s / figure.metric_value:.2f}"
