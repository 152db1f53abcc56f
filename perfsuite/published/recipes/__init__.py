"""The published runs as recipes: the case of the suite that reproduces each row, and its settings.

``recipes()`` returns all in the reports' order, without torch and without reading a file; ``find(name)`` returns one,
or one of the small siblings (``SMALL``).  ``recipe_of("000/time", 26)`` returns the recipe of a published row, and
``why_none`` the reason if there is none.  ``recipe.case("s4000")`` is the node id of its case on a platform,
``recipe.small`` the node id of its small sibling on a CPU.
:func:`perfsuite.published.differences.differences` compares a case with a row.

>>> recipe_of("002/performance", 50).case("s4000")
'test_perf/test_published.py::test_published[s4000-002-llama2_7b-fp16-1x8]'
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.published.recipes import report_004, reports_000_to_003
from perfsuite.published.recipes.recipe import Recipe

_LATTE: Mapping[str, Any] = {
    "model": "latte-tiny",
    "data": "video",
    "program": {"encoders": "tiny-picture", "ema": "fp32", "clip": 0.1, "logs": True},
    "num_workers": 1,
    "learning_rate": 1e-3,  # so small a model begins to learn within the loss build's steps
    "builds": ("memory", "loss"),
    "loss_steps": 40,
    "target_loss": 0.9,
}
SMALL: tuple[Recipe, ...] = (
    *(
        Recipe(
            name=f"{prefix}-latte-tiny-{strategy}-b{batch}-w1-1x2",
            rows=(),
            parameters={**_LATTE, "strategy": strategy, "micro_batch_size": batch},
            world_size=2,
        )
        for prefix, strategy, batch in (
            *(("001", "ddp", batch) for batch in (2, 1, 4)),
            *(("001d", strategy, 1) for strategy in ("zero1", "zero2", "zero3")),
        )
    ),
    Recipe(
        name="002-llama2-tiny-zero3-1x2",
        rows=(),
        parameters={
            "model": "llama2-tiny",
            "strategy": "zero3",
            "dtype": "bf16",
            "checkpointing": "full",
            "program": {"clip": 1.0},
            "builds": ("memory", "loss"),
        },
        world_size=2,
    ),
)
"""Small siblings of recipes without another test: Latte with larger batches and under DeepSpeed, and LLaMA under
ZeRO-3. They run on two ranks of a CPU; the first belongs to a plain run, the others are extended."""


__all__ = ["WITHOUT_RECIPE", "Recipe", "find", "recipe_of", "recipes", "why_none"]

WITHOUT_RECIPE: Mapping[tuple[str, int], str] = MappingProxyType(
    {
        ("004/3d", 428): (
            "tp 64 does not divide the 96 heads of GPT-3 175B; perfsuite has dp2-tp32 in addition to the other meshes"
        ),
        ("004/moe", 389): (
            "of eight experts two are a quarter: 1.3T with eight experts has at least 325B active parameters, not 175B"
        ),
    }
)
"""(table, line) of the rows that cannot be run -> reason."""


@functools.cache
def recipes() -> tuple[Recipe, ...]:
    """Return all recipes, in the reports' order."""
    return (
        *reports_000_to_003.opensora(),
        *reports_000_to_003.latte(),
        *reports_000_to_003.llama2(),
        *reports_000_to_003.oneflow(),
        *report_004.data_parallel(),
        *report_004.pipelines(),
        *report_004.tensor(),
        *report_004.split_layer(),
        *report_004.sequences(),
        *report_004.experts(),
        *report_004.routing(),
    )


@functools.cache
def _index() -> tuple[Mapping[str, Recipe], Mapping[tuple[str, int], Recipe]]:
    by_row = {row: recipe for recipe in recipes() for row in recipe.rows}
    return {recipe.name: recipe for recipe in (*recipes(), *SMALL)}, by_row


def find(name: str) -> Recipe:
    """Return the recipe of this name; raises InvalidParameter if there is none."""
    by_name, _ = _index()
    if name not in by_name:
        raise InvalidParameter(f"recipe {name!r} is unknown; {did_you_mean(name, sorted(by_name))}")
    return by_name[name]


def recipe_of(table: str, line: int) -> Recipe | None:
    """Return the recipe of a published row, by its table (``000/time``) and its line; None without one."""
    return _index()[1].get((table, line))


def why_none(table: str, line: int) -> str:
    """Return why a row has no recipe; empty if it has one, or is unknown."""
    return WITHOUT_RECIPE.get((table, line), "")
