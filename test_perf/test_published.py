"""The published runs that no other test has: reports 000 to 002, data-parallel tables and whole models of report 004.

Recipes are data (perfsuite/published/recipes): there stands which rows of the reports a case is, and what no report
says of it.  What cannot fit is not begun: the reason says what it would take.
"""

from __future__ import annotations

from perfsuite import sizes
from perfsuite.published.recipes import SMALL, find, recipes
from perfsuite.published.recipes.recipe import TEST


def ranks(name):
    """Of a recipe."""
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
