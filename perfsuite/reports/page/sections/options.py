"""Effect of each option against its base, with an interval where there are several runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.units import change, interval
from perfsuite.record.result import Result
from perfsuite.reports.changes import ratio, tone_of
from perfsuite.reports.document import MOST_BARS, Chart, Charts, Section, Tone, grid, left_out
from perfsuite.reports.ids import test_of, words_of
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels
from perfsuite.reports.page.sections.training import short

_BASES = frozenset(
    ("none", "default", "whole", "on-device", "no-overlap", "off", "eager", "math", "workers0", "single")
)
"""Words in the id of a case without any option."""
_FOLLOWS = frozenset(("mesh", "builds"))
"""Parameters that do not count as an option."""


@dataclass(frozen=True, kw_only=True)
class _Effect:
    case: Result
    base: Result
    effect: float
    low: float | None
    high: float | None

    @property
    def tone(self) -> Tone:
        return tone_of(self.effect, self.low, self.high)

    @property
    def tip(self) -> str:
        between = "" if self.low is None or self.high is None else f" {interval(self.low, self.high)}"
        return f"{self.case.name} against {words_of(self.base.case)}: {change(self.effect)}{between}, {self.word}"

    @property
    def word(self) -> str:
        if self.low is None:
            return "unsure: one run each"
        return {"bad": "slower", "good": "faster"}.get(self.tone, "not shown")


def section(material: Material) -> Section | None:
    """Return the effects of all options; None without any."""
    effects = list(_effects(material))
    if not effects:
        return None
    ordered = sorted(effects, key=lambda effect: (effect.tone == "plain", -abs(effect.effect)))
    drawn = sorted(ordered[: 2 * MOST_BARS], key=lambda effect: -effect.effect)
    charts = [_chart(drawn[at : at + MOST_BARS]) for at in range(0, len(drawn), MOST_BARS)]
    cells = [
        (e.case.name, words_of(e.base.case), change(e.effect), _between(e), e.word)
        for e in sorted(effects, key=lambda effect: effect.case.case)
    ]
    notes = ("change: time per sample of the batch against the base; 95 % intervals come from several runs",)
    table = grid(("option", "base", "change of the time", "95 % interval", "result"), cells, notes)
    first, *others = charts
    whole = Chart(title=first[0], spec=first[1], grid=table, caption=left_out(len(drawn), len(effects)))
    rest = [Chart(title=f"{title}, continued", spec=spec) for title, spec in others]
    return Section(key="options", title="Options", blocks=[Charts(charts=[whole, *rest])])


def _chart(effects: Sequence[_Effect]) -> tuple[str, Mapping[str, Any]]:
    names = labels([_name(effect) for effect in effects])
    values = [
        {"row": row, "at": e.effect, "low": e.low, "high": e.high, "tone": e.tone, "tip": e.tip}
        for row, e in zip(names, effects, strict=True)
    ]
    return "Change of the time per sample", rows.forest(values, names, "change of the time; right is slower")


def _name(effect: _Effect) -> str:
    """Return the words of the id that differ from the base, after the name of the test."""
    base = set(words_of(effect.base.case).split("-"))
    words = [word for word in words_of(effect.case.case).split("-") if word not in base]
    return f"{test_of(effect.case.case).removeprefix('test_')}: {'-'.join(words)}" if words else short(effect.case)


def _between(effect: _Effect) -> str:
    return "" if effect.low is None or effect.high is None else interval(effect.low, effect.high)


def _effects(material: Material) -> Iterator[_Effect]:
    """Yield the effects of options, each against the case of equal test, model and ranks without options."""
    groups: dict[tuple[str, str, int, str], list[Result]] = {}
    for case in material.measured:
        if "step_time_s" in case.values and "bubble_ratio" not in case.values:
            key = (case.case.partition("[")[0], str(case.parameters.get("model")), case.world_size, case.fingerprint)
            groups.setdefault(key, []).append(case)
    for members in groups.values():
        base = next((case for case in members if _BASES & set(_tokens(case))), None)
        if base is None:
            continue
        for case in members:
            if case is not base and _differs(case, base):
                quotient = ratio(*(_per_sample(one, material.times_s(one)) for one in (base, case)))
                if quotient is not None:
                    yield _Effect(case=case, base=base, effect=quotient[0], low=quotient[1], high=quotient[2])


def _tokens(case: Result) -> list[str]:
    """Return the words of an id, and pairs of them such as ``no-overlap`` and ``on-device``."""
    words = words_of(case.case).split("-")
    return [*words, *(f"{first}-{second}" for first, second in itertools.pairwise(words))]


def _differs(case: Result, base: Result) -> bool:
    names = set(case.parameters) | set(base.parameters)
    return any(case.parameters.get(name) != base.parameters.get(name) for name in names - _FOLLOWS)


def _per_sample(case: Result, times_s: Sequence[float]) -> tuple[float, ...]:
    rate = case.values.get("samples_per_s", 0) * case.median_s
    samples = case.work.samples or rate or 1.0
    return tuple(time_s / samples for time_s in times_s)
