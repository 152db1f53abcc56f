"""``perfsuite explain 000/memory``: search for set-ups that reproduce the memory figures of a published table.

The search varies strategy, dtype, frozen encoders, EMA and, for a printed peak, checkpointing.  The module
:mod:`perfsuite.workloads.training.train_step` computes the memory after a step exactly and estimates its peak.  A
set-up that gives the figures is possible, not proven.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.base.units import GIB
from perfsuite.cli.main import Command, print_json, print_lines
from perfsuite.models.dit import Dit, Stdit
from perfsuite.platforms import load_catalog
from perfsuite.published.lookup import PublishedFigure, chosen, figures, shipped, table_of
from perfsuite.published.recipes import recipe_of
from perfsuite.published.recipes.recipe import Recipe
from perfsuite.workloads.training.train_step import TrainStep, estimate, held

_METRICS = ("final_device_gib", "peak_gib", "whole_device_gib")
"""Metrics of memory in a table, the most exactly computed one first."""
_STRATEGIES = ("single", "ddp", "zero_redundancy", "fsdp", "zero1", "zero2", "zero3")
_PROGRAM = ("encoders", "ema")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A possible set-up of the runs with its computed memory."""

    settings: tuple[tuple[str, str], ...]  # Name and value of each varied setting.
    gib: tuple[float, ...]  # GiB for each printed figure.
    parts: tuple[Mapping[str, float], ...]  # GiB by part, for each printed figure.

    def residuals(self, printed: Sequence[float]) -> tuple[float, ...]:
        """Return printed minus computed memory in GiB."""
        return tuple(there - here for there, here in zip(printed, self.gib, strict=True))

    def error(self, printed: Sequence[float]) -> float:
        """Return the largest residual as a share of its figure."""
        return max(abs(rest) / there for rest, there in zip(self.residuals(printed), printed, strict=True))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="REPORT/TABLE", help="explain this table, such as 000/memory")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="print the N best set-ups (default: 10)")
    parser.add_argument("--json", action="store_true", help="print every set-up as JSON")


def _run(options: argparse.Namespace) -> None:
    if options.limit < 1:
        raise ConfigurationError(f"--limit {options.limit} prints nothing; give a count from 1")
    tables = [f"{report.report}/{table.id}" for report, table in chosen([options.table])]
    having = {table: shown for table in tables if (shown := _printed(table))}
    if not having:
        others = ", ".join(sorted({table_of(figure) for figure in figures(shipped()) if _memory(figure)}))
        raise ConfigurationError(f"{options.table} prints no memory of a training step; choose {others}")
    for table, shown in having.items():
        _explain(table, shown, options)


def _memory(figure: PublishedFigure) -> bool:
    recipe = recipe_of(table_of(figure), figure.line)
    return figure.metric in _METRICS and figure.workload == "train_step" and recipe is not None


def _printed(table: str) -> list[PublishedFigure]:
    found = [figure for figure in figures(shipped()) if table_of(figure) == table and _memory(figure)]
    kinds = [metric for metric in _METRICS if any(figure.metric == metric for figure in found)]
    return [figure for figure in found if figure.metric == kinds[0]] if kinds else []


def _explain(table: str, shown: Sequence[PublishedFigure], options: argparse.Namespace) -> None:
    printed = [figure.metric_value for figure in shown]
    setups = sorted(_search(shown), key=lambda setup: setup.error(printed))
    if not setups:
        raise ConfigurationError(f"{table}: no set-up can be computed for all of its rows; choose another table")
    if options.json:
        print_json([_record(setup, shown, printed) for setup in setups])
    else:
        print_lines(_lines(table, setups, shown, printed, options.limit))


def _lines(
    table: str, setups: Sequence[Setup], shown: Sequence[PublishedFigure], printed: Sequence[float], most: int
) -> Iterator[str]:
    recipe = _settings_of(_recipe(shown[0]), shown[0].metric)
    moment = "after a step" if shown[0].metric == "final_device_gib" else "at the peak of the projection"
    yield f"{table}: {len(setups)} set-ups; GiB of a device {moment}, in brackets printed minus computed"
    yield "printed: " + ", ".join(f"line {figure.line}: {figure.metric_value:.4g}" for figure in shown)
    if shown[0].metric == "whole_device_gib":
        yield "printed is the whole device; no set-up includes contexts, libraries and unused memory of the allocator"
    for setup in setups[:most]:
        values = ", ".join(
            f"{here:.4g} ({rest:+.2f})" for here, rest in zip(setup.gib, setup.residuals(printed), strict=True)
        )
        settings = dict(setup.settings)
        is_recipe = all(value in settings[name].split(" or ") for name, value in recipe.items())
        mark = "  <- the recipe" if is_recipe else ""
        words = ", ".join(f"{name} {value}" for name, value in setup.settings)
        yield f"  {setup.error(printed):6.1%}  {words}: {values}{mark}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in setups[0].parts[0].items() if value)
    yield f"best, parts of line {shown[0].line}: {parts}"


def _record(setup: Setup, shown: Sequence[PublishedFigure], printed: Sequence[float]) -> dict[str, Any]:
    rests = setup.residuals(printed)
    lines = [
        {"line": figure.line, "printed_gib": there, "gib": here, "residual_gib": rest, "parts_gib": dict(parts)}
        for figure, there, here, rest, parts in zip(shown, printed, setup.gib, rests, setup.parts, strict=True)
    ]
    return {"settings": dict(setup.settings), "largest_error": setup.error(printed), "lines": lines}


def _recipe(figure: PublishedFigure) -> Recipe:
    recipe = recipe_of(table_of(figure), figure.line)
    assert recipe is not None, "only figures with a recipe are asked about"
    return recipe


def _search(shown: Sequence[PublishedFigure]) -> Iterator[Setup]:
    """Yield every set-up that all runs can have; strategies with equal memory are one set-up with both names."""
    found: dict[tuple[Any, ...], Setup] = {}
    for settings in _grid(shown):
        parts = tuple(one for figure in shown if (one := _parts(figure, settings)) is not None)
        if len(parts) < len(shown):
            continue
        gib = tuple(sum(one.values()) for one in parts)
        key = tuple(round(value, 6) for value in gib), *(settings[name] for name in settings if name != "strategy")
        names = [dict(found[key].settings)["strategy"]] if key in found else []
        named = {**settings, "strategy": " or ".join([*names, settings["strategy"]])}
        found[key] = Setup(settings=tuple(named.items()), gib=gib, parts=parts)
    return iter(found.values())


def _grid(shown: Sequence[PublishedFigure]) -> Iterator[dict[str, str]]:
    """Yield the settings to try; settings stated in the rows are not varied."""
    recipe, row = _recipe(shown[0]), shown[0]
    step = TrainStep(**recipe.parameters)
    model, stated = step.find_model(), row.parameters
    several = any(_recipe(figure).world_size != 1 for figure in shown)
    strategies = [name for name in _STRATEGIES if not (several and name == "single")]
    if any(_recipe(figure).parameters["strategy"] == "hybrid" for figure in shown):
        strategies = ["hybrid"]  # its mesh defines the sharding
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
    step = TrainStep(**recipe.parameters)
    program = step.find_program()
    found = {"strategy": step.strategy, "dtype": step.dtype, "encoders": program.encoders, "ema": program.ema}
    return found if metric == "final_device_gib" else {**found, "checkpointing": step.checkpointing}


def _parts(figure: PublishedFigure, settings: Mapping[str, str]) -> Mapping[str, float] | None:
    recipe = _recipe(figure)
    left_out = ("builds", "data", *(() if settings["strategy"] == "hybrid" else ("options",)))
    parameters = {name: value for name, value in recipe.parameters.items() if name not in left_out}
    program = {name: settings[name] for name in _PROGRAM}
    fields = {name: value for name, value in settings.items() if name not in _PROGRAM}
    ranks = recipe.world_size
    try:
        step = TrainStep(**{**parameters, **fields, "program": program, "num_workers": 0})
        device = load_catalog(()).find(figure.platforms[0])
        if figure.metric == "final_device_gib":
            parts = held(step, ranks, device)
            return None if parts is None else {name: size / GIB for name, size in parts.items()}
        whole = estimate(step, ranks, device)
        if whole is None:
            return None
        kept = {"weights": whole.parameters, "optimizer": whole.optimizer, "encoders": whole.encoders, "EMA": whole.ema}
        parts = {**kept, "at the peak": whole.total - sum(kept.values())}
        return {name: size / GIB for name, size in parts.items()}
    except InvalidParameter:
        return None


EXPLAIN = Command(
    help="search for set-ups that reproduce the memory figures of a published table",
    example="perfsuite explain 000/memory",
    arguments=_arguments,
    run=_run,
)
