"""Messages between every two ranks as a matrix: senders in rows, receivers in columns, slow links by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.text import bare_name, matrix_rows
from perfsuite.base.units import format_bytes, gb_per_s, plural, seconds_to_us, significant
from perfsuite.metrics.pairs import Pair, SlowPair, message_times_s, slow_pairs
from perfsuite.record.result import RankFacts, Result
from perfsuite.reports.document import Grid

_MOST_NAMED = 4  # Slow pairs of a matrix that are listed.


@dataclass(frozen=True, kw_only=True)
class PairMatrix:
    """All pairs of one case."""

    case: str
    message_bytes: float
    both: bool  # Whether the two of a pair sent at the same time.
    as_time: bool  # Whether cells are times in us; else rates in GB/s per direction.
    names: Sequence[str]  # Of the ranks, in order: device, and host where there are several.
    times_s: Mapping[Pair, float]
    links: Mapping[Pair, str]
    slow: Sequence[SlowPair]

    @property
    def title(self) -> str:
        """``pairs, 64 MiB in one direction, GB/s (test_pair_bandwidth[...])``."""
        way = "in both directions at once" if self.both else "in one direction"
        unit = "us" if self.as_time else "GB/s per direction"
        return f"Pairs, {format_bytes(int(self.message_bytes))} {way}, {unit} ({bare_name(self.case)})"

    def figure(self, time_s: float) -> str:
        """A cell, without its unit."""
        if time_s <= 0:
            return "-"
        return significant(seconds_to_us(time_s) if self.as_time else gb_per_s(self.message_bytes, time_s), 3)

    def sentence(self, slow: SlowPair) -> str:
        """``cuda:1 to cuda:3 (NV18): 2.00 times slower than its like: 196 GB/s, others 392``."""
        first, second = (self.names[rank] for rank in slow.pair)
        unit = "us" if self.as_time else "GB/s"
        return (
            f"{first} {'and' if self.both else 'to'} {second} ({slow.link}): {slow.factor:.2f} times slower than its "
            f"like: {self.figure(slow.time_s)} {unit}, others {self.figure(slow.usual_s)}"
        )


def pair_matrices(results: Iterable[Result]) -> list[PairMatrix]:
    """A matrix for every case that measured pairs; smoke runs have none."""
    matrices = []
    for result in results:
        if result.outcome != "measured" or result.work.collective != "pairs" or result.measurement is None:
            continue  # asked in this order: a journal's measurements are decoded when they are asked for
        measurement = result.measurement
        times_s = message_times_s(measurement)
        kinds = links(measurement.ranks, result.environment)
        both = result.parameters.get("directions") == "both"
        slow = slow_pairs(times_s, kinds)
        matrices.append(
            PairMatrix(
                case=result.case,
                message_bytes=result.work.message_bytes,
                both=both,
                as_time=any(metric.name == "pair_us" for metric in result.metrics),
                names=_names(measurement.ranks),
                times_s=times_s,
                links=kinds,
                slow=[one for one in slow if not both or one.pair[0] < one.pair[1]],
            )
        )
    return matrices


def _names(ranks: Sequence[RankFacts]) -> list[str]:
    devices = {(rank.host, rank.device) for rank in ranks}
    several = len({rank.host for rank in ranks}) > 1
    if len(devices) < len(ranks):
        return [f"rank {rank.rank}{f' on {rank.host}' if several else ''}" for rank in ranks]
    return [f"{rank.host} {rank.device}" if several else rank.device for rank in ranks]


def pair_grids(results: Iterable[Result]) -> list[Grid]:
    """Return a matrix of each case with its slow pairs, and the kinds of links if a vendor's tool lists them."""
    grids: list[Grid] = []
    for matrix in pair_matrices(results):
        cells = {pair: matrix.figure(time_s) for pair, time_s in matrix.times_s.items()}
        named = [matrix.sentence(slow) for slow in matrix.slow[:_MOST_NAMED]]
        left = len(matrix.slow) - len(named)
        notes = (*named, *([f"{plural(left, 'more pair')} slower than the others"] if left else []))
        grids.append(_grid(matrix, matrix.title, cells, notes))
        if set(matrix.links.values()) - {ONE_DEVICE, UNKNOWN}:
            shown = _grid(matrix, "Links of these pairs", matrix.links, ())
            grids += [shown] if shown not in grids else []
    return grids


def _grid(matrix: PairMatrix, title: str, cells: Mapping[Pair, str], notes: Sequence[str]) -> Grid:
    everyone = range(len(matrix.names))
    rows = tuple((matrix.names[first], *(cells.get((first, second), "") for second in everyone)) for first in everyone)
    return Grid(title=title, columns=("from \\ to", *matrix.names), rows=rows, notes=tuple(notes))


NETWORK = "network"  # Between hosts.
ONE_DEVICE = "one device"  # Between ranks that share a device, as all of a CPU do.
UNKNOWN = "within the host"  # Between devices of one host whose links are unknown.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES")  # Variables that select torch's devices.


def links(ranks: Sequence[RankFacts], environment: Mapping[str, Any]) -> dict[Pair, str]:
    """Return the kind of every ordered pair: a cell of the vendor tool's matrix (``NV18``, ``SYS``), or a word above.

    The matrix shows the driver's host; other hosts are assumed to be equal.
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
    """Return the tool's number of a device, which torch counts among visible devices; None if it is unknown."""
    number = rank.device.rpartition(":")[2]
    if not number.isdigit():
        return None
    variables = environment.get("variables") or {}
    shown = next((variables[name] for name in VISIBLE if name in variables), None)
    if shown is None:
        return int(number)
    chosen = [word.strip() for word in str(shown).split(",")]
    entry = chosen[int(number)] if int(number) < len(chosen) else ""
    return int(entry) if entry.isdigit() else None
