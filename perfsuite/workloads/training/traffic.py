"""The traffic of a training step, in a build of its own that is never timed: what is sent and how long it takes.

One step after warm ones is counted (:mod:`perfsuite.strategies.traffic_count`) and held against the strategy's closed
form; a few more are stamped part by part (:mod:`perfsuite.strategies.traffic_parts`); then what was counted is posted
again with nothing else to do (:mod:`perfsuite.strategies.traffic_replay`).
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

_WARM_STEPS = 2
"""The first makes the optimizer's state, after it DDP makes its buckets anew."""
_STAMPED_STEPS = 5
_TOLD_PROBLEMS = 6


class TrafficStep(Observed):
    """Calls and bytes by axis, collective and part; times of the parts and of what they send."""

    def run(self) -> None:
        """Build, count, compare, stamp, replay, and the records."""
        from perfsuite.strategies.traffic_count import Counting
        from perfsuite.strategies.traffic_parts import MarkedRank, Parts, mark
        from perfsuite.strategies.traffic_replay import Replay

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
            form = self.workload.find_strategy().traffic(
                self.workload.plan(self.rank.shape), self.rank.shape, self.rank.rank
            )
            uneven = self._compare(posted, form)
            stamped = [parts.seconds(step.run) for _ in range(_STAMPED_STEPS)]
        seconds = Replay(self.rank.device, clock, uneven).seconds(posted)
        spent = {name: statistics.median(times[name] for times in stamped) for name in PARTS}
        traffic = traffic_of(posted, seconds, uneven)
        components = components_of(posted, seconds, spent)
        self.rank.keep_traffic(traffic, components, place=_told(form))
        for name in ("compute_s", "communication_s"):
            self.rank.record(name, sum(getattr(component, name) for component in components), unit="s", reduce="max")

    def _compare(self, posted: Sequence[Posted], form: Sequence[Call] | None) -> frozenset[Key]:
        """What some rank posted with unequal splits, once every rank is known to have posted what it should.

        A collective.  Raises WrongResult on all ranks where one differs from its closed form.
        """
        mine = {"posted": _tally(posted), "form": None if form is None else _tally_form(form)}
        everyone = [json.loads(text) for text in texts_of_all(self.rank, json.dumps(mine))]
        raise_alike(self.rank, difference(everyone[self.rank.rank], everyone) if form is not None else "")
        return frozenset(
            tuple(key.split(" / ")) for one in everyone for key, (_, _, even) in one["posted"].items() if not even
        )


def _name(key: Key) -> str:
    return " / ".join(key)


def _tally(posted: Sequence[Posted]) -> dict[str, list[Any]]:
    """Calls, bytes and whether all splits are even, by axis, collective and part."""
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


def _told(form: Sequence[Call] | None) -> str:
    return "" if form is None else json.dumps(_tally_form(form), sort_keys=True)


def difference(mine: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> str:
    """What differs between a rank's counts and its closed form; "" where nothing does.

    Bytes of uneven collectives follow from the data: they are compared as the sum over all ranks.
    """
    form, posted = mine["form"], mine["posted"]
    problems = []
    for key in sorted({*form, *posted}):
        calls, size, even = form.get(key, (0, 0, True))
        counted, sent, _ = posted.get(key, (0, 0, True))
        if not even:
            size, sent = (sum(one[told].get(key, (0, 0))[1] for one in everyone) for told in ("form", "posted"))
        if (calls, size) != (counted, sent):
            where = " of all ranks" if not even else ""
            problems.append(f"{key} {counted} calls of {sent} bytes{where} and not {calls} of {size}")
    said = "; ".join(problems[:_TOLD_PROBLEMS])
    return f"one step posts, against the strategy's closed form, {said}" if problems else ""


def traffic_of(posted: Sequence[Posted], seconds: Mapping[Posted, float], uneven: frozenset[Key]) -> list[Traffic]:
    """One entry for each axis, collective and part."""
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
    """Parts of the step: a part's computation is its time without that of the collectives which it waits for.

    What was hidden behind computation is taken off as well: then the rest is less than what was computed, at least 0.
    A pipeline's own part computes nothing; what of it is no message is waiting.
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
