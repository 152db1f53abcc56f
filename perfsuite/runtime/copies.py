"""Find packages in unusual folders of a tree, and decide whether an imported module is an installed copy of one.

A tree may hold packages of other projects: vendored packages, examples, test data. An imported module of such a name
belongs to the project if it was installed from the project or has the same text; a dependency of that name does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
_SKIPPED = {"site-packages", "dist-packages", "node_modules", "__pycache__", "build", "dist"}
NO_PROJECT, UNREADABLE = "", "?"  # Names of packages without a project, and of a project whose files state no name.


def package_folders(tree: Path) -> dict[str, str]:
    """Return every folder of ``tree`` with importable modules, and the name of the project that installs them."""
    projects: dict[Path, str] = {}
    for name, below, files in os.walk(tree):
        folder = Path(name)
        below[:] = [name for name in below if name not in _SKIPPED and not name.startswith(".")]
        if "__init__.py" in files and folder != tree:
            below.clear()  # modules of a package are imported through it
            folder = folder.parent
        elif not any(file.endswith(".py") for file in files):
            continue
        for root in _up_to(tree, folder):
            if root not in projects:
                projects[root] = _project_of(tree, root)
    return {str(root): project for root, project in projects.items()}


def _up_to(tree: Path, folder: Path) -> Iterator[Path]:
    if folder.is_relative_to(tree):
        yield folder
        if folder != tree:
            yield from _up_to(tree, folder.parent)


def _project_of(tree: Path, folder: Path) -> str:
    """Return the name of the nearest project whose files are in this folder or above it."""
    for place in _up_to(tree, folder):
        files = [place / name for name in _PROJECT_FILES if (place / name).is_file()]
        if files:
            return next(filter(None, map(_name_in, files)), UNREADABLE)
    return NO_PROJECT


def _name_in(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".toml":
        sections = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
        text = "".join(part for part in sections if part.startswith(("[project]", "[tool.poetry]")))
    match = re.search(r"""^[ \t,(]*name\s*=\s*["']?([A-Za-z0-9._-]+)["']?\s*(?:[,#)].*)?$""", text, re.MULTILINE)
    match = match or re.search(r"""\bname\s*=\s*["']([A-Za-z0-9._-]+)["']""", text)
    return match.group(1) if match else ""


class PackageCopies:
    """Decides whether modules from outside of a tree are copies of its packages."""

    def __init__(
        self,
        folders: Mapping[str, str],
        checkout: Path,
        owners: Callable[[], Mapping[str, Sequence[str]]] = metadata.packages_distributions,
        origin: Callable[[str], str | None] | None = None,
    ) -> None:
        """Compare with ``folders``, the result of :func:`package_folders`.

        ``owners`` returns the distributions by top-level package, ``origin`` the ``direct_url.json`` of a distribution.
        """
        self._folders = folders
        self._checkout = checkout
        self._find_owners = owners
        self._origin = origin or (lambda name: metadata.distribution(name).read_text("direct_url.json"))
        self._distributions: Mapping[str, Sequence[str]] | None = None

    def has(self, name: str, file: Path) -> bool:
        """Return whether the module ``name``, imported from ``file``, is a copy of a module in the tree."""
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names or parts[0] == "conftest":
            return False
        for folder, project in self._folders.items():
            if _holds(folder, parts[0]) and (is_package := _is_package(folder, parts)) is not None:
                by_hand = is_package and not self._owners(parts[0])
                if by_hand or self._installs(parts[0], project) or _same_text(Path(folder, *parts), file):
                    return True
        return False

    def _installs(self, package: str, project: str) -> bool:
        """Return whether a package was installed from the checkout, or from a release of this project."""
        names = self._owners(package)
        if names and project == UNREADABLE:
            return True
        return _plain(project) in map(_plain, names) or any(map(self._is_of_checkout, names))

    def _owners(self, package: str) -> Sequence[str]:
        """Return the distributions of a package. Reads the files of all distributions, so only on demand."""
        if self._distributions is None:
            self._distributions = self._find_owners()
        return self._distributions.get(package, ())

    def _is_of_checkout(self, distribution: str) -> bool:
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            direct: Any = json.loads(self._origin(distribution) or "{}")
            url = str(direct.get("url", ""))
            return url.startswith("file://") and Path(url.removeprefix("file://")).is_relative_to(self._checkout)
        return False


@functools.cache
def _holds(folder: str, name: str) -> bool:
    return os.path.isdir(os.path.join(folder, name)) or os.path.isfile(os.path.join(folder, f"{name}.py"))


def _is_package(folder: str, parts: Sequence[str]) -> bool | None:
    if any(Path(folder, *parts[:length], "__init__.py").is_file() for length in range(1, len(parts) + 1)):
        return True
    return False if Path(folder, *parts).with_suffix(".py").is_file() else None


def _same_text(place: Path, file: Path) -> bool:
    """Return whether a file has the same text, not empty, as the module at ``place`` in the tree."""
    for own in (place / "__init__.py", place.with_suffix(".py")):
        if own.is_file() and file.is_file():
            text = own.read_bytes()
            return bool(text.strip()) and text == file.read_bytes()
    return False


def _plain(name: str) -> str:
    """Return a distribution's name in the normal form of installers.

    >>> _plain("Shop_Core.extra")
    'shop-core-extra'
    """
    return re.sub(r"[-_.]+", "-", name).lower()
