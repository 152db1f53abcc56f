"""Kinds of links between the ranks of a measurement, from the topology matrix that its environment holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.metrics.pairs import Pair
from perfsuite.platforms.cuda import Cuda
from perfsuite.platforms.detection import matrix_rows
from perfsuite.platforms.musa import Musa
from perfsuite.record.result import RankFacts

NETWORK = "network"
"""Between hosts."""
ONE_DEVICE = "one device"
"""Between ranks that share a device, as all of a CPU do."""
UNKNOWN = "within the host"
"""Between devices of which no tool told how they are linked."""
_VISIBLE = (Cuda.visible_variable, Musa.visible_variable)


def links(ranks: Sequence[RankFacts], environment: Mapping[str, Any]) -> dict[Pair, str]:
    """The kind of every ordered pair: a cell of the vendor tool's matrix (``NV18``, ``SYS``), or what is known.

    The matrix is that of the driver's host; other hosts of a cluster are taken to be like it.
    """
    kinds = {}
    rows = matrix_rows(str(environment.get("topology") or ""))
    for first, second in itertools.permutations(ranks, 2):
        if first.host != second.host:
            kind = NETWORK
        elif first.device == second.device:
            kind = ONE_DEVICE
        else:
            kind = _cell(rows, _index(first, environment), _index(second, environment)) or UNKNOWN
        kinds[first.rank, second.rank] = kind
    return kinds


def _cell(rows: Mapping[str, Sequence[str]], first: int | None, second: int | None) -> str:
    row = rows.get(f"GPU{first}", ())
    return row[second] if second is not None and second < len(row) else ""


def _index(rank: RankFacts, environment: Mapping[str, Any]) -> int | None:
    """The tool's number of a device, which torch numbers among those left visible; None: it is not told."""
    number = rank.device.rpartition(":")[2]
    if not number.isdigit():
        return None
    variables = environment.get("variables") or {}
    shown = next((variables[name] for name in _VISIBLE if name in variables), None)
    if shown is None:
        return int(number)
    chosen = [word.strip() for word in str(shown).split(",")]
    entry = chosen[int(number)] if int(number) < len(chosen) else ""
    return int(entry) if entry.isdigit() else None
