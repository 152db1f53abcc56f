"""From the stored runs of all cases to what is judged of each: its quantities with their levels, fitted together."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from perfsuite.gate.evidence import CaseWork, GateCase, Judged
from perfsuite.gate.noise import History, Level, levels
from perfsuite.gate.quantity import Quantity, quantities
from perfsuite.record.verdict import TIME, GateSettings


def case_works(cases: Iterable[GateCase], settings: GateSettings) -> Iterator[CaseWork]:
    """Every case with what can be judged of it; nothing where nothing is stored, or too little."""
    chosen = [(given, *_quantities(given, settings)) for given in cases]
    enough = [(given.case.node, quantity) for given, known, _ in chosen for quantity in _enough(known, settings)]
    judged_of = {(node, quantity.name): quantity for node, quantity in enough}
    fitted = _fitted(judged_of, settings)

    @functools.cache
    def plain() -> dict[tuple[str, str], Level]:
        times = {key: quantity for key, quantity in judged_of.items() if quantity.name == TIME}
        return _fitted(times, replace(settings, yardstick=False))

    for given, known, flags in chosen:
        judged = [
            Judged(quantity=quantity, level=fitted[given.case.node, quantity.name])
            for quantity in _enough(known, settings)
        ]
        time = [len(quantity.history.values) for quantity in known if quantity.name == TIME]
        can_learn = not judged and not given.refusal and bool(given.stored)
        yield CaseWork(
            given,
            judged,
            flags,
            learnt=max(time, default=0) if can_learn else None,
            plain_level=functools.partial(lambda node: plain()[node, TIME], given.case.node),
        )


def _quantities(given: GateCase, settings: GateSettings) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    if given.refusal or not given.stored:
        return (), ()
    tolerance = settings.tolerance if given.tolerance is None else given.tolerance
    return quantities(given.case, given.stored, tolerance=tolerance, metric_tolerances=given.metric_tolerances)


def _enough(known: Sequence[Quantity], settings: GateSettings) -> list[Quantity]:
    """Those with enough stored runs; none where the time has not."""
    enough = [quantity for quantity in known if len(quantity.history.values) >= settings.min_stored]
    return enough if any(quantity.name == TIME for quantity in enough) else []


def _fitted(chosen: dict[tuple[str, str], Quantity], settings: GateSettings) -> dict[tuple[str, str], Level]:
    """Levels by node id and name: all times together, all means and all tails, because a host moves them alike."""
    enough = math.inf if settings.in_place else settings.min_suite
    groups: dict[str, dict[tuple[str, str], History]] = {}
    for key, quantity in chosen.items():
        shared = quantity.name if quantity.name == TIME or quantity.is_secondary else ""
        groups.setdefault(shared, {})[key] = quantity.history
    fitted: dict[tuple[str, str], Level] = {}
    for shared, group in groups.items():
        min_suite = enough if shared else math.inf
        group_levels = levels(list(group.values()), min_suite=min_suite, use_yardstick=settings.yardstick)
        fitted.update(zip(group, group_levels, strict=True))
    return fitted
