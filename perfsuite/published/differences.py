"""How a run differs from a published row: what both say and differ in, and what only one of them says.

A recipe may fill what its row leaves unsaid, and says why (:attr:`Recipe.ours`); a case is then compared with the
recipe there.  Nothing told means: every setting of either side is the same or ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.published.lookup import PublishedRun, plain, snake
from perfsuite.published.recipes import Recipe, recipe_of
from perfsuite.published.settings import Among, AmongMeshes, settings_of_case, settings_of_row


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A case as it ran, or would."""

    workload: str
    """Class with or without its module, or in snake case."""
    parameters: Mapping[str, Any]
    """Fields of the workload."""
    world_size: int
    platform: str = ""
    """Empty: of any."""
    nodes: int | None = None
    """Hosts; None where nobody noted them."""

    @classmethod
    def of(cls, recipe: Recipe) -> Ran:
        """As the recipe has it."""
        return cls(
            workload=recipe.workload,
            parameters=recipe.parameters,
            world_size=recipe.world_size,
            nodes=recipe.nodes,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """By name, see :mod:`perfsuite.published.settings`."""
        return settings_of_case(self.workload, self.parameters, self.world_size, self.nodes)


def differences(run: Ran | Recipe, row: PublishedRun) -> tuple[str, ...]:
    """How ``run`` differs from a published row, one phrase for each setting, sorted by name.

    >>> from perfsuite.published.lookup import select
    >>> row = select(platform="s4000", model="llama2-7b")[0]
    >>> differences(recipe_of("002/performance", row.line), row)
    ()
    >>> ran = Ran(workload="train_step", parameters={"model": "llama2-7b"}, world_size=8, platform="cpu", nodes=1)
    >>> [phrase.partition(" (")[0] for phrase in differences(ran, row)[:2]]
    ['platform s4000, not cpu', 'checkpointing full']
    """
    recipe = run if isinstance(run, Recipe) else recipe_of(f"{row.report}/{row.table}", row.line)
    ran = Ran.of(run) if isinstance(run, Recipe) else run
    if snake(ran.workload) != row.workload:
        return (f"workload {row.workload}, not {snake(ran.workload)}",)
    elsewhere = bool(ran.platform) and ran.platform not in row.platforms
    platform = [f"platform {' or '.join(row.platforms)}, not {ran.platform}"] if elsewhere else []
    return (*platform, *_compared(ran.settings, row, recipe, same=isinstance(run, Recipe)))


def _compared(settings: Mapping[str, Any], row: PublishedRun, recipe: Recipe | None, *, same: bool) -> Iterator[str]:
    """``same``: the settings are the recipe's own."""
    stated = settings_of_row(row)
    ours = recipe.ours if recipe else {}
    filled: Mapping[str, Any] = settings if same else Ran.of(recipe).settings if recipe else {}
    said = {**{name: value for name, value in stated.by_name.items() if name not in ours}, **stated.settings}
    local = said.pop("local_batch_size", None)
    if local is not None and local != _local(settings):
        yield f"local_batch_size {local}, not {_local(settings)}"
    for name in sorted(set(said) | set(settings) | (set(filled) & set(ours))):
        theirs, mine = said.get(name), settings.get(name)
        partly = isinstance(theirs, (Among, AmongMeshes))
        if mine is not None and theirs is not None and not _agrees(theirs, mine):
            yield f"{name} {theirs}, not {mine}"
        elif theirs is not None and mine is None:
            yield f"{name} {theirs}, unsaid here"
        elif (theirs is None or partly) and name not in ours:
            yield f"{name} {mine}, {'only partly' if partly else 'not'} said by the report"
        elif (theirs is None or partly) and not _agrees(filled.get(name), mine):
            yield f"{name} {filled.get(name)} (ours: {ours[name]}), not {mine}"


def _local(settings: Mapping[str, Any]) -> int:
    return int(settings["micro_batch_size"] * settings["num_micro_batches"])


def _agrees(theirs: Any, mine: Any) -> bool:
    if isinstance(theirs, Among):
        return mine in theirs.choices
    if isinstance(theirs, AmongMeshes):
        return theirs.has(str(mine))
    return plain(theirs) == plain(mine)
