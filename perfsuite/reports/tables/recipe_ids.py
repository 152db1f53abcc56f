"""Map a measured case to the published rows that it reproduces, on any platform."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from perfsuite.published.recipes import Recipe, find, recipe_of, recipes

_PLATFORM = re.compile(r"\[[a-z0-9_]+-")


def plain_id(node: str) -> str:
    """A node id without folder and platform.

    >>> plain_id("test_perf/test_published.py::test_published[s4000-002-llama2_7b-bf16-1x8]")
    'test_published.py::test_published[-002-llama2_7b-bf16-1x8]'
    """
    return _PLATFORM.sub("[-", node.rpartition("/")[2], count=1)


@functools.cache
def _ids() -> Mapping[str, str]:
    return {recipe.name: plain_id(recipe.case("x")) for recipe in recipes()}


@functools.cache
def _by_id() -> Mapping[str, Recipe]:
    return {_ids()[recipe.name]: recipe for recipe in recipes()}


def recipe_of_case(node: str) -> Recipe | None:
    """Return the published run that a case is, or is another reading of; None for any other case."""
    recipe = _by_id().get(plain_id(node))
    return find(recipe.beside) if recipe and recipe.beside else recipe


def rows_of_case(node: str) -> tuple[tuple[str, int], ...]:
    """Return the published rows that a case reproduces as (table, line); none for any other case.

    >>> rows_of_case("test_perf/test_published.py::test_published[s4000-002-llama2_7b-bf16-1x8]")
    (('002/performance', 50),)
    """
    recipe = recipe_of_case(node)
    return recipe.rows if recipe else ()


def is_recipe(node: str) -> bool:
    """Whether a case is a published run."""
    return plain_id(node) in _ids().values()


def id_of_row(table: str, line: int) -> str:
    """Plain id of the case that is a published row; empty where there is none."""
    recipe = recipe_of(table, line)
    return _ids()[recipe.name] if recipe else ""


def words_of_row(table: str, line: int) -> str:
    """Return the words for ``-k`` that select that case; empty without one."""
    return id_of_row(table, line).partition("[-")[2].rstrip("]")
