"""Traffic of a training step, in an untimed build: messages and their times.

One step after warm ones is counted (:mod:`perfsuite.strategies.traffic_count`) and compared with the strategy's closed
form.  A few more have a time per part (:mod:`perfsuite.strategies.traffic_parts`).  Then the counted messages are
posted again without computation (:mod:`perfsuite.strategies.traffic_count`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfsuite.record.step import Component, Traffic
from perfsuite.strategies.traffic import PARTS, PIPELINE, Call
from perfsuite.workloads.training.agreement import raise_alike, texts_of_all
from perfsuite.workloads.training.memory import Observed

if TYPE_CHECKING:
    from perfsuite.strategies.traffic_count import Key, Posted

_WARM_STEPS = 2  # The first creates the optimizer's state, after which DDP rebuilds its buckets
_STAMPED_STEPS = 5
_LISTED_PROBLEMS = 6


class TrafficStep(Observed):
    """Calls and bytes by axis, collective and part; times of the parts and of their messages."""

    def run(self) -> None:
        """Build, count, compare, time, replay, and record."""
        from perfsuite.strategies.traffic_count import Counting, Replay
        from perfsuite.strategies.traffic_parts import MarkedRank, Parts, mark

        clock = self.clock
        parts = Parts(clock)
        marked: Any = MarkedRank(self.rank, parts)
        with self.training(marked) as step:
            mark(step.trainer.module, parts)
            for _ in range(_WARM_STEPS):
                step.run()
            with Counting(self.rank.shape, self.rank.rank, parts) as counting:
                step.run()
            posted = counting.posted
            shape = self.rank.shape
            form = self.workload.find_strategy().traffic(self.workload.plan(shape), shape, self.rank.rank)
            uneven = self._compare(posted, form)
            stamped = [parts.seconds(step.run) for _ in range(_STAMPED_STEPS)]
        seconds = Replay(self.rank.device, clock, uneven).seconds(posted)
        spent = {name: statistics.median(times[name] for times in stamped) for name in PARTS}
        traffic = traffic_of(posted, seconds, uneven)
        components = components_of(posted, seconds, spent)
        place = "" if form is None else json.dumps(_tally_form(form), sort_keys=True)
        self.rank.keep_traffic(traffic, components, place=place)
        for name in ("compute_s", "communication_s"):
            self.rank.record(name, sum(getattr(component, name) for component in components), unit="s", reduce="max")

    def _compare(self, posted: Sequence[Posted], form: Sequence[Call] | None) -> frozenset[Key]:
        """Return the keys that some rank posted with unequal splits, after all ranks compared their counts; a
        collective.  Raises WrongResult on all ranks if one differs from its closed form.
        """
        own = {"posted": _tally(posted), "form": None if form is None else _tally_form(form)}
        everyone = [json.loads(text) for text in texts_of_all(self.rank, json.dumps(own))]
        raise_alike(self.rank, difference(everyone[self.rank.rank], everyone) if form is not None else "")
        return frozenset(
            tuple(key.split(" / ")) for one in everyone for key, (_, _, even) in one["posted"].items() if not even
        )


def _name(key: Key) -> str:
    return " / ".join(key)


def _tally(posted: Sequence[Posted]) -> dict[str, list[Any]]:
    """Return calls, bytes and whether all splits are even, by axis, collective and part."""
    tally: dict[str, list[Any]] = {}
    for post in posted:
        entry = tally.setdefault(_name(post.key), [0, 0, True])
        entry[:] = entry[0] + 1, entry[1] + post.message_bytes, entry[2] and post.even
    return tally


def _tally_form(form: Sequence[Call]) -> dict[str, list[Any]]:
    return {
        _name((call.axis, call.collective, call.part)): [call.calls, call.message_bytes, not call.uneven]
        for call in form
    }


def difference(own: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return the differences between a rank's counts and its closed form; "" if there are none.  Bytes of uneven
    collectives depend on the data: their sums over all ranks are compared.
    """
    form, posted = own["form"], own["posted"]
    problems = []
    for key in sorted({*form, *posted}):
        calls, size, even = form.get(key, (0, 0, True))
        counted, sent, _ = posted.get(key, (0, 0, True))
        if not even:
            size, sent = (sum(one[kind].get(key, (0, 0))[1] for one in everyone) for kind in ("form", "posted"))
        if (calls, size) != (counted, sent):
            where = " of all ranks" if not even else ""
            problems.append(f"{key} {counted} calls of {sent} bytes{where} and not {calls} of {size}")
    listed = "; ".join(problems[:_LISTED_PROBLEMS])
    return f"one step posts, against the strategy's closed form, {listed}" if problems else ""


def traffic_of(posted: Sequence[Posted], seconds: Mapping[Posted, float], uneven: frozenset[Key]) -> list[Traffic]:
    """Return one entry for each axis, collective and part."""
    entries: dict[Key, list[Posted]] = {}
    for post in posted:
        entries.setdefault(post.key, []).append(post)
    return [
        Traffic(
            axis=key[0],
            collective=key[1],
            part=key[2],
            calls=len(calls),
            message_bytes=sum(post.message_bytes for post in calls),
            time_s=sum(seconds[post] for post in calls),
            ranks=calls[0].ranks,
            uneven=key in uneven,
        )
        for key, calls in entries.items()
    ]


def components_of(
    posted: Sequence[Posted], seconds: Mapping[Posted, float], spent: Mapping[str, float]
) -> list[Component]:
    """Return the parts of the step: a part's computation is its time less that of the collectives that it waits for.
    Messages hidden behind computation are subtracted too, so the rest is less than the computation, at least 0.  A
    pipeline's own part has no computation: its time without messages is waiting.
    """
    sent, awaited = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for post in posted:
        sent[post.part] += seconds[post]
        awaited[post.place] += seconds[post]
    return [
        Component(
            name=name,
            compute_s=0.0 if name == PIPELINE else max(0.0, spent[name] - awaited[name]),
            communication_s=sent[name],
        )
        for name in PARTS
        if spent[name] or sent[name]
    ]
