"""Make a run measure the code of its own tree: where modules are imported from, and the check of it.

The session's own run measures its own checkout. An editable install of another checkout, or an old installed copy,
silently replaces its code. A module is foreign if the checkout has a module of this name and another file was
imported. An installed copy with the same text is the same code.

A revision is checked out to a work tree of its own. Often an editable install (a line in a .pth file, a tree of links,
or a finder that maps modules to files) or PYTHONPATH puts the user's checkout on the import path. The same folders of
the revision's tree then come first. This fails for a finder that runs before the import path (meson-python's) and for
an installed copy: the check of the imported files reports both.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from perfsuite.base.errors import CaseError
from perfsuite.record.describe import foreign_line
from perfsuite.runtime.copies import PackageCopies, package_folders

VARIABLE = "PERFSUITE_TREE"  # Variable with the code places of a run for its processes: JSON of :class:`_Places`.
_SOURCE_FOLDERS = ("", "src", "lib", "python")  # Folders of a repository that usually hold packages.
_LINK_TREE = "__editable__."  # Prefix of the folder of links of a strict editable install (setuptools).
_OF_EVERYBODY = {"conftest", "setup", "__main__"}  # Names that every project has.
FOREIGN = "outside of the tree of the revision that was to be measured"  # Phrase in every message of ForeignModule.


class ForeignModule(CaseError):
    """A run imported a module of the project from another tree than its own."""


@dataclass(frozen=True, kw_only=True)
class _Places:
    tree: Path  # Tree that the arm runs: the work tree of its revision, or the user's checkout.
    checkout: Path  # The user's checkout, which the tree replaces; the tree itself outside of an arm.
    folders: tuple[Path, ...]  # Folders of the tree from which modules are imported.
    copies: PackageCopies  # Finds installed copies of modules in further folders of the tree.
    session: bool  # Whether this is the session's own run, not an arm.
    exclusive: bool  # Whether every module of the project has to come from the tree.

    @functools.cached_property
    def tops(self) -> frozenset[str]:
        """Names of the packages with ``__init__.py`` and of the modules in the folders of the tree."""
        entries = [entry for folder in self.folders if folder.is_dir() for entry in folder.iterdir()]
        packages = {entry.name for entry in entries if (entry / "__init__.py").is_file()}
        modules = {entry.stem for entry in entries if entry.suffix == ".py"}
        return frozenset(packages | modules) - sys.stdlib_module_names


def session_variable(root: Path, *, exclusive: bool) -> dict[str, str]:
    """Return the variable for the processes of the session's run; ``exclusive``: a foreign module fails its case."""
    top = checkout_of(root)
    return variable(top, top, [root, *mirrored(top, top)], session=True, exclusive=exclusive)


def checkout_of(root: Path) -> Path:
    """Return the top of the git checkout of ``root``; ``root`` itself outside of one."""
    return next((folder for folder in [root, *root.parents] if (folder / ".git").exists()), root)


def variable(
    tree: Path,
    checkout: Path,
    folders: Iterable[str | Path] = (),
    *,
    session: bool = False,
    exclusive: bool | None = None,
) -> dict[str, str]:
    """Return the variable by which the processes of an arm check where their modules come from.

    ``folders`` of the tree are on the import path; a module in one of them belongs to the project. With ``exclusive``
    every module of the project has to come from the tree; None means that the tree is not the checkout.
    """
    tree, checkout = tree.resolve(), checkout.resolve()
    other = tree != checkout
    inside = dict.fromkeys(
        str(Path(folder).resolve()) for folder in [*folders, *(tree / name for name in _SOURCE_FOLDERS)]
    )
    elsewhere = package_folders(tree) if other else {}
    places = {
        "tree": str(tree),
        "checkout": str(checkout),
        "folders": list(inside),
        "elsewhere": {folder: project for folder, project in elsewhere.items() if folder not in inside},
        "session": session,
        "exclusive": other if exclusive is None else exclusive,
    }
    return {VARIABLE: json.dumps(places)}


def mirrored(tree: Path, checkout: Path) -> list[str]:
    """Return the folders of ``tree`` that match the import folders of this process in ``checkout``, in that order."""
    checkout = checkout.resolve()
    roots: list[str | Path] = [*_linked(sys.path), *sys.path, *_mapped(sys.meta_path)]
    folders = dict.fromkeys(Path(folder).resolve() for folder in roots)
    own = (folder for folder in folders if _of_project(folder, checkout) and folder.is_dir())
    return [str(tree / folder.relative_to(checkout)) for folder in own]


def _linked(path: Iterable[str]) -> Iterator[Path]:
    """Yield the folders to which the links of strict editable installs lead."""
    for folder in map(Path, path):
        if folder.name.startswith(_LINK_TREE):
            for link in sorted(folder.rglob("*.py")):
                yield from _without(link.resolve(), link.relative_to(folder).parts)


def _mapped(finders: Iterable[object]) -> Iterator[Path]:
    """Yield the folders of editable installs' finders: MAPPING of setuptools, ``_redirections`` of editables."""
    for finder in finders:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        for holder, name in ((module, "MAPPING"), (module, "_redirections"), (finder, "_redirections")):
            mapping = getattr(holder, name, None)
            for package, place in mapping.items() if isinstance(mapping, Mapping) else ():
                yield from _without(_stem(Path(str(place))), str(package).split("."))


def _stem(place: Path) -> Path:
    """Return a module's file without its suffix, and a package's folder."""
    if place.suffix != ".py":
        return place
    return place.parent if place.name == "__init__.py" else place.with_suffix("")


def _without(place: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the folder that has ``place`` as ``parts``; nothing if it has another name there."""
    if place.parts[-len(parts) :] == tuple(parts):
        yield place.parents[len(parts) - 1]


def own_modules(modules: Mapping[str, ModuleType] = sys.modules) -> dict[str, str]:
    """Return the file of each project module; in the session's own run only foreign ones, outside of a run none."""
    places = _places()
    if places is None:
        return {}
    if places.session:
        return {name: str(path) for name, path in _foreign(modules, places)}
    return {
        name: str(path.relative_to(places.tree) if path.is_relative_to(places.tree) else path)
        for name, path in _project_modules(modules, places)
    }


def require_own_modules(modules: Mapping[str, ModuleType] = sys.modules) -> None:
    """Raise ForeignModule if a module of the project does not come from the tree that this run measures."""
    places = _places()
    if places is None or not places.exclusive:
        return
    if places.session:
        for name, path in _foreign(modules, places):
            raise ForeignModule(f"{foreign_line({name: str(path)})}{_ahead_of_the_path()}")
        return
    for name, path in _project_modules(modules, places):
        if not path.is_relative_to(places.tree):
            raise ForeignModule(
                f"module {name} was imported from {path}, {FOREIGN}, {places.tree}{_ahead_of_the_path()}; "
                "give --perf-against (or --a-python) a Python that has that revision installed"
            )


def described(imports: Mapping[str, str]) -> str:
    """Return a phrase about the modules of :func:`own_modules`: packages, number of modules, and folder.

    >>> described({"shop": "src/shop/__init__.py", "shop.till": "src/shop/till.py", "test_it": "test_it.py"})
    'shop (2 modules) from src, test_it from .'
    """
    counts: dict[tuple[str, str], int] = {}
    for name, file in imports.items():
        parts = name.split(".")
        folder = next(_without(_stem(Path(file)), parts), Path(file).parent)
        counts[parts[0], str(folder)] = counts.get((parts[0], str(folder)), 0) + 1
    parts_of_phrase = [
        f"{package}{f' ({count} modules)' if count > 1 else ''} from {folder}"
        for (package, folder), count in counts.items()
    ]
    return ", ".join(parts_of_phrase)


def _places() -> _Places | None:
    text = os.environ.get(VARIABLE)
    return _places_of(text) if text else None


@functools.lru_cache(maxsize=1)
def _places_of(text: str) -> _Places:
    plain = json.loads(text)
    return _Places(
        tree=Path(plain["tree"]),
        checkout=Path(plain["checkout"]),
        folders=tuple(map(Path, plain.get("folders", ()))),
        copies=PackageCopies(plain.get("elsewhere", {}), Path(plain["checkout"])),
        session=plain["session"],
        exclusive=plain["exclusive"],
    )


def _project_modules(modules: Mapping[str, ModuleType], places: _Places) -> Iterator[tuple[str, Path]]:
    """Yield name and file of the modules that lie in the tree or its checkout, share a name with it, or are copies."""
    named = functools.lru_cache(maxsize=None)(functools.partial(_in_folders, places.folders))
    for name, module in sorted(modules.items()):
        files = list(_files(module))
        inside = [path for path in files if _of_project(path, places.tree)]
        outside = [
            path
            for path in files
            if _of_project(path, places.checkout) or _named(name, named) or places.copies.has(name, path)
        ]
        for path in (inside or outside)[:1]:
            yield name, path


def _foreign(modules: Mapping[str, ModuleType], places: _Places) -> Iterator[tuple[str, Path]]:
    """Yield name and file of the modules of the checkout that were imported from another file with another text.

    A file of another checkout is foreign even if its text is the same: its compiled modules and data may differ.
    """
    for name, module in list(
        modules.items()
    ):  # it runs in every rank for every case: the first test rejects nearly all
        file = getattr(module, "__file__", None)
        if name in _OF_EVERYBODY or not isinstance(file, str):
            continue
        if not (name.partition(".")[0] in places.tops or ("." not in name and _of_a_checkout(file))):
            continue
        path = Path(file).resolve()
        if path.is_relative_to(places.tree) and not _installed(path):
            continue
        own = list(_own_files(name, path, places))
        same = _installed(path) and any(path.read_bytes() == place.read_bytes() for place in own)
        if own and not same:
            yield name, path


def _of_a_checkout(file: str) -> bool:
    return not (file.startswith((sys.prefix, sys.base_prefix)) or _installed(Path(file)))


def _own_files(name: str, path: Path, places: _Places) -> Iterator[Path]:
    """Yield the checkout's files for a module: by its name, or by its place in another checkout."""
    for folder in places.folders:
        place = folder.joinpath(*name.split("."))
        yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())
    other = checkout_of(path.parent)
    if not _installed(path) and (other / ".git").exists() and (places.tree / path.relative_to(other)).is_file():
        yield places.tree / path.relative_to(other)


def _installed(path: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in path.parts)


def _files(module: ModuleType) -> Iterator[Path]:
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        if os.path.isabs(file):  # torch.ops says "_ops.py"
            yield Path(file).resolve()
    elif file is None:
        try:
            portions = [str(portion) for portion in getattr(module, "__path__", ())]
        except Exception:  # a module's own __getattr__, or a parent that was removed
            portions = []
        yield from (Path(portion).resolve() for portion in portions if os.path.isdir(portion))


def _named(name: str, is_module: functools._lru_cache_wrapper[bool]) -> bool:
    """Return whether the tree has this module, or a package with ``__init__.py`` around it."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] == "conftest":
        return False
    return any(is_module("/".join(parts[:length])) for length in range(1, len(parts) + 1))


def _in_folders(folders: Sequence[Path], path: str) -> bool:
    return any((folder / path / "__init__.py").is_file() or (folder / f"{path}.py").is_file() for folder in folders)


def _ahead_of_the_path() -> str:
    """Return the finders before the import path that are not Python's own; empty without one."""
    before = sys.meta_path[: sys.meta_path.index(PathFinder)] if PathFinder in sys.meta_path else []
    names = []
    for finder in before:
        kind = finder if isinstance(finder, type) else type(finder)
        if kind.__module__.partition(".")[0] not in {"_frozen_importlib", "_distutils_hack", "_pytest", "six"}:
            names.append(f"{kind.__module__}.{kind.__name__}")
    return f" (asked before the import path: {', '.join(names)})" if names else ""


def _of_project(path: Path, checkout: Path) -> bool:
    """Return whether ``path`` is in the checkout, but not in an environment inside of it."""
    return path.is_relative_to(checkout) and not _installed(path) and not path.is_relative_to(sys.prefix)
