"""Replace names of hosts by numbers in files for other people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from perfsuite.record.result import Result


def hosts_of(results: Iterable[Result]) -> tuple[str, ...]:
    """Return the names of hosts that texts on these results may contain, the longest first."""
    names: set[str] = set()
    seen: set[int] = set()
    for result in results:
        names.add(str(result.environment.get("hostname", "")))
        if result.world_size not in seen and result.measurement is not None:  # as many ranks run on the same hosts
            seen.add(result.world_size)
            names |= {rank.host for rank in result.measurement.ranks}
    return tuple(sorted(names - {""}, key=lambda name: (-len(name), name)))


def numbered(hosts: Sequence[str]) -> Callable[[str], str]:
    """Return a function that replaces each host's name by its number.

    >>> numbered(["node17", "node2"])("node2 cuda:3 to node17 cuda:0, not node171")
    'host 1 cuda:3 to host 2 cuda:0, not node171'
    """
    if not hosts:
        return str
    places = {name: f"host {number}" for number, name in enumerate(sorted(hosts, key=_natural), start=1)}
    anyone = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, hosts))})(?![\w-])")
    return lambda text: anyone.sub(lambda found: places[found[0]], text)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
