"""Tables of report 003: OneFlow's GPT by groups of cases, with a check of their arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfsuite.base.text import code_text
from perfsuite.reports.tables import spec as c
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.case_names import case_name
from perfsuite.reports.tables.spec import ColumnSpec, Style, TableSpec, setting


def is_of_grid(case: TableCase) -> bool:
    """Whether the id of a case is named as in report 003: DP_8x1x1_16_1536x16."""
    return "case_name" in case.settings


def _contradictions(case: TableCase) -> Iterator[str]:
    settings = case.settings
    ranks, dp, tp, pp = (int(settings.get(name, 1)) for name in ("ranks", "dp", "tp", "pp"))
    if dp * tp * pp != ranks:
        yield f"dp {dp} is not ranks {ranks} / (tp {tp} x pp {pp})"
    micro = case.parameters.get("micro_batch_size") or settings.get("micro_batch_size", 1)
    steps, batch = settings.get("num_micro_batches", 1), settings.get("global_batch_size")
    if batch is not None and micro * dp * steps != batch:
        yield f"accumulation {steps} is not batch {batch} / (micro {micro} x dp {dp})"
    name = case_name(str(settings.get("case_name", "")))
    if name is None:
        return
    sizes = {"width": settings["hidden_size"], "layers": settings["num_layers"]}
    ran = {"dp": dp, "tp": tp, "pp": pp, "batch": batch, **sizes}
    for what, value in ran.items():
        if value is not None and getattr(name, what) != value:
            yield f"its name says {what} {getattr(name, what)}, and it ran with {value}"


def _checked(rows: Sequence[TableCase]) -> Iterator[str]:
    rule = "dp = ranks / (tp x pp) and accumulation = global batch / (micro-batch x dp)"
    wrong = {case.case: "; ".join(_contradictions(case)) for case in rows}
    if not any(wrong.values()):
        yield f"checked: {rule} in every row"
    for case, errors in wrong.items():
        if errors:
            yield f"CONTRADICTION in {code_text(case)}: {errors}"


_GROUP, _CASE = setting("group", "group"), setting("case", "case_name")
_ATTENTION = setting("attention", "attention")
_WHOLE_CARD = ColumnSpec(title="memory MiB (whole card)", key="whole_device_gib", scale=1024)
_SAME_AXES = ("dp", "tp", "pp")

ONEFLOW = Style(
    name="oneflow",
    report="003",
    title="OneFlow GPT",
    needs="pytest test_perf -k oneflow, or cases of your own that are called by its rule (2D_2x4x1_16_1536x16)",
    applies=is_of_grid,
    words=("oneflow",),
    environment=True,
    tables=(
        TableSpec(
            title="Cases",
            select=is_of_grid,
            published=("003/results",),
            pair_by=_SAME_AXES,
            columns=(
                _GROUP,
                _CASE,
                c.LAYOUT,
                setting("nodes", "nodes"),
                setting("devices per node", "devices_per_node"),
                c.DP,
                c.TP,
                c.PP,
                setting("micro-batch", "micro_batch_size"),
                setting("micro-batch x dp", "micro_times_dp"),
                setting("accumulation", "num_micro_batches"),
                c.GLOBAL,
                setting("hidden size", "hidden_size"),
                setting("heads", "num_heads"),
                setting("layers", "num_layers"),
                _ATTENTION,
            ),
            remarks=_checked,
        ),
        TableSpec(
            title="Results",
            select=is_of_grid,
            published=("003/results",),
            pair_by=_SAME_AXES,
            columns=(
                _GROUP,
                _CASE,
                c.LAYOUT,
                _ATTENTION,
                ColumnSpec(title="latency ms", key="step_time_s", scale=1000),
                _WHOLE_CARD,
                ColumnSpec(title="memory peak GiB (allocated)", key="peak_gib"),
                c.SAMPLES,
            ),
        ),
        TableSpec(
            title="Logs",
            select=is_of_grid,
            published=("003/results",),
            pair_by=_SAME_AXES,
            columns=(_GROUP, _CASE, c.LAYOUT, _ATTENTION, setting("log, as OneFlow calls it", "log_name")),
            notes=("OneFlow's program writes a log of this name for the same case",),
        ),
    ),
)
