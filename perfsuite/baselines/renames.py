"""What workloads were called before, and where their parameters went: stored runs still match the cases of today.

A case is the same case when its parameters are.  Whoever renames a workload or a parameter, or gives a workload one
more, adds a row to ``RENAMES``; rows are never taken away, because files and journals of any age are read.  Files are
read in the names of today and written in them when they next change, or by ``perfsuite baselines rename``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perfsuite.baselines.baseline import Baseline, CaseKey, Entry, joined
from perfsuite.baselines.runs import CaseIdentity
from perfsuite.records import Result

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Rename:
    """One change of a workload's name or parameters; what is not named keeps its name and its value."""

    old: str
    """``module:Class`` as stored."""
    new: str
    """``module:Class`` after the change; equal to ``old`` where only parameters changed."""
    moved: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """Old parameter -> new one; ``options.schedule`` is the key ``schedule`` in the parameter ``options``."""
    unless_null: frozenset[str] = frozenset()
    """Old parameters that are left out where they are null."""
    added: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """Parameters (or keys in one, as in ``moved``) that were not there, and the value that this stood for, as JSON."""

    def apply(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters after the change; those given stay as they are."""
        renamed = {name: value for name, value in parameters.items() if name not in self.moved}
        for name, target in self.moved.items():
            if name in parameters and not (name in self.unless_null and parameters[name] is None):
                _put(renamed, target, parameters[name])
        for target, value in self.added.items():
            _put(renamed, target, value)
        return renamed


def _put(parameters: dict[str, Any], target: str, value: Any) -> None:
    """Set what has no value yet."""
    name, _, key = target.partition(".")
    if key:
        parameters[name] = {key: value, **parameters.get(name, {})}
    else:
        parameters.setdefault(name, value)


def _new_field(workload: str, name: str, value: Any) -> Rename:
    """Cases stored before ``workload`` had this field ran with ``value``."""
    where = f"perfsuite.workloads.{workload}"
    return Rename(old=where, new=where, added={name: value})


def _moved_module(old: str, new: str, workload: str) -> Rename:
    return Rename(old=f"perfsuite.workloads.{old}:{workload}", new=f"perfsuite.workloads.{new}:{workload}")


RENAMES: tuple[Rename, ...] = (
    _moved_module("train_step", "training.train_step", "TrainStep"),
    _moved_module("largest_batch", "training.largest_batch", "LargestBatch"),
    Rename(
        old="perfsuite.workloads.pipeline_step:PipelineStep",
        new="perfsuite.workloads.training.train_step:TrainStep",
        moved={
            "schedule": "options.schedule",
            "stages_per_rank": "options.stages_per_rank",
            "num_micro_batches": "accumulation",
        },
        unless_null=frozenset({"stages_per_rank"}),
        added={
            "strategy": "hybrid",
            "checkpointing": "none",
            "compiled": False,
            "data": "synthetic",
            "dataset_samples": 704,
            "num_workers": 0,
            "environment": {},
            "loss_steps": 20,
            "target_loss": None,
        },
    ),
    _moved_module("emulated_pipeline", "training.emulated_pipeline", "EmulatedPipeline"),
    _new_field("training.train_step:TrainStep", "attention", "auto"),
    _new_field("training.largest_batch:LargestBatch", "attention", "auto"),
)
"""Every change, oldest first: a run passes through all that came after it."""


def names_of_today(
    workload: str, parameters: Mapping[str, Any], renames: Sequence[Rename] = RENAMES
) -> tuple[str, Mapping[str, Any]]:
    """A stored workload and its parameters as they are called today.

    >>> names_of_today("perfsuite.workloads.train_step:TrainStep", {"model": "gpt2"})
    ('perfsuite.workloads.training.train_step:TrainStep', {'model': 'gpt2', 'attention': 'auto'})
    """
    for rename in renames:
        if rename.old == workload:
            workload, parameters = rename.new, rename.apply(parameters)
    return workload, parameters


def case_of_today(case: CaseIdentity, renames: Sequence[Rename] = RENAMES) -> CaseIdentity:
    """A stored case in the names of today."""
    workload, parameters = names_of_today(case.workload, case.parameters, renames)
    return dataclasses.replace(case, workload=workload, parameters=parameters)


def result_of_today(result: Result, renames: Sequence[Rename] = RENAMES) -> Result:
    """A journaled result in the names of today."""
    workload, parameters = names_of_today(result.workload, result.parameters, renames)
    return dataclasses.replace(result, workload=workload, parameters=parameters)


def baseline_of_today(baseline: Baseline, renames: Sequence[Rename] = RENAMES) -> tuple[Baseline, tuple[str, ...]]:
    """A file in the names of today, and one line per case that had others.

    A case that two versions of perfsuite stored under two names becomes one.
    """
    entries: dict[CaseKey, Entry] = {}
    said: list[str] = []
    for entry in baseline.entries.values():
        case = case_of_today(entry.case, renames)
        if case != entry.case:
            said.append(f"{case.node}: {'; '.join(_differences(entry.case, case))}")
        renamed = dataclasses.replace(entry, case=case)
        entries[case.key] = (
            joined(entries[case.key], renamed, baseline.machine_session) if case.key in entries else renamed
        )
    return dataclasses.replace(baseline, entries=entries), tuple(said)


def _differences(old: CaseIdentity, new: CaseIdentity) -> list[str]:
    said = [f"{old.workload} is {new.workload}"] if old.workload != new.workload else []
    gone = [name for name in old.parameters if name not in new.parameters]
    if gone:
        said.append(f"no more {', '.join(gone)}")
    changed = [
        f"{name}={json.dumps(value)}"
        for name, value in new.parameters.items()
        if name not in old.parameters or old.parameters[name] != value
    ]
    if changed:
        said.append(f"now {', '.join(changed)}")
    return said
