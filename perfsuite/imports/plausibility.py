"""Check imported figures with the rules of the audit and with the link rates of data sheets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from perfsuite.audit.audit import audit
from perfsuite.audit.table import AuditColumn, AuditTable, Fact, Row
from perfsuite.imports.row import Imported, ImportedRow
from perfsuite.platforms import DeviceModel
from perfsuite.published.numbers import printed

_ROLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "step_time_ms": ("latency", "ms"),
        "forward_ms": ("forward_time", "ms"),
        "backward_ms": ("backward_time", "ms"),
        "optimizer_ms": ("optimizer_time", "ms"),
        "samples_per_s": ("throughput", ""),
        "samples_per_s_per_device": ("throughput_per_device", ""),
        "tokens_per_s_per_device": ("tokens_per_s_per_device", ""),
        "tflops_per_device": ("tflops", "TFLOPS"),
        "mfu_percent": ("mfu", "%"),
        "loss": ("loss", ""),
        "reserved_memory_gib": ("memory", "GiB"),
    }
)
"""Role and unit of a metric in an audited table."""
_MOST_ROWS = 50
"""Most rows of a table: rules compare rows in pairs, and logs have thousands of steps."""
_SETTINGS = ("global_batch_size", "local_batch_size", "sequence_length")


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A rule that imported figures break."""

    rule: str
    severity: str
    """contradiction, mislabel or note, as in findings of the audit."""
    message: str


def doubts(imported: Imported, device: DeviceModel | None = None) -> tuple[Doubt, ...]:
    """Return the broken rules; ``device`` has the published figures of their platform."""
    findings = (one for table in _tables(imported, device) for one in audit([table]))
    return (
        *(Doubt(rule=one.rule, severity=one.severity, message=one.message) for one in findings),
        *_above_peaks(imported.rows, device),
    )


def _tables(imported: Imported, device: DeviceModel | None) -> Iterator[AuditTable]:
    """Yield figures of training steps as tables: a row per name, a column per metric, steps and runs separate.

    A resumed run repeats losses of the previous one; they are not compared.
    """
    facts = {}
    if device is not None and device.memory is not None:
        facts["memory_capacity"] = Fact(text=f"{device.memory.value:g}", unit="GiB")
    tables: dict[tuple[str, str], dict[str, list[ImportedRow]]] = {}
    for row in imported.rows:
        if row.metric in _ROLES and not row.collective:
            step = row.settings.get("step")
            kind = (row.settings.get("run", ""), row.name.partition(step)[0] if step else "")
            tables.setdefault(kind, {}).setdefault(row.name, []).append(row)
    for rows in (list(by_name.values()) for by_name in tables.values()):
        for start in range(0, len(rows), _MOST_ROWS):
            yield _table(imported.source, rows[start : start + _MOST_ROWS], facts)


def _table(source: str, by_name: Sequence[Sequence[ImportedRow]], facts: Mapping[str, Fact]) -> AuditTable:
    metrics = dict.fromkeys(row.metric for rows in by_name for row in rows)
    return AuditTable(
        name=source,
        columns=tuple(AuditColumn(name=one, role=_ROLES[one][0], unit=_ROLES[one][1]) for one in metrics),
        rows=tuple(_row(source, index, rows) for index, rows in enumerate(by_name)),
        facts=facts,
    )


def _row(source: str, index: int, rows: Sequence[ImportedRow]) -> Row:
    first = rows[0]
    facts = {name: Fact(text=text) for name, text in first.settings.items() if name in _SETTINGS}
    facts["config"] = Fact(text=first.name)  # steps of one run do not repeat each other
    if first.ranks:
        facts["devices"] = Fact(text=str(first.ranks))
    return Row(
        name=f"line {first.line} ({first.name})",
        cells={row.metric: printed(_figure(row)) for row in rows},
        facts=facts,
        index={source: index},
    )


def _figure(row: ImportedRow) -> str:
    """Return the figure with the digits of its source, in the unit of the row."""
    try:
        return row.printed if float(row.printed.replace(",", "")) == row.value else f"{row.value:.6g}"
    except ValueError:
        return f"{row.value:.6g}"


def _above_peaks(rows: Sequence[ImportedRow], device: DeviceModel | None) -> Iterator[Doubt]:
    """Yield shares above 100 %, and rates above the data sheet of the platform."""
    for row in rows:
        where = f"{row.source}:{row.line}: {row.name}: {row.metric} {row.printed}"
        if row.unit == "percent" and row.value > 100:
            yield Doubt(rule="share-above-one", severity="contradiction", message=f"{where} is more than all of it")
        if device is None:
            continue
        peak = device.tflops.get(row.dtype or "bf16")
        if row.metric == "tflops_per_device" and peak is not None and row.value > peak.value:
            yield Doubt(
                rule="above-peak",
                severity="contradiction",
                message=f"{where}: above {peak.value:g} {peak.unit} ({peak.source})",
            )
    fast = [row for row in rows if row.metric == "busbw_gb_per_s"]
    link = device.link if device is not None else None
    if link is not None and fast and (row := max(fast, key=lambda row: row.value)).value > link.value:
        yield Doubt(
            rule="above-link",
            severity="note",
            message=f"{row.source}:{row.line}: {row.name}: busbw {row.printed}, above the link's {link.value:g} GB/s "
            f"({link.source}); a reduction inside the switch can be, a wrong unit or convention as well",
        )
