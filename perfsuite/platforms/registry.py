"""All device families: the built-in ones, and those of installed packages.

A package adds a family by an entry point of the group ``perfsuite.families``: its name is the family's, its object is
the Family class. Every process of the interpreter sees entry points, so a rank worker finds the device code by the
family's name. A family that is not installed, such as a test's simulated device, is named in the environment, which
every rank has: ``PERFSUITE_FAMILIES=name=module:Class``, several separated by commas.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.platforms.base import DeviceCode, Family
from perfsuite.platforms.host import Host

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "perfsuite.families"
VARIABLE = "PERFSUITE_FAMILIES"

_BUILT_IN: Mapping[str, str] = {
    "musa": "perfsuite.platforms.musa:Musa",
    "cuda": "perfsuite.platforms.cuda:Cuda",
    "cpu": "perfsuite.platforms.cpu:Cpu",
}
"""In the order of detection; cpu is the last."""

_TABLE_ONLY: Mapping[str, str] = {
    "rocm": "perfsuite.platforms.detection:Rocm",
    "ascend": "perfsuite.platforms.detection:Ascend",
}
"""Families whose rows only serve comparisons and projections; an installed package may add the family itself."""

SHIPPED = (*_BUILT_IN, *_TABLE_ONLY)  # Names of the families of perfsuite itself.


def family_names() -> tuple[str, ...]:
    """Return the names of all families; reads the metadata of every installed package, which takes milliseconds."""
    return _names(_entry_points())


def _names(installed: Iterable[str]) -> tuple[str, ...]:
    accelerators = tuple(_BUILT_IN)[:-1]
    return tuple(dict.fromkeys((*accelerators, *installed, *_TABLE_ONLY, "cpu")))


def _entry_points() -> Mapping[str, EntryPoint]:
    from importlib.metadata import EntryPoint, entry_points  # takes 20 ms; most commands do not need it

    named = [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    if wrong := [entry for entry in named if not re.fullmatch(r"\w+\s*=\s*[\w.]+:\w+", entry)]:
        raise ConfigurationError(f"{VARIABLE}: {wrong[0]!r} is not name=module:Class; write one, or unset it")
    split = (re.split(r"\s*=\s*", entry) for entry in named)
    own = [EntryPoint(name=name, value=value, group=GROUP) for name, value in split]
    return {point.name: point for point in (*entry_points(group=GROUP), *own)}


def family_class(name: str) -> type[Family]:
    """Return the Family class of this name; raise ConfigurationError if it is missing or cannot be imported."""
    return _class(name, {} if name in _BUILT_IN else _entry_points())


def _class(name: str, installed: Mapping[str, EntryPoint]) -> type[Family]:
    if name in _BUILT_IN:
        family = import_object(_BUILT_IN[name])
    elif point := installed.get(name):
        try:
            family = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"family {name!r} ({point.value}) cannot be imported: {error}; repair or uninstall its package"
            ) from error
    elif name in _TABLE_ONLY:
        family = import_object(_TABLE_ONLY[name])
    else:
        raise ConfigurationError(f"family {name!r} is not installed; choose from {', '.join(_names(installed))}")
    if not (isinstance(family, type) and issubclass(family, Family)) or family.name != name:
        raise ConfigurationError(
            f"family {name!r} is {family!r:.80}; its entry point must name a subclass of Family with name = {name!r}"
        )
    return family


def families(host: Host | None = None) -> Mapping[str, Family]:
    """Return every family by name, in the order of detection."""
    host, installed = host or Host(), _entry_points()
    return {name: _class(name, installed)(host) for name in _names(installed)}


def device_code(family: str) -> DeviceCode:
    """Return the rank side of a family (imports torch); raise ConfigurationError or DeviceUnusable without one."""
    code = import_object(family_class(family).device_code)()
    assert isinstance(code, DeviceCode), f"{family_class(family).device_code} is not a DeviceCode"
    return code


def import_object(path: str) -> Any:
    """Return the object of ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
