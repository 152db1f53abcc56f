"""An arm of a comparison runs the code of its own tree: where it is looked for, and the check that it came from there.

A revision is checked out beside the user's checkout, in whose place its code is to be imported.  The checkout is often
on the import path for good: an editable install put it there (a line in a .pth file, or a finder that maps packages to
folders), or PYTHONPATH did.  The same folders of the revision's tree then come first; a finder that comes before the
import path cannot be outdone so, and is told by what was imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from perfsuite.errors import CaseError

VARIABLE = "PERFSUITE_ARM"
"""Tells the processes of an arm where its code comes from: JSON of ``tree`` and of the ``checkout`` it stands for."""


class ForeignModule(CaseError):
    """An arm imported a module of the project from another tree than its own."""


def variable(tree: Path, checkout: Path) -> dict[str, str]:
    """What the environment of an arm must have for :func:`require_own_modules` to look."""
    return {VARIABLE: json.dumps({"tree": str(tree.resolve()), "checkout": str(checkout.resolve())})}


def mirrored(tree: Path, checkout: Path) -> list[str]:
    """Folders of ``tree`` in which code is imported where this process imports it from ``checkout``, in that order."""
    checkout = checkout.resolve()
    folders = dict.fromkeys(Path(folder).resolve() for folder in [*sys.path, *_mapped(sys.meta_path)])
    return [str(tree / folder.relative_to(checkout)) for folder in folders if _of_project(folder, checkout)]


def _mapped(finders: Iterable[object]) -> Iterator[str]:
    """Folders that the finders of editable installs look in: those that hold the packages of their MAPPING."""
    for finder in finders:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = getattr(module, "MAPPING", None)
        if isinstance(mapping, Mapping):
            yield from (str(Path(str(place)).parent) for place in mapping.values())


def require_own_modules(modules: Mapping[str, ModuleType] = sys.modules) -> None:
    """Raise ForeignModule where this is a process of an arm that has a module of the checkout which it stands for."""
    told = os.environ.get(VARIABLE)
    if not told:
        return
    places = json.loads(told)
    tree, checkout = Path(places["tree"]), Path(places["checkout"])
    for name, module in sorted(modules.items()):
        file = getattr(module, "__file__", None)
        if file and _of_project(path := Path(file).resolve(), checkout) and not path.is_relative_to(tree):
            raise ForeignModule(
                f"module {name} was imported from {path}, outside of the tree {tree} of the revision that was to be "
                "measured; give --perf-base (or --a-python) a Python that has that revision installed"
            )


def _of_project(path: Path, checkout: Path) -> bool:
    """Whether ``path`` is the project's own: an environment may lie in its checkout."""
    installed = any(part in ("site-packages", "dist-packages") for part in path.parts)
    return path.is_relative_to(checkout) and not installed and not path.is_relative_to(sys.prefix)
