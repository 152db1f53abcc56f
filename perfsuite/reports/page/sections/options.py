"""Effect of each option against its base, with an interval where there are several runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.units import change
from perfsuite.record.result import Result
from perfsuite.reports.changes import CaseChange, ratio, tone_of
from perfsuite.reports.document import MOST_BARS, Chart, Charts, Section, grid_of, left_out
from perfsuite.reports.ids import test_of, words_of
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels
from perfsuite.reports.page.sections.training import short

_BASES = frozenset(
    ("none", "default", "whole", "on-device", "no-overlap", "off", "eager", "math", "workers0", "single")
)
"""Words in the id of a case without any option."""
_FOLLOWS = frozenset(("mesh", "builds"))  # Parameters that do not count as an option.


_Effect = tuple[Result, Result, CaseChange]
"""A case, its base without the option, and the change of the time per sample."""


def section(material: Material) -> Section | None:
    """Return the effects of all options; None without any."""
    effects = list(_effects(material))
    if not effects:
        return None
    ordered = sorted(effects, key=lambda one: (one[2].tone == "plain", -abs(one[2].effect or 0)))
    drawn = sorted(ordered[: 2 * MOST_BARS], key=lambda one: -(one[2].effect or 0))
    columns: dict[str, Callable[[_Effect], str]] = {
        "option": lambda one: one[0].name,
        "base": lambda one: words_of(one[1].case),
        "change of the time": lambda one: change(one[2].effect or 0),
        "95 % interval": lambda one: one[2].between.strip(),
        "result": lambda one: one[2].word,
    }
    note = "change: time per sample of the batch against the base; 95 % intervals come from several runs"
    table = grid_of(sorted(effects, key=lambda one: one[0].case), columns, [note])
    title, caption = "Change of the time per sample", left_out(len(drawn), len(effects))
    charts = [Chart(title=title, spec=_spec(drawn[:MOST_BARS]), grid=table, caption=caption)]
    if len(drawn) > MOST_BARS:
        charts.append(Chart(title=f"{title}, continued", spec=_spec(drawn[MOST_BARS:])))
    return Section(key="options", title="Options", blocks=[Charts(charts=charts)])


def _spec(effects: Sequence[_Effect]) -> Mapping[str, Any]:
    tips = [
        f"{case.name} against {words_of(base.case)}: {change(one.effect or 0)}{one.between}, {one.word}"
        for case, base, one in effects
    ]
    return rows.changes([one for *_, one in effects], labels(list(map(_name, effects))), tips)


def _name(effect: _Effect) -> str:
    """Return the words of the id that differ from the base, after the name of the test."""
    case, base, _ = effect
    words = [word for word in words_of(case.case).split("-") if word not in words_of(base.case).split("-")]
    return f"{test_of(case.case).removeprefix('test_')}: {'-'.join(words)}" if words else short(case)


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
            names = {*case.parameters, *base.parameters} - _FOLLOWS
            if case is not base and any(case.parameters.get(name) != base.parameters.get(name) for name in names):
                quotient = ratio(*(_per_sample(one, material.times_s(one)) for one in (base, case)))
                if quotient is not None:
                    effect, low, high = quotient
                    tone = tone_of(effect, low, high)
                    word = {"bad": "slower", "good": "faster"}.get(tone, "not shown")
                    word = "unsure: one run each" if low is None else word
                    found = CaseChange(node=case.case, effect=effect, low=low, high=high, word=word, tone=tone)
                    yield case, base, found


def _tokens(case: Result) -> list[str]:
    """Return the words of an id, and pairs of them such as ``no-overlap`` and ``on-device``."""
    words = words_of(case.case).split("-")
    return [*words, *(f"{first}-{second}" for first, second in itertools.pairwise(words))]


def _per_sample(case: Result, times_s: Sequence[float]) -> tuple[float, ...]:
    rate = case.values.get("samples_per_s", 0) * case.median_s
    samples = case.work.samples or rate or 1.0
    return tuple(time_s / samples for time_s in times_s)
