"""pytest-benchmark: its JSON storage.  Seconds, and names only: neither ranks nor devices."""

from __future__ import annotations

from perfsuite.base.units import plural
from perfsuite.imports.row import Format, Imported, ImportedRow, Source


def _recognises(source: Source) -> bool:
    plain = source.json
    return isinstance(plain, dict) and {"machine_info", "benchmarks"} <= set(plain)


def _read(source: Source) -> Imported:
    if not _recognises(source):
        raise source.fault(
            1, "no JSON with machine_info and benchmarks: it is cut, or of another tool", "give all of it"
        )
    plain = source.json
    if "perfsuite" in plain:
        raise source.fault(
            source.line_of('"perfsuite"'), "this is a baseline of perfsuite", "show it: perfsuite report FILE"
        )
    entries = plain["benchmarks"]
    if not isinstance(entries, list):
        raise source.fault(source.line_of('"benchmarks"'), "benchmarks is no list", "give all of the file")
    machine = plain["machine_info"] if isinstance(plain["machine_info"], dict) else {}
    rows: list[ImportedRow] = []
    for entry in entries:
        name = str(entry.get("fullname") or entry.get("name", "")) if isinstance(entry, dict) else ""
        line = source.line_of(f'"{name}"')
        stats = entry.get("stats") if name else None
        if not isinstance(stats, dict) or "median" not in stats:
            raise source.fault(line, f"{name or 'an entry'} has no median", "give a file that pytest-benchmark wrote")
        rows.append(
            source.row(
                line,
                name,
                ("median_s", "s", "lower"),
                source.number(line, stats["median"], "median"),
                printed=str(stats["median"]),
                convention="pytest-benchmark: median of its rounds, on one process",
                settings={
                    "rounds": str(stats.get("rounds", "")),
                    "machine": f"{machine.get('processor', '')} {machine.get('system', '')}".strip(),
                },
            )
        )
    if not rows:
        raise source.fault(1, "no benchmark", "give a file of a run that measured something")
    version = str(plain.get("version", "unknown"))
    return source.imported(rows, notes=[f"{plural(len(rows), 'benchmark')}, version {version}"])


FORMAT = Format(name="pytest-benchmark", about="pytest-benchmark's JSON", recognises=_recognises, read=_read)
