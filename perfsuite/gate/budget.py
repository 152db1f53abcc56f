"""Select requests for a limited time.  Times are arguments: this module does not read a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perfsuite.record.verdict import Request, RequestKind

LEAST_S = 180.0
PLAIN_RUNS = 10
SCREENING_SHARE = 1 / 3
"""Share of a budget that screening may use before suspects have their verdicts.  Row: 60 s, how long it takes."""
_ARMS: Mapping[RequestKind, int] = {"run": 1, "ab_pair": 2, "anchor_pair": 2}  # Runs of a request.
Wanted = Mapping[RequestKind, Mapping[str, int]]  # Number of requests of each kind, by node id.


def usual_s(plain_s: float) -> float:
    """Return the budget in seconds of a session whose first run of every case took ``plain_s``.

    >>> usual_s(15.0), usual_s(60.0)
    (180.0, 600.0)
    """
    return max(LEAST_S, PLAIN_RUNS * plain_s)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of requests, as measured so far."""

    start_s: float = 10.0  # Start of one arm of an A/B: interpreter, pytest, the import of torch.
    starts: Mapping[RequestKind, int] = field(default_factory=lambda: {"ab_pair": 2, "anchor_pair": 1})
    """Number of arms that the first pair of a kind starts; later pairs use the same arms."""
    run_s: Mapping[str, float] = field(default_factory=dict)  # Seconds of one fresh run, by node id.
    usual_run_s: float = 1.0  # Seconds of a run of other cases.

    def of(self, wanted: Wanted) -> float:
        """Return the seconds of all these requests.

        >>> Costs(start_s=8.0, run_s={"a": 1.0, "b": 2.0}).of({"run": {"a": 1}, "ab_pair": {"a": 3, "b": 2}})
        31.0
        """
        total_s = sum(self.starts_s(kind) for kind, counts in wanted.items() if any(counts.values()))
        for kind, counts in wanted.items():
            total_s += sum(self.case_s(node, kind, count) for node, count in counts.items())
        return total_s

    def case_s(self, node: str, kind: RequestKind, count: int) -> float:
        """Return the seconds of ``count`` requests of a case, without the start of arms."""
        return _ARMS[kind] * count * self.run_s.get(node, self.usual_run_s)

    def starts_s(self, kind: RequestKind) -> float:
        """Return the seconds of the start of a kind's arms."""
        return self.starts.get(kind, 0) * self.start_s


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The remaining budget of a session, and the costs of further requests."""

    whole_s: float
    left_s: float
    costs: Costs = field(default_factory=Costs)

    def affords(self, wanted: Wanted) -> bool:
        """Return whether the budget allows all of these requests."""
        return self.costs.of(wanted) <= self.left_s

    def keeping(self, share: float) -> Spending:
        """Return the spending that reserves this share of the whole budget."""
        return Spending(whole_s=self.whole_s, left_s=self.left_s - share * self.whole_s, costs=self.costs)

    def complete(self, order: Sequence[str], wanted: Wanted) -> dict[str, int]:
        """Return the cases, in this order, whose requests all fit, each with its count of the first kind."""
        used_s, kinds, chosen = 0.0, set[RequestKind](), set[str]()
        for node in order:
            own = {kind: counts[node] for kind, counts in wanted.items() if counts.get(node)}
            more_s = sum(self.costs.case_s(node, kind, count) for kind, count in own.items())
            more_s += sum(self.costs.starts_s(kind) for kind in own if kind not in kinds)
            if used_s + more_s <= self.left_s:
                used_s += more_s
                kinds |= set(own)
                chosen.add(node)
        return {node: count for node, count in next(iter(wanted.values())).items() if node in chosen}

    def cheapest(self, wanted: Wanted) -> dict[str, int]:
        """Return the complete cases, the cheapest first, so that as many as possible are complete."""
        ((kind, counts),) = wanted.items()
        return self.complete(sorted(counts, key=lambda node: self.costs.case_s(node, kind, counts[node])), wanted)

    def shared_out(
        self, kind: RequestKind, counts: Mapping[str, int], decides: Callable[[str, int], bool]
    ) -> dict[str, int]:
        """Return the number of pairs per case with which as many cases as possible can be decided.  ``decides(node,
        further)`` returns whether that number of pairs could decide a case; others get no pairs.
        """
        best: dict[str, int] = {}
        for most in range(max(counts.values(), default=0), 0, -1):
            limited = {node: min(count, most) for node, count in counts.items() if count}
            hopeful = {node: count for node, count in limited.items() if decides(node, count)}
            chosen = self.cheapest({kind: hopeful})
            if len(chosen) > len(best):
                best = chosen
        return best


def round_robin(
    wanted: Mapping[str, int], kind: RequestKind, why: str, done: Mapping[str, int] | None = None
) -> list[Request]:
    """Return one request of each case, then a second of each, and so on, so that a short disturbance hits a case once.
    All pairs of a turn begin with the same code, so that each arm is started once per turn.
    """
    return [
        Request(
            case=node,
            kind=kind,
            first="base" if kind != "run" and (turn + (done or {}).get(node, 0)) % 2 == 0 else "new",
            why=why,
        )
        for turn in range(max(wanted.values(), default=0))
        for node, count in wanted.items()
        if turn < count
    ]
