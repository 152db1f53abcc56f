"""Where the arms of a comparison import a project's code from, on layouts and installs drawn at random.

A checkout and the tree of another revision are written as files.  What stands on the import path is what a tool that
installs editable, PYTHONPATH or a conftest leaves there; the arm's path is made by perfsuite.  Nothing is executed but
the import, by Python's own finders, in this process.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

from perfsuite.runtime import own_tree

FOLDERS = ("", "src", "lib", "python", "code/packages")
"""Where the package lies in the repository."""
SHAPES = {"package": "shop/__init__.py", "module": "shop.py", "namespace": "ns/shop/__init__.py"}
INSTALLS = ("none", "line", "links", "mapping", "ahead", "copy", "absolute")
"""Nothing; a line in a .pth file; setuptools' strict links; a finder behind the path, and one before it; a copy in
site-packages; an absolute path of the checkout that a conftest puts first."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """What the base arm got."""

    install: str
    own: bool
    """Whether it is the code of its own revision."""
    refused: bool
    """Whether the arm said that it is not, and was not measured."""


def base_import(rng: random.Random) -> Import:
    """The import of the base arm of a project drawn at random."""
    shape, folder, install = rng.choice(tuple(SHAPES)), rng.choice(FOLDERS), rng.choice(INSTALLS)
    if install in ("links", "copy") and shape == "namespace":
        install = "line"
    with tempfile.TemporaryDirectory() as directory:
        project = _Project(Path(directory).resolve(), shape, folder)
        place = project.checkout / folder
        path, finders = project.installed(install)
        with _process(path, finders):
            own = [str(project.tree), *own_tree.mirrored(project.tree, project.checkout)]
            said = own_tree.variable(project.tree, project.checkout, own)
        first = [str(place)] if install == "absolute" else []
        known = [str(project.tree / folder)] if install == "none" else []  # pytest's pythonpath, or the root's own
        with _process([*first, *own, *known, *path], finders), mock.patch.dict(os.environ, said):
            module = _imported(project.module)
            try:
                own_tree.require_own_modules({project.module: module})
                refused = False
            except own_tree.ForeignModule:
                refused = True
        return Import(
            install=install, own=Path(str(module.__file__)).resolve().is_relative_to(project.tree), refused=refused
        )


class _Project:
    """A package in a checkout and in the tree of another revision."""

    def __init__(self, top: Path, shape: str, folder: str) -> None:
        self.tree, self.checkout, self.site = top / "base" / "tree", top / "checkout", top / "env" / "site-packages"
        self.folder, self.file = folder, SHAPES[shape]
        self.module = "ns.shop" if shape == "namespace" else "shop"
        self.site.mkdir(parents=True)
        for root in (self.tree, self.checkout):
            source = root / folder / self.file
            source.parent.mkdir(parents=True)
            source.touch()

    def installed(self, install: str) -> tuple[list[str], list[object]]:
        """Entries of the import path and finders that the install left behind."""
        place = self.checkout / self.folder
        if install == "line":
            return [str(self.site), str(place)], []
        if install == "copy":
            shutil.copytree(place, self.site, dirs_exist_ok=True)
        if install == "links":
            links = self.checkout / "build" / "__editable__.shop-1.0"
            (links / self.file).parent.mkdir(parents=True)
            (links / self.file).symlink_to(place / self.file)
            return [str(self.site), str(links)], []
        if install in ("mapping", "ahead"):
            return [str(self.site)], [_Finder({self.module: str(place / self.file)}, ahead=install == "ahead")]
        return [str(self.site)], []


class _Finder:
    """Maps modules to files, as editable installs do; only what stands behind the path tells what it maps."""

    def __init__(self, mapping: Mapping[str, str], *, ahead: bool) -> None:
        self.ahead, self._files = ahead, mapping
        if not ahead:
            self._redirections = mapping

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module where it is one of those."""
        if name in self._files:
            return importlib.util.spec_from_file_location(name, self._files[name])
        return None


@contextmanager
def _process(path: list[str], finders: list[object]) -> Iterator[None]:
    """This process with another import path and other finders."""
    ahead = [finder for finder in finders if getattr(finder, "ahead", False)]
    meta_path = [*ahead, PathFinder, *(finder for finder in finders if finder not in ahead)]
    with mock.patch.object(sys, "path", path), mock.patch.object(sys, "meta_path", meta_path):
        yield


def _imported(name: str) -> ModuleType:
    """The module as the finders find it; it is not executed, and no other import sees it."""
    parts, path, spec = name.split("."), None, None
    for length in range(1, len(parts) + 1):
        whole = ".".join(parts[:length])
        found = (finder.find_spec(whole, path) for finder in [*sys.meta_path] if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        path = list(spec.submodule_search_locations or ()) if spec is not None else None
    assert spec is not None, f"{name} is nowhere on {sys.path}"
    return SimpleNamespace(__file__=spec.origin)  # type: ignore[return-value]  # own_tree reads the file alone
