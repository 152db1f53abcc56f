"""``perfsuite explain 000/memory``: set-ups of a published table's runs whose memory is the one that was printed.

A search over what a report may leave unsaid: strategy, dtype, frozen encoders, EMA and, where a peak was printed,
checkpointing.  What stays after a step is computed exactly (:mod:`perfsuite.workloads.training.held`), a peak as the
projection has it.  A set-up that gives the figures is possible, not proven.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB
from perfsuite.cli.main import EXIT_OK, Command, print_json
from perfsuite.models.dit import Dit, Stdit
from perfsuite.platforms import load_catalog
from perfsuite.projection.job import Job
from perfsuite.projection.memory import memory_of
from perfsuite.projection.step import with_program
from perfsuite.published.lookup import PublishedFigure, figures, shipped
from perfsuite.published.recipes import recipe_of
from perfsuite.published.recipes.recipe import Recipe
from perfsuite.published.selection import chosen
from perfsuite.workloads.training.held import held
from perfsuite.workloads.training.train_step import TrainStep

_METRICS = ("final_device_gib", "peak_gib", "whole_device_gib")
"""Memory that a table may print, the one that is computed best first."""
_STRATEGIES = ("single", "ddp", "zero_redundancy", "fsdp", "zero1", "zero2", "zero3")
_PROGRAM = ("encoders", "ema")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way in which the runs may have been set up, and what it gives."""

    settings: tuple[tuple[str, str], ...]
    """Name and value of what was varied."""
    gib: tuple[float, ...]
    """For each figure."""
    parts: tuple[Mapping[str, float], ...]
    """GiB by part, for each figure."""

    def residuals(self, printed: Sequence[float]) -> tuple[float, ...]:
        """Printed less computed, GiB."""
        return tuple(there - here for there, here in zip(printed, self.gib, strict=True))

    def error(self, printed: Sequence[float]) -> float:
        """The largest residual as a share of its figure."""
        return max(abs(rest) / there for rest, there in zip(self.residuals(printed), printed, strict=True))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="REPORT/TABLE", help="a table that prints memory, such as 000/memory")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="print the N best set-ups; default: 10")
    parser.add_argument("--json", action="store_true", help="print every set-up as JSON")


def _run(options: argparse.Namespace) -> int:
    if options.limit < 1:
        raise ConfigurationError(f"--limit {options.limit} prints nothing; give a count from 1")
    for table in _tables(options.table):
        _explain(table, options)
    return EXIT_OK


def _tables(name: str) -> list[str]:
    tables = [f"{report.report}/{table.id}" for report, table in chosen([name])]
    having = [table for table in tables if _printed(table)]
    if not having:
        others = sorted({f"{figure.report}/{figure.table}" for figure in figures(shipped()) if _memory(figure)})
        raise ConfigurationError(f"{name} prints no memory of a training step; choose {', '.join(others)}")
    return having


def _memory(figure: PublishedFigure) -> bool:
    known = recipe_of(f"{figure.report}/{figure.table}", figure.line)
    return figure.metric in _METRICS and figure.workload == "train_step" and known is not None


def _printed(table: str) -> list[PublishedFigure]:
    """The figures of one kind of memory that a table prints."""
    found = [figure for figure in figures(shipped()) if f"{figure.report}/{figure.table}" == table and _memory(figure)]
    kinds = [metric for metric in _METRICS if any(figure.metric == metric for figure in found)]
    return [figure for figure in found if figure.metric == kinds[0]] if kinds else []


def _explain(table: str, options: argparse.Namespace) -> None:
    shown = _printed(table)
    printed = [figure.metric_value for figure in shown]
    setups = sorted(_search(shown), key=lambda setup: setup.error(printed))
    if not setups:
        raise ConfigurationError(f"{table}: no set-up that is searched can be computed for all of its rows")
    ours = _settings_of(_recipe(shown[0]), shown[0].metric)
    if options.json:
        print_json([_record(setup, shown, printed) for setup in setups])
        return
    exact = shown[0].metric == "final_device_gib"
    what = "stays after a step" if exact else "is held at the peak, as the projection has it"
    print(f"{table}: {len(setups)} set-ups; what {what}, GiB of a device, and printed less computed")
    print("printed: " + ", ".join(f"line {figure.line}: {figure.metric_value:.4g}" for figure in shown))
    if shown[0].metric == "whole_device_gib":
        print("printed is the whole device: contexts, libraries and what the allocator holds beyond stand in no set-up")
    width = max(len(_words(setup)) for setup in setups[: options.limit])
    for setup in setups[: options.limit]:
        values = ", ".join(
            f"{here:.4g} ({rest:+.2f})" for here, rest in zip(setup.gib, setup.residuals(printed), strict=True)
        )
        mark = "  <- the recipe" if _is_recipe(setup, ours) else ""
        print(f"  {_words(setup):{width}}  {setup.error(printed):6.1%}  {values}{mark}")
    best = setups[0]
    print(f"best, parts of line {shown[0].line}: " + ", ".join(f"{n} {v:.3g}" for n, v in best.parts[0].items() if v))


def _is_recipe(setup: Setup, ours: Mapping[str, str]) -> bool:
    settings = dict(setup.settings)
    return all(value in settings[name].split(" or ") for name, value in ours.items())


def _words(setup: Setup) -> str:
    return ", ".join(f"{name} {value}" for name, value in setup.settings)


def _record(setup: Setup, shown: Sequence[PublishedFigure], printed: Sequence[float]) -> dict[str, Any]:
    rests = setup.residuals(printed)
    lines = [
        {"line": figure.line, "printed_gib": there, "gib": here, "residual_gib": rest, "parts_gib": dict(parts)}
        for figure, there, here, rest, parts in zip(shown, printed, setup.gib, rests, setup.parts, strict=True)
    ]
    return {"settings": dict(setup.settings), "largest_error": setup.error(printed), "lines": lines}


def _recipe(figure: PublishedFigure) -> Recipe:
    recipe = recipe_of(f"{figure.report}/{figure.table}", figure.line)
    assert recipe is not None, "only figures with a recipe are asked about"
    return recipe


def _search(shown: Sequence[PublishedFigure]) -> Iterator[Setup]:
    """Every set-up that all runs can have; those that differ in nothing that is held come once, with both names."""
    found: dict[tuple[Any, ...], Setup] = {}
    for settings in _grid(shown):
        parts = [_parts(figure, settings) for figure in shown]
        if any(one is None for one in parts):
            continue
        held_parts = tuple(one for one in parts if one is not None)
        gib = tuple(sum(one.values()) for one in held_parts)
        key = tuple(round(value, 6) for value in gib), *(settings[name] for name in settings if name != "strategy")
        names = [dict(found[key].settings)["strategy"]] if key in found else []
        named = {**settings, "strategy": " or ".join([*names, settings["strategy"]])}
        found[key] = Setup(settings=tuple(named.items()), gib=gib, parts=held_parts)
    return iter(found.values())


def _grid(shown: Sequence[PublishedFigure]) -> Iterator[dict[str, str]]:
    """What is varied: what the rows state stays."""
    recipe, row = _recipe(shown[0]), shown[0]
    step = TrainStep(**recipe.parameters)
    model, stated = step.find_model(), row.parameters
    several = any(_recipe(figure).world_size != 1 for figure in shown)
    strategies = [name for name in _STRATEGIES if not (several and name == "single")]
    if any(_recipe(figure).parameters["strategy"] == "hybrid" for figure in shown):
        strategies = ["hybrid"]  # its mesh says what is spread
    narrow = step.dtype if step.dtype in ("bf16", "fp16") else "bf16"
    dtypes = [narrow] if stated.get("dtype") in ("amp", "bf16", "fp16") else ["fp32", narrow]
    encoders = ["none"]
    if isinstance(model, Dit):
        encoders += ["sdvae", *(["t5xxl-sdvae"] if isinstance(model, Stdit) else [])]
    peak = row.metric != "final_device_gib"
    choices = {
        "strategy": [str(stated["strategy"])] if stated.get("strategy") in _STRATEGIES else strategies,
        "dtype": dtypes,
        "encoders": encoders,
        "ema": ["none", "fp32", "bf16"],
        "checkpointing": ["none", "full"] if peak else [step.checkpointing],
    }
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _settings_of(recipe: Recipe, metric: str) -> dict[str, str]:
    """What the recipe has of what is varied."""
    step = TrainStep(**recipe.parameters)
    program = step.find_program()
    found = {"strategy": step.strategy, "dtype": step.dtype, "encoders": program.encoders, "ema": program.ema}
    return found if metric == "final_device_gib" else {**found, "checkpointing": step.checkpointing}


def _parts(figure: PublishedFigure, settings: Mapping[str, str]) -> Mapping[str, float] | None:
    """GiB by part of one run set up so; None where that cannot be."""
    recipe = _recipe(figure)
    left_out = ("builds", "data", *(() if settings["strategy"] == "hybrid" else ("options",)))
    parameters = {name: value for name, value in recipe.parameters.items() if name not in left_out}
    program = {name: settings[name] for name in _PROGRAM}
    fields = {name: value for name, value in settings.items() if name not in _PROGRAM}
    ranks = recipe.world_size
    try:
        step = TrainStep(**{**parameters, **fields, "program": program, "num_workers": 0})
        if figure.metric == "final_device_gib":
            parts = held(step, ranks)
            return None if parts is None else {name: size / GIB for name, size in parts.items()}
        training = step.work(MeshShape.on(ranks, step.mesh)).training
        if training is None:
            return None
        job = Job.of(training, load_catalog(()).find(figure.platforms[0]))
        whole = with_program(job, memory_of(job.architecture, job.layout, job.implementation))
        kept = {"weights": whole.parameters, "optimizer": whole.optimizer, "encoders": whole.encoders, "EMA": whole.ema}
        parts = {**kept, "at the peak": whole.total - sum(kept.values())}
        return {name: size / GIB for name, size in parts.items()}
    except InvalidParameter:
        return None


EXPLAIN = Command(
    help="search for set-ups whose memory is the one that a published table prints",
    arguments=_arguments,
    run=_run,
)
