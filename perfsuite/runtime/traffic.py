"""Driver side: what the ranks of a step sent and how long its parts took, put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfsuite.base.errors import CaseError
from perfsuite.record.codec import from_json
from perfsuite.record.step import Component, Traffic
from perfsuite.runtime.transports.base import Message

_Key = tuple[str, str, str]
"""Axis, collective and part."""


def join_traffic(reports: Sequence[Message]) -> tuple[Traffic, ...]:
    """One entry for each axis, collective and part, each number from the rank that has most of it.

    Raises CaseError where ranks of the same place differ in calls or bytes.
    """
    joined: dict[_Key, Traffic] = {}
    places: dict[str, tuple[int, dict[_Key, tuple[int, int]]]] = {}
    for rank, kept in _kept(reports):
        entries = {_key(entry): entry for entry in (from_json(Traffic, plain) for plain in kept["traffic"])}
        told = {key: (entry.calls, 0 if entry.uneven else entry.message_bytes) for key, entry in entries.items()}
        other, theirs = places.setdefault(kept["place"], (rank, told))
        if kept["place"] and told != theirs:
            raise CaseError(_difference(rank, told, other, theirs))
        for key, entry in entries.items():
            joined[key] = _most(joined.get(key, entry), entry)
    return tuple(joined.values())


def join_components(reports: Sequence[Message]) -> tuple[Component, ...]:
    """One component of each name, each time from the rank that has most of it."""
    joined: dict[str, Component] = {}
    for _, kept in _kept(reports):
        for plain in kept["components"]:
            mine = from_json(Component, plain)
            other = joined.get(mine.name, mine)
            joined[mine.name] = Component(
                name=mine.name,
                compute_s=max(mine.compute_s, other.compute_s),
                communication_s=max(mine.communication_s, other.communication_s),
            )
    return tuple(joined.values())


def _kept(reports: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    return ((rank, report["traffic"]) for rank, report in enumerate(reports) if report["traffic"] is not None)


def _key(entry: Traffic) -> _Key:
    return entry.axis, entry.collective, entry.part


def _most(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(
        axis=one.axis,
        collective=one.collective,
        part=one.part,
        calls=max(one.calls, other.calls),
        message_bytes=max(one.message_bytes, other.message_bytes),
        time_s=max(one.time_s, other.time_s),
        ranks=one.ranks,
        uneven=one.uneven,
    )


def _difference(rank: int, mine: dict[_Key, tuple[int, int]], other: int, theirs: dict[_Key, tuple[int, int]]) -> str:
    key = next(key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key))
    what = f"{key[1]} along {key[0]} for {key[2]}"
    told = [
        f"rank {who}: {calls} of {size} bytes"
        for who, (calls, size) in ((other, theirs.get(key, (0, 0))), (rank, mine.get(key, (0, 0))))
    ]
    return f"ranks of the same place differ in {what}: {', '.join(told)}"
