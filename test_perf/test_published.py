"""Published runs without another test: reports 000 to 002, data-parallel tables and whole models of report 004.

A recipe (perfsuite/published/recipes) lists the rows that a case reproduces and the settings that no report states.  A
case that cannot fit is skipped with the hardware that it needs.
"""

from __future__ import annotations

from perfsuite import sizes
from perfsuite.published.recipes import SMALL, find, recipes
from perfsuite.published.recipes.recipe import TEST


def ranks(name):
    """Return the ranks of a recipe."""
    return find(name).world_size


@sizes(
    param="recipe",
    full=[recipe.name for recipe in recipes() if recipe.test == TEST],
    small=[recipe.name for recipe in SMALL],
    extended=[recipe.name for recipe in SMALL[1:]],
    ranks=ranks,
)
def test_published(perf, recipe, as_published, require_fit):
    """One published run."""
    step = as_published(recipe)
    require_fit(step, ranks(recipe))
    perf(step, on=ranks(recipe))
