"""Differences of a vendor's stack from torch's manual, as data: ``quirks.toml``, by version and architecture.

Each quirk names the code that handles it; ``avoid`` lists names that device code must not use. Tests check both.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("quirks.toml")


@dataclass(frozen=True, kw_only=True)
class Quirk:
    """One difference of a stack."""

    family: str  # Device family of the stack.
    name: str  # Short and stable name; recorded with the affected runs.
    says: str  # The effect.
    does: str  # The handling in perfsuite.
    honoured_by: str  # Place of the handling: ``module:name``.
    source: str  # Reference.
    since: str = ""  # First version of the vendor's package that has it; empty: all.
    until: str = ""  # First version without it; empty: none.
    below: int | None = None  # Architectures below this one have it; None: all.
    avoid: tuple[str, ...] = ()  # Names that device code must not use.

    def concerns(self, version: str, architecture: int | None) -> bool:
        """Return whether this version on this architecture has it; unknown ones (empty, None) may have it.

        >>> texts = dict(name="n", says="s", does="d", honoured_by="h", source="s")
        >>> quirk = Quirk(family="musa", since="2.7", below=31, **texts)
        >>> quirk.concerns("2.7.1+4a3c2b1", 22), quirk.concerns("2.5.0", 22), quirk.concerns("", 31)
        (True, False, False)
        """
        if self.below is not None and architecture is not None and architecture >= self.below:
            return False
        number = numbers(version)
        if not number:
            return True
        return (not self.since or number >= numbers(self.since)) and (not self.until or number < numbers(self.until))

    def __str__(self) -> str:
        reach = f" (architectures below mp_{self.below})" if self.below is not None else ""
        return f"{self.name}{reach}: {self.says}; perfsuite: {self.does}"


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, without trailing zeros.

    >>> numbers("2.7.0a0+gitabc123"), numbers("2.7.1+musa"), numbers("unknown")
    ((2, 7), (2, 7, 1), ())
    """
    counts = [int(digits) for digits in re.findall(r"\d+", (re.match(r"\d+(\.\d+)*", version) or [""])[0])]
    while counts and counts[-1] == 0:
        counts.pop()
    return tuple(counts)


def architecture_number(text: str) -> int | None:
    """Return 31 for ``mp_31``; None if unknown.

    >>> architecture_number("mp_22"), architecture_number("")
    (22, None)
    """
    match = re.search(r"mp_(\d+)", text)
    return int(match[1]) if match else None


def architecture_note(name: str) -> str:
    """Return a row's architecture with its meaning for users; empty for none.

    >>> architecture_note("mp_22")
    'architecture mp_22: compute capability 2.2; which kernels and quirks of the stack apply depends on it'
    >>> architecture_note("")
    ''
    """
    number = architecture_number(name)
    capability = "" if number is None else f"compute capability {number // 10}.{number % 10}; "
    return f"architecture {name}: {capability}which kernels and quirks of the stack apply depends on it" if name else ""


@functools.lru_cache(maxsize=1)
def _tables() -> Mapping[str, Any]:
    tables: Mapping[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tables


def all_quirks(family: str) -> tuple[Quirk, ...]:
    """Return every quirk of a family, in the order of the file."""
    rows = [row for row in _tables()["quirk"] if row["family"] == family]
    return tuple(Quirk(**{**row, "avoid": tuple(row.get("avoid", ()))}) for row in rows)


def quirks(family: str, *, version: str = "", architecture: int | None = None) -> tuple[Quirk, ...]:
    """Return the quirks of this version on this architecture; unknown (empty) ones may have any."""
    return tuple(quirk for quirk in all_quirks(family) if quirk.concerns(version, architecture))


def package_version(family: str) -> str:
    """Return the installed version of the vendor's package for torch, without importing it; empty: none."""
    return installed_version(_tables()["package"].get(family, "no package"))


def installed_version(distribution: str) -> str:
    """Return the installed version of a package from its metadata, without importing it; empty: none."""
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms; most commands do not need it

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
