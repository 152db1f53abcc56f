"""Every schedule by name: what it needs, how it is made, what it should cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol

from perfsuite.base.errors import InvalidParameter, nearest
from perfsuite.schedules import alternating, v_shaped
from perfsuite.schedules.schedule import Order, Placement, Schedule

_KEPT = 8
"""Schedules that are kept: a plan, its checks and the closed form of each rank ask for the same one; 64 stages of 1024
micro-batches are 131,072 actions, about a second and 10 MB."""


class Generator(Protocol):
    """Makes the orders of all ranks from legal counts."""

    def __call__(self, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
        """One order per rank."""


Count = int | Fraction
"""A fraction where a published table leaves an interval."""


def naive_bubble(ranks: Count, num_micro_batches: Count = 1, stages_per_rank: Count = 1) -> Fraction:
    """1 - 1/p: one rank at a time works.

    >>> naive_bubble(4)
    Fraction(3, 4)
    """
    return 1 - Fraction(1, ranks)


def fill_drain_bubble(ranks: Count, num_micro_batches: Count, stages_per_rank: Count) -> Fraction:
    """(p - 1) / (v m + p - 1) for equal stages and m >= p or v = 1: p - 1 of v m + p - 1 slots of a stage are empty.

    With m < p a rank waits for its first micro-batch to come round again, v - 1 times p - m slots.

    >>> fill_drain_bubble(4, 8, 1), fill_drain_bubble(4, 8, 2), fill_drain_bubble(4, 2, 2)
    (Fraction(3, 11), Fraction(3, 19), Fraction(5, 9))
    """
    empty = ranks - 1 + (stages_per_rank - 1) * max(0, ranks - num_micro_batches)
    return Fraction(empty, stages_per_rank * num_micro_batches + empty)


def _any_count(ranks: int, num_micro_batches: int) -> bool:
    return num_micro_batches >= 1


def _even_rounds(ranks: int, num_micro_batches: int) -> bool:
    return num_micro_batches >= 1 and num_micro_batches % max(1, num_micro_batches // ranks) == 0


def _twice_the_ranks(ranks: int, num_micro_batches: int) -> bool:
    return num_micro_batches >= 2 * ranks


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One row of the catalogue."""

    name: str
    """As in parameters and ids."""
    title: str
    """As in tables and pictures."""
    generate: Generator
    placement: Placement = "loop"
    fewest_stages_per_rank: int = 1
    most_stages_per_rank: int | None = 1
    """None: any number."""
    splits_backward: bool = False
    """Runs input and weight gradients as actions of their own."""
    legal_count: Callable[[int, int], bool] = _any_count
    """(ranks, num_micro_batches) -> whether the schedule can be made."""
    count_rule: str = "at least 1"
    """What ``legal_count`` asks for, in words."""
    bubble: Callable[[int, int, int], Fraction] | None = None
    """bubble_ratio of equal stages from (p, m, v); None where it depends on how F, I and W compare."""
    torch_name: str = ""
    """Class in torch.distributed.pipelining by its name in ``get_schedule_class``; empty where torch has none."""


_SPECS = (
    ScheduleSpec(name="naive", title="Naive", generate=alternating.naive, bubble=naive_bubble),
    ScheduleSpec(name="gpipe", title="GPipe", generate=alternating.gpipe, bubble=fill_drain_bubble, torch_name="GPipe"),
    ScheduleSpec(
        name="1f1b", title="1F1B", generate=alternating.one_f_one_b, bubble=fill_drain_bubble, torch_name="1F1B"
    ),
    ScheduleSpec(
        name="interleaved_1f1b",
        title="Interleaved 1F1B",
        generate=alternating.interleaved_1f1b,
        fewest_stages_per_rank=2,
        most_stages_per_rank=None,
        legal_count=_even_rounds,
        count_rule="a multiple of its number of rounds max(1, num_micro_batches // ranks)",
        bubble=fill_drain_bubble,
        torch_name="Interleaved1F1B",
    ),
    ScheduleSpec(
        name="looped_bfs",
        title="Looped BFS",
        generate=alternating.looped_bfs,
        fewest_stages_per_rank=2,
        most_stages_per_rank=None,
        bubble=fill_drain_bubble,
        torch_name="LoopedBFS",
    ),
    ScheduleSpec(
        name="interleaved_zero_bubble",
        title="Interleaved zero-bubble",
        generate=alternating.interleaved_zero_bubble,
        fewest_stages_per_rank=2,
        most_stages_per_rank=None,
        splits_backward=True,
        legal_count=_even_rounds,
        count_rule="a multiple of its number of rounds max(1, num_micro_batches // ranks)",
        torch_name="InterleavedZeroBubble",
    ),
    ScheduleSpec(
        name="zbv",
        title="ZBV",
        generate=v_shaped.zbv,
        placement="v",
        fewest_stages_per_rank=2,
        most_stages_per_rank=2,
        splits_backward=True,
        torch_name="ZBVZeroBubble",
    ),
    ScheduleSpec(
        name="dualpipev",
        title="DualPipeV",
        generate=v_shaped.dualpipev,
        placement="v",
        fewest_stages_per_rank=2,
        most_stages_per_rank=2,
        splits_backward=True,
        legal_count=_twice_the_ranks,
        count_rule="at least 2 x ranks, one per stage",
        torch_name="DualPipeV",
    ),
)

SCHEDULES: Mapping[str, ScheduleSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
"""Immutable; a new schedule is one generator and one row."""


def find_schedule(name: str) -> ScheduleSpec:
    """The row of this name; InvalidParameter names all of them, and what a mistyped one may have meant."""
    if name not in SCHEDULES:
        near = nearest(name, SCHEDULES, most=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidParameter(f"schedule={name!r} is unknown; choose {_either(list(SCHEDULES))}{meant}")
    return SCHEDULES[name]


def check_counts(name: str, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> None:
    """Raise InvalidParameter, naming the legal choices, unless the schedule can be made with these counts."""
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
    """The schedule of this name; ``stages_per_rank`` is the fewest it can have unless given.

    >>> schedule = make_schedule("1f1b", ranks=2, num_micro_batches=3)
    >>> [" ".join(map(str, order)) for order in schedule.orders]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']

    Raises InvalidParameter with the legal choices for a name or counts that cannot be.
    """
    spec = find_schedule(name)
    stages_per_rank = spec.fewest_stages_per_rank if stages_per_rank is None else stages_per_rank
    check_counts(name, ranks=ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    return _make(name, ranks, num_micro_batches, stages_per_rank)


@functools.lru_cache(maxsize=_KEPT)
def _make(name: str, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Schedule:
    spec = find_schedule(name)
    return Schedule(
        name=name,
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        num_micro_batches=num_micro_batches,
        placement=spec.placement,
        orders=spec.generate(ranks=ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank),
    )


def formula_bubble(schedule: Schedule) -> float | None:
    """bubble_ratio that the schedule's formula gives for equal stages; None where it has none."""
    spec = find_schedule(schedule.name)
    if spec.bubble is None:
        return None
    return float(spec.bubble(schedule.ranks, schedule.num_micro_batches, schedule.stages_per_rank))


def micro_batch_size(batch_size: int, num_micro_batches: int) -> int:
    """Samples per micro-batch; InvalidParameter, naming the divisors, when the batch does not split evenly.

    >>> micro_batch_size(32, 8)
    4
    """
    if batch_size < 1 or num_micro_batches < 1 or batch_size % num_micro_batches:
        divisors = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        raise InvalidParameter(
            f"num_micro_batches={num_micro_batches} does not divide the batch of {batch_size} samples; "
            f"choose {_either(divisors) if divisors else 'a batch of at least 1'}"
        )
    return batch_size // num_micro_batches


def _nearest_counts(spec: ScheduleSpec, ranks: int, given: int) -> list[int]:
    """The nearest legal numbers of micro-batches below and above ``given``."""
    below = next((count for count in range(given - 1, 0, -1) if spec.legal_count(ranks, count)), None)
    above = given + 1
    while not spec.legal_count(ranks, above):
        above += 1
    return [above] if below is None else [below, above]


def _either(choices: list[str] | list[int]) -> str:
    """``1, 2 or 4``."""
    words = [str(choice) for choice in choices]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
