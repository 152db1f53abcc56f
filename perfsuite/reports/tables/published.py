"""A published row under perfsuite's names, and the published rows that a measured case reproduces."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from perfsuite.base.units import significant
from perfsuite.published.lookup import PublishedFigure, PublishedRun, lookup, rows_of, select, table_of
from perfsuite.published.recipes import Recipe, find, recipe_of, recipes
from perfsuite.record.result import Result
from perfsuite.reports.tables.case_names import case_name, published_log

_PLATFORM = re.compile(r"\[[a-z0-9_]+-")


def plain_id(node: str) -> str:
    """A node id without folder and platform.

    >>> plain_id("test_perf/test_published.py::test_published[s4000-002-llama2_7b-bf16-1x8]")
    'test_published.py::test_published[-002-llama2_7b-bf16-1x8]'
    """
    return _PLATFORM.sub("[-", node.rpartition("/")[2], count=1)


@functools.cache
def _by_id() -> Mapping[str, Recipe]:
    return {plain_id(recipe.case("x")): recipe for recipe in recipes()}


def recipe_of_case(node: str) -> Recipe | None:
    """Return the published run that a case is, or is another reading of; None for any other case."""
    recipe = _by_id().get(plain_id(node))
    return find(recipe.beside) if recipe and recipe.beside else recipe


def rows_of_case(node: str) -> tuple[tuple[str, int], ...]:
    """Return the published rows that a case reproduces as (table, line); none for any other case.

    >>> rows_of_case("test_perf/test_published.py::test_published[s4000-002-llama2_7b-bf16-1x8]")
    (('002/performance', 50),)
    """
    recipe = recipe_of_case(node)
    return recipe.rows if recipe else ()


def is_recipe(node: str) -> bool:
    """Whether a case is a published run."""
    return plain_id(node) in _by_id()


@functools.cache
def id_of_row(table: str, line: int) -> str:
    """Plain id of the case that is a published row; empty where there is none."""
    recipe = recipe_of(table, line)
    return plain_id(recipe.case("x")) if recipe else ""


def words_of_row(table: str, line: int) -> str:
    """Return the words for ``-k`` that select that case; empty without one."""
    return id_of_row(table, line).partition("[-")[2].rstrip("]")


_ALSO = {"accumulation": "num_micro_batches", "local_batch_size": "micro_batch_size"}
"""Other names that a report may state a setting under."""


@dataclass(frozen=True, kw_only=True)
class PublishedLine:
    """One row of a published table, by metric."""

    table: str  # ``000/overview``.
    run: PublishedRun
    figures: Mapping[str, PublishedFigure]  # By name of the metric; none where the run did not fit.

    @property
    def line(self) -> int:
        """Line of the report."""
        return self.run.line

    @property
    def file(self) -> str:
        """The report's file."""
        return self.run.source.partition(",")[0]

    def setting(self, name: str) -> object:
        """Return the report's value of a setting under perfsuite's name; None if it states none."""
        run = self.run
        stated = run.parameters.get(name, run.parameters.get(_ALSO.get(name, "")))
        return stated if stated is not None else self._derived().get(name)

    def _derived(self) -> dict[str, object]:
        run = self.run
        derived: dict[str, object] = {"ranks": run.world_size, "model": run.model}
        derived.update(case_name=run.name or None, axes=run.name or None, log_name=published_log(run.name))
        name = case_name(run.name)
        derived["group"] = name.group if name else None
        nodes, micro, dp = (run.parameters.get(name) for name in ("nodes", "micro_batch_size", "dp"))
        if isinstance(nodes, int) and run.world_size:
            derived["devices_per_node"] = run.world_size // nodes
        stages = run.parameters.get("stages")
        if isinstance(stages, int) and run.world_size:
            derived["devices_per_stage"] = run.world_size // stages
        if isinstance(micro, int) and isinstance(dp, int):
            derived["micro_times_dp"] = micro * dp
        return derived

    @property
    def name(self) -> str:
        """``published: 8 s4000 opensora``."""
        run = self.run
        count = "" if run.world_size is None else f"{run.world_size} "
        nodes = run.parameters.get("nodes")
        if isinstance(nodes, int) and run.world_size:
            count = f"{nodes} x {run.world_size // nodes} "
        return f"published: {count}{' or '.join(run.platforms)} {run.model}".strip()

    @property
    def missing(self) -> str:
        """Why the report has no figure in the row."""
        if self.figures:
            return ""
        return "out of memory, as published" if self.run.out_of_memory else "no figure, as published"


@functools.cache
def published_of(tables: tuple[str, ...]) -> tuple[PublishedLine, ...]:
    """The rows of these tables, in the reports' order, also those without figures; a table is ``report/id``."""
    figures: dict[tuple[str, int], dict[str, PublishedFigure]] = {}
    for figure in select():
        figures.setdefault((table_of(figure), figure.line), {})[figure.metric] = figure
    return tuple(
        PublishedLine(table=table_of(run), run=run, figures=figures.get((table_of(run), run.line), {}))
        for run in rows_of(tables)
    )


def published_lines(results: Iterable[Result]) -> Iterator[str]:
    """A line per published figure of a measured case: measured value, published one, its label and why; no gate."""
    for result in results:
        for metric in result.metrics if not result.simulated else ():
            if metric.value is None:
                continue
            run = (result.platform, result.workload, result.parameters, result.world_size)
            measured = f"{significant(metric.value)} {metric.unit}".strip()
            for figure in lookup(*run, metric=metric.name):
                yield f"{result.case}: {metric.name} measured {measured}; {figure}"
