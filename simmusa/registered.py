"""Operators of the simulated torch_musa: those that a version of the real one registers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perfsuite.base.errors import ConfigurationError

VERSION = "SIMMUSA_TORCH_MUSA"
"""Environment: the version of torch_musa that is simulated."""
NEWEST = "2.7.1"
_FILE = Path(__file__).with_name("torch_musa_operators.json")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Operators of one version; see tools/derive_torch_musa_operators.py."""

    version: str
    operators: tuple[str, ...]
    """``aten::mm.out``."""
    dtypes: Mapping[str, tuple[str, ...]]
    """C++ names of dtypes, by operator whose kernel lists the dtypes of its first tensor."""
    architectures: Mapping[str, int]
    """Least architecture in torch_musa's numbers (310 is mp_31), by operator whose kernel refuses older ones."""


def registered(version: str) -> Registered:
    """Return the operators of ``version``; raise ConfigurationError for one that was not derived.

    >>> "aten::_int_mm" in registered("2.7.1").operators
    False
    """
    versions = json.loads(_FILE.read_text(encoding="utf-8"))
    if version not in versions:
        raise ConfigurationError(
            f"{VERSION}={version!r} was not derived from its sources; choose {', '.join(versions)}"
        )
    names: set[str] = set()
    for each, found in versions.items():
        names = (names - _names(found["operators"]["removed"])) | _names(found["operators"]["added"])
        if each == version:
            break
    found = versions[version]
    dtypes = {name: tuple(allowed.split()) for allowed, lines in found["dtypes"].items() for name in _names(lines)}
    architectures = {f"aten::{name}": least for name, least in found["architectures"].items()}
    return Registered(version=version, operators=tuple(sorted(names)), dtypes=dtypes, architectures=architectures)


def _names(lines: list[str]) -> set[str]:
    return {f"aten::{name}" for line in lines for name in line.split()}
