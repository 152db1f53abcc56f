"""Compare the choice of the advisor with the measured best, in groups of measured layouts of one job."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.backtest.fit import Constants
from benchmarks.backtest.leave_one_out import calibration_for, fitted, steps_of
from benchmarks.backtest.rows import PublishedStep
from benchmarks.backtest.tables import TABLES, kept
from perfsuite.projection.advisor import Candidate, errors_of, ties_of
from perfsuite.projection.engine import StepTime
from perfsuite.projection.layout import Layout
from perfsuite.projection.memory import memory_of

FEWEST = 3
"""Layouts of a group; of experts only pairs were measured."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One group: a model, a batch and a number of devices."""

    name: str
    measured_s: Mapping[Layout, float]
    """The median where a layout was run several times."""
    ties: tuple[Layout, ...]
    """Layouts that the advisor prints, its first choice first."""
    best_row: PublishedStep

    @property
    def chosen(self) -> Layout:
        """The first choice."""
        return self.ties[0]

    @property
    def best(self) -> Layout:
        """The fastest that was measured."""
        return self.best_row.layout


def choices_of(
    rows: Sequence[PublishedStep], steps: Sequence[StepTime], software: str, values: Constants
) -> list[Choice]:
    """Groups among rows and their projected steps; those of too few layouts left out."""
    groups: dict[tuple[object, ...], dict[Layout, list[tuple[PublishedStep, StepTime]]]] = {}
    for row, step in zip(rows, steps, strict=True):
        key = (row.model, row.layout.world_size, row.layout.global_batch, row.architecture.tokens)
        groups.setdefault(key, {}).setdefault(row.layout, []).append((row, step))
    return [
        _choice(" ".join(map(str, key)), group, software, values)
        for key, group in groups.items()
        if len(group) >= (2 if "deepseek" in str(key[0]) else FEWEST)
    ]


def _choice(
    name: str,
    group: Mapping[Layout, Sequence[tuple[PublishedStep, StepTime]]],
    software: str,
    values: Constants,
) -> Choice:
    measured = {layout: statistics.median(row.step_time_s for row, _ in runs) for layout, runs in group.items()}
    candidates = []
    for layout, ((row, step), *_) in group.items():
        memory = memory_of(row.architecture, layout, row.implementation(software))
        candidates.append(Candidate(layout=layout, step=step, memory=memory))
    ranked = sorted(candidates, key=lambda one: one.step.seconds)
    best = min(measured, key=lambda layout: measured[layout])
    row = group[best][0][0]
    ties = ties_of(ranked, errors_of(calibration_for(row, values)))
    return Choice(
        name=name,
        measured_s=measured,
        ties=tuple(one.layout for one in ties),
        best_row=next(run for run, _ in sorted(group[best], key=lambda run: run[0].step_time_s)),
    )


def choices_of_bloom() -> list[Choice]:
    """Return BLOOM's groups; each model is projected by constants of the other models."""
    table = TABLES["bloom-a100"]
    rows = kept(table)
    start = fitted(table, rows)
    found = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        values = fitted(table, [row for row in rows if row.model != model], start=start)
        found += choices_of(own, steps_of(own, table.software, values), table.software, values)
    return found
