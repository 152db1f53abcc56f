"""perftest: RDMA bandwidth and latency of ib_write_bw, ib_send_lat and similar programs.

MiB/sec, and MB/sec of older versions, are 2**20 bytes; Gb/sec are 1e9 bits. Rows are checked against the message rate.
Source: linux-rdma/perftest, src/perftest_parameters.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import partial
from types import MappingProxyType

from perfsuite.base.units import MIB
from perfsuite.imports.row import (
    Format,
    Imported,
    ImportedRow,
    LogRow,
    LogTable,
    Meaning,
    Source,
    figures_of_tables,
    read_tables,
)
from perfsuite.published.numbers import Interval, printed

_TITLE = re.compile(
    r"^\s*(?P<test>(?:RDMA_(?:Write|Read)\w*|Send|Atomic[_ ]\w+|Raw_\w+)\b[\w ]*?(?:BW|Latency)) Test\s*$",
    re.IGNORECASE,
)
_COMMAND = re.compile(
    r"(?:^|[\s/])(?:ib|raw_ethernet)_(?P<test>write|read|send|atomic)_(?P<kind>bw|lat)\b(?P<options>.*)$"
)
_TESTS = {"write": "RDMA_Write", "read": "RDMA_Read", "send": "Send", "atomic": "Atomic"}
_GB: Mapping[str, float] = MappingProxyType({"Gb/sec": 0.125, "MiB/sec": MIB / 1e9, "MB/sec": MIB / 1e9})
_NAMES = re.compile(
    r"#bytes|#iterations|BW peak\[(?:Gb|MiB|MB)/sec\]|BW average\[(?:Gb|MiB|MB)/sec\]|MsgRate\[Mpps\]"
    r"|t_(?:min|max|typical|avg|stdev)\[usec\]|99(?:\.9)?% percentile\[usec\]|CPU_Util\[%\]|tps average"
)
_TIMES: Mapping[str, str] = MappingProxyType(
    {
        "t_min": "latency_min_us",
        "t_max": "latency_max_us",
        "t_typical": "latency_median_us",
        "t_avg": "latency_us",
        "t_stdev": "latency_std_us",
        "99% percentile": "latency_p99_us",
        "99.9% percentile": "latency_p99_9_us",
    }
)
_SETTINGS = re.compile(r"(Number of qps|Connection type|TX depth|Mtu|Link type)\s*:\s*(\S+)")
_SPARE = Fraction(2, 1000)


def _title(line: str) -> str:
    if match := _TITLE.match(line):
        return " ".join(match["test"].split())
    if match := _COMMAND.search(line):
        both = " Bidirectional" if re.search(r"\s(?:-b|--bidirectional)\b", match["options"]) else ""
        return f"{_TESTS[match['test']]}{both} {'BW' if match['kind'] == 'bw' else 'Latency'}"
    return ""


def _names(line: str) -> tuple[str, ...]:
    """Return the column names of a line; empty for any other or cut line."""
    text = line.strip()
    names = tuple(_NAMES.findall(text))
    return (
        names if names[:2] == ("#bytes", "#iterations") and len(names) > 2 and not _NAMES.sub("", text).strip() else ()
    )


def _read(source: Source) -> Imported:
    tables, refused = read_tables(source.labelled, _title, _names)
    untitled = "no line '... BW Test' and no command above: one direction and both print the same; add the line"
    figures = partial(_figures, source)
    rows = figures_of_tables(source, tables, refused, untitled=untitled, why_refused=_why_refused, figures=figures)
    peaks = sum(
        "peak" in name and float(cell) == 0 and not _why_refused(table, row)
        for table in tables
        for row in table.rows
        for name, cell in zip(table.columns, row.cells, strict=True)
    )
    notes = [f"{peaks} peaks of 0 left out: a run by duration has none"] if peaks else []
    return source.imported(rows, refused=refused, notes=notes)


def _why_refused(table: LogTable, row: LogRow) -> str:
    cells = dict(zip(table.columns, row.cells, strict=True))
    if not re.fullmatch(r"\d{1,18}", cells["#bytes"]):
        return f"the size is {cells['#bytes']!r:.40}"
    for name, cell in cells.items():
        if not name.startswith("#") and not re.fullmatch(r"\d+\.\d{2,}", cell):
            return f"{name} is {cell!r:.40}, without two decimals: the row is cut"
    name = next((name for name in cells if name.startswith("BW average")), "")
    if "MsgRate[Mpps]" not in cells or not name:
        return ""
    rate, bandwidth = (printed(cells[one]).numbers[0].interval for one in ("MsgRate[Mpps]", name))
    scale = _GB[name.partition("[")[2].rstrip("]")]
    expected = rate * Interval.exactly(Fraction(int(cells["#bytes"]), 1000) / Fraction(scale))
    if not bandwidth.meets(Interval(low=expected.low * (1 - _SPARE), high=expected.high * (1 + _SPARE))):
        return f"{name} is {cells[name]}, size times message rate is {expected}: the row is not consistent"
    return ""


def _figures(source: Source, table: LogTable, row: LogRow) -> Iterator[ImportedRow]:
    settings = {match[1]: match[2] for line in table.above for match in _SETTINGS.finditer(line)}
    cells = dict(zip(table.columns, row.cells, strict=True))
    name = ", ".join(filter(None, [f"{table.title} {cells['#bytes']} B", table.run, row.repeat]))
    for column, cell in cells.items():
        what, _, unit = column.partition("[")
        unit = unit.rstrip("]")
        scale = 1.0
        meaning: Meaning
        if what in ("BW average", "BW peak"):
            meaning = ("bandwidth_gb_per_s" if what == "BW average" else "bandwidth_peak_gb_per_s", "GB/s", "higher")
            scale = _GB[unit]
            both = "both directions added" if "bidirectional" in table.title.lower() else "one direction"
            bytes_of = {"MB/sec": "; MB of perftest are 2**20 bytes"}.get(unit, "")
            convention = f"perftest: {both}; printed in {unit}{bytes_of}"
        elif what in _TIMES:
            meaning = (_TIMES[what], "us", "lower")
            way = (
                "there and back"
                if re.search("read|atomic", table.title, re.IGNORECASE)
                else "one way, half of a round trip"
            )
            convention = f"perftest: {way}"
        else:
            continue
        value = source.number(row.line, cell, column)
        if what == "BW peak" and value == 0:
            continue
        yield source.row(
            row.line,
            name,
            meaning,
            value * scale,
            printed=cell,
            convention=convention,
            message_bytes=float(cells["#bytes"]),
            settings={**settings, "iterations": cells["#iterations"]},
        )


FORMAT = Format(
    name="perftest",
    about="perftest (ib_write_bw, ib_read_lat, ...)",
    recognises=lambda source: any(_names(line) for line in source.lines),
    read=_read,
)
