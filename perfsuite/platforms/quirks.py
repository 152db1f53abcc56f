"""What a vendor's stack does otherwise than torch's manual says, as data: ``quirks.toml``, by version and architecture.

Each quirk names the place that honours it; ``avoid`` lists names that device code must not use.  The tests hold both.
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
    """One way in which a stack is different."""

    family: str
    """The device family it belongs to."""
    name: str
    """Short and stable; recorded with the runs that it concerns."""
    says: str
    """What happens."""
    does: str
    """What perfsuite does about it."""
    honoured_by: str
    """Where it does: ``module:name``."""
    source: str
    """Where it can be read."""
    since: str = ""
    """First version of the vendor's package that has it; empty: all."""
    until: str = ""
    """First version that no longer has it; empty: none."""
    below: int | None = None
    """It concerns architectures below this one; None: all."""
    avoid: tuple[str, ...] = ()
    """Names that device code must not use."""

    def concerns(self, version: str, architecture: int | None) -> bool:
        """Whether this version on this architecture has it; what is not known (empty, None) may have it.

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
    """The numbers that a version begins with, without zeros at their end.

    >>> numbers("2.7.0a0+gitabc123"), numbers("2.7.1+musa"), numbers("unknown")
    ((2, 7), (2, 7, 1), ())
    """
    counts = [int(digits) for digits in re.findall(r"\d+", (re.match(r"\d+(\.\d+)*", version) or [""])[0])]
    while counts and counts[-1] == 0:
        counts.pop()
    return tuple(counts)


def architecture_number(text: str) -> int | None:
    """31 of ``mp_31``; None where it is not told.

    >>> architecture_number("mp_22"), architecture_number("")
    (22, None)
    """
    match = re.search(r"mp_(\d+)", text)
    return int(match[1]) if match else None


def told_architecture(name: str) -> str:
    """A row's architecture with what it means to a user; empty for none.

    >>> told_architecture("mp_22")
    'architecture mp_22: compute capability 2.2; which kernels and quirks of the stack apply depends on it'
    >>> told_architecture("")
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
    """Every quirk of a family, in the order of the file."""
    rows = [row for row in _tables()["quirk"] if row["family"] == family]
    return tuple(Quirk(**{**row, "avoid": tuple(row.get("avoid", ()))}) for row in rows)


def quirks(family: str, *, version: str = "", architecture: int | None = None) -> tuple[Quirk, ...]:
    """The quirks of this version on this architecture; what is not known is left empty and may have them."""
    return tuple(quirk for quirk in all_quirks(family) if quirk.concerns(version, architecture))


def package_version(family: str) -> str:
    """Version of the vendor's package for torch that is installed here, read without importing it; empty: none."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms, and most commands have no such device

    try:
        return version(_tables()["package"][family])
    except (KeyError, PackageNotFoundError):
        return ""
