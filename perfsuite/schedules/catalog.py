"""All schedules by name, with their legal counts, generators and bubble formulas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from perfsuite.base.errors import InvalidParameter, nearest
from perfsuite.schedules import orders
from perfsuite.schedules.schedule import Order, Placement, Schedule

_KEPT = 8  # Schedules in the cache; 64 stages of 1024 micro-batches are 131,072 actions: about a second and 10 MB.
Generator = Callable[..., Order]
"""Makes the order of a rank from its number, and from ``ranks``, ``num_micro_batches`` and ``stages_per_rank``."""
Count = int | Fraction  # A fraction where a published table gives only an interval.


def naive_bubble(ranks: Count, num_micro_batches: Count = 1, stages_per_rank: Count = 1) -> Fraction:
    """Return 1 - 1/p: one rank works at a time.

    >>> naive_bubble(4)
    Fraction(3, 4)
    """
    return 1 - Fraction(1, ranks)


def fill_drain_bubble(ranks: Count, num_micro_batches: Count, stages_per_rank: Count) -> Fraction:
    """Return (p - 1) / (v m + p - 1), the bubble of equal stages for m >= p or v = 1.

    With m < p, a rank also waits v - 1 times p - m slots for the return of its first micro-batch.

    >>> fill_drain_bubble(4, 8, 1), fill_drain_bubble(4, 8, 2), fill_drain_bubble(4, 2, 2)
    (Fraction(3, 11), Fraction(3, 19), Fraction(5, 9))
    """
    empty = ranks - 1 + (stages_per_rank - 1) * max(0, ranks - num_micro_batches)
    return Fraction(empty, stages_per_rank * num_micro_batches + empty)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One row of the catalog."""

    name: str  # Name in parameters and ids.
    title: str  # Name in tables and pictures.
    generate: Generator
    placement: Placement = "loop"
    fewest_stages_per_rank: int = 1
    most_stages_per_rank: int | None = 1  # None: unlimited.
    splits_backward: bool = False  # Whether input and weight gradients are separate actions.
    legal_count: Callable[[int, int], bool] = lambda ranks, num_micro_batches: num_micro_batches >= 1
    """Whether the schedule exists for (ranks, num_micro_batches)."""
    count_rule: str = "at least 1"  # The rule of ``legal_count`` in words.
    bubble: Callable[[int, int, int], Fraction] | None = None
    """bubble_ratio of equal stages from (p, m, v); None where it depends on the durations of F, I and W."""


_IN_ROUNDS: Mapping[str, Any] = {
    "fewest_stages_per_rank": 2,
    "most_stages_per_rank": None,
    "legal_count": lambda ranks, count: count >= 1 and count % max(1, count // ranks) == 0,
    "count_rule": "a multiple of its number of rounds max(1, num_micro_batches // ranks)",
}
_V_SHAPED: Mapping[str, Any] = {
    "placement": "v",
    "fewest_stages_per_rank": 2,
    "most_stages_per_rank": 2,
    "splits_backward": True,
}
_SPECS = (
    ScheduleSpec(name="naive", title="Naive", generate=orders.naive, bubble=naive_bubble),
    ScheduleSpec(name="gpipe", title="GPipe", generate=orders.gpipe, bubble=fill_drain_bubble),
    ScheduleSpec(name="1f1b", title="1F1B", generate=orders.one_f_one_b, bubble=fill_drain_bubble),
    ScheduleSpec(
        name="interleaved_1f1b",
        title="Interleaved 1F1B",
        generate=orders.interleaved_1f1b,
        **_IN_ROUNDS,
        bubble=fill_drain_bubble,
    ),
    ScheduleSpec(
        name="looped_bfs",
        title="Looped BFS",
        generate=orders.looped_bfs,
        fewest_stages_per_rank=2,
        most_stages_per_rank=None,
        bubble=fill_drain_bubble,
    ),
    ScheduleSpec(
        name="interleaved_zero_bubble",
        title="Interleaved zero-bubble",
        generate=orders.interleaved_zero_bubble,
        **_IN_ROUNDS,
        splits_backward=True,
    ),
    ScheduleSpec(name="zbv", title="ZBV", generate=orders.zbv, **_V_SHAPED),
    ScheduleSpec(
        name="dualpipev",
        title="DualPipeV",
        generate=orders.dualpipev,
        **_V_SHAPED,
        legal_count=lambda ranks, num_micro_batches: num_micro_batches >= 2 * ranks,
        count_rule="at least 2 x ranks, one per stage",
    ),
)

SCHEDULES: Mapping[str, ScheduleSpec] = {spec.name: spec for spec in _SPECS}
"""By name; a new schedule is one generator and one row."""


def find_schedule(name: str) -> ScheduleSpec:
    """Return the row of this name; raises InvalidParameter with all names and the nearest one."""
    if name not in SCHEDULES:
        near = nearest(name, SCHEDULES, most=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidParameter(f"schedule={name!r} is unknown; choose {_either(list(SCHEDULES))}{meant}")
    return SCHEDULES[name]


def check_counts(name: str, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> None:
    """Raise InvalidParameter with the legal choices unless the schedule exists for these counts."""
    spec = find_schedule(name)
    if ranks < 1:
        raise InvalidParameter(f"ranks={ranks} for schedule {name}; a pipeline has at least 1 rank")
    fewest, most = spec.fewest_stages_per_rank, spec.most_stages_per_rank
    if stages_per_rank < fewest or (most is not None and stages_per_rank > most):
        legal = f"at least {fewest}" if most is None else f"{fewest}"
        raise InvalidParameter(
            f"stages_per_rank={stages_per_rank} for schedule {name}, which has {legal} "
            f"stage{'s' if fewest > 1 else ''} per rank; choose {legal}, or another schedule"
        )
    if not spec.legal_count(ranks, num_micro_batches):
        raise InvalidParameter(
            f"num_micro_batches={num_micro_batches} with {ranks} ranks for schedule {name}, which needs "
            f"{spec.count_rule}; choose {_either(_nearest_counts(spec, ranks, num_micro_batches))}"
        )


def make_schedule(name: str, *, ranks: int, num_micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """Return the schedule of this name; ``stages_per_rank`` is its smallest legal number by default.

    >>> schedule = make_schedule("1f1b", ranks=2, num_micro_batches=3)
    >>> [" ".join(map(str, order)) for order in schedule.orders]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']

    Raises InvalidParameter with the legal choices for an unknown name or illegal counts.
    """
    spec = find_schedule(name)
    stages_per_rank = spec.fewest_stages_per_rank if stages_per_rank is None else stages_per_rank
    check_counts(name, ranks=ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    return _make(name, ranks, num_micro_batches, stages_per_rank)


@functools.lru_cache(maxsize=_KEPT)
def _make(name: str, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Schedule:
    spec = find_schedule(name)
    counts = {"ranks": ranks, "num_micro_batches": num_micro_batches, "stages_per_rank": stages_per_rank}
    orders = tuple(spec.generate(rank, **counts) for rank in range(ranks))
    return Schedule(name=name, placement=spec.placement, orders=orders, **counts)


def formula_bubble(schedule: Schedule) -> float | None:
    """Return the bubble_ratio of equal stages by the schedule's formula; None without a formula."""
    spec = find_schedule(schedule.name)
    if spec.bubble is None:
        return None
    return float(spec.bubble(schedule.ranks, schedule.num_micro_batches, schedule.stages_per_rank))


def _nearest_counts(spec: ScheduleSpec, ranks: int, num_micro_batches: int) -> list[int]:
    """Return the nearest legal numbers of micro-batches below and above this one."""
    below = (count for count in range(num_micro_batches - 1, 0, -1) if spec.legal_count(ranks, count))
    above = (count for count in itertools.count(num_micro_batches + 1) if spec.legal_count(ranks, count))
    return [*itertools.islice(below, 1), next(above)]


def _either(choices: list[str] | list[int]) -> str:
    """Return ``1, 2 or 4``."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last
