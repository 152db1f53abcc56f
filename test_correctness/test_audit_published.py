"""What the rules find in the published tables, table by table, and what they must leave alone there."""

from __future__ import annotations

import pytest

from perfsuite.audit.audit import RULES, applicable, audit
from perfsuite.audit.read import tables_of
from perfsuite.published.lookup import shipped
from test_correctness.helpers.audit_tables import rules_of, scaled, text, with_cell

EXPECTED = {
    "000/overview": {"aggregate-as-per-device", "speedup-above-n", "equal-digits"},
    "000/compute": {"implied-parameters"},
    "000/time": {"nested-part"},
    "000/memory": {"residual-column", "optimizer-not-sharded", "size-is-count"},
    "001/peaks": {"peak-not-dense"},
    "001/model-sizes": {"size-is-count"},
    "001/latte-l": {"step-grows-faster-than-batch", "repeated-row", "blank-metric"},
    "001/latte-xl": {"blank-metric"},
    "002/performance": {"shifted-columns", "blank-metric"},
    "003/results": {"repeat-noise"},
    "004/ddp": {"flops-above-peak", "mfu-peak", "same-run-disagrees"},
    "004/fsdp": {"memory-exactly-inverse", "flops-above-peak", "same-run-disagrees"},
    "004/multi-node": {"flops-above-peak"},
    "004/schedules": {"bubble-below-bound", "1f1b-memory-grows", "flops-above-peak"},
    "004/stages": {"bubble-falls-with-stages", "flops-above-peak"},
    "004/tensor": {"weights-above-memory", "flops-above-peak", "mfu-peak", "mfu-throughput"},
    "004/column-row": {"bandwidth-time"},
    "004/long-sequences": {"rate-of-out-of-memory", "tokens-rise-with-length"},
    "004/ring-attention": {"flops-above-peak", "tables-differ"},
    "004/moe": {"mfu-throughput", "flops-above-peak", "mfu-peak", "speedup-above-n"},
    "004/3d": {"mfu-throughput", "does-not-divide", "flops-above-peak", "mfu-peak"},
    "004/5d": {"implied-parameters", "more-devices-than-there-are"},
    "004/weak": {"same-run-disagrees", "tables-differ"},
    "004/strong": {"flops-above-peak", "more-devices-than-there-are", "tables-differ"},
}


def test_the_rules_find_what_is_wrong_with_each_published_table():
    found: dict[str, set[str]] = {}
    for report in shipped():
        for finding in audit(tables_of(report)):
            for name in finding.tables:
                found.setdefault(name, set()).add(finding.rule)
    assert EXPECTED == found


def messages(name: str, rule: str) -> list[str]:
    report = next(each for each in shipped() if each.report == name[:3])
    return [each.message for each in audit(tables_of(report)) if each.rule == rule and name in each.tables]


@pytest.mark.parametrize(
    ("name", "rule", "numbers"),
    [
        ("000/time", "nested-part", ["optimizer is nested", "in backward", "0.1825, 0.2752, 0.5082, 0.5057 s"]),
        ("000/memory", "optimizer-not-sharded", ["12.605 + 8.575 / n"]),
        ("000/memory", "residual-column", ["optimizer = final_device - weights", "activations = peak - final_device"]),
        ("001/latte-l", "step-grows-faster-than-batch", ["2.741 times", "for 2 times the batch"]),
        ("001/peaks", "peak-not-dense", ["330.3", "twice"]),
        ("002/performance", "shifted-columns", ["44.2/48.0", "a device of 48 GB", "mem holds 3.20"]),
        ("003/results", "repeat-noise", ["0.01% apart", "0.35% apart"]),
        ("004/ddp", "flops-above-peak", ["5636 TFLOPS", "18.07 times"]),
        ("004/ddp", "mfu-peak", ["MFU 42.3% means 5.74 samples/s"]),
        ("004/multi-node", "flops-above-peak", ["21.26 times", "19.21 times"]),
        (
            "004/schedules",
            "bubble-below-bound",
            ["22.4% is below the bound 27.3%", "12.7% is below the bound 15.8%", "75.0%"],
        ),
        ("004/schedules", "1f1b-memory-grows", ["23 with 16 micro-batches and 19 with 8"]),
        ("004/stages", "bubble-falls-with-stages", ["28.5% with 2 stages to 8.7% with 16"]),
        (
            "004/tensor",
            "weights-above-memory",
            ["(175 GB in 16 bit); 42 GB", "(87.5 GB in 16 bit); 22 GB", "(43.75 GB in 16 bit); 12 GB"],
        ),
        ("004/long-sequences", "rate-of-out-of-memory", ["throughput is 28 s/s although memory says OOM (TP)"]),
        ("004/moe", "mfu-throughput", ["1.662 times"]),
        ("004/3d", "does-not-divide", ["tp=64 does not divide 96 heads"]),
        ("004/3d", "mfu-throughput", ["2.364 times"]),
        ("004/5d", "implied-parameters", ["2.9e+09 to 3.9e+09 parameters"]),
        ("004/strong", "flops-above-peak", ["22.97 times"]),
        ("004/strong", "tables-differ", ["483 samples/s here, 823 in 004/3d"]),
        ("004/weak", "same-run-disagrees", ["245 samples/s in 004/ddp", "25 in 004/weak"]),
    ],
)
def test_findings_name_the_numbers(name, rule, numbers):
    found = "\n".join(messages(name, rule))
    for each in numbers:
        assert each in found


def test_identities_that_hold_in_the_published_tables_are_silent():
    """Ratios of the R tables and sums of the 5D and router tables hold; the ring's overhead holds within rounding."""
    found = {
        (name, finding.rule) for report in shipped() for finding in audit(tables_of(report)) for name in finding.tables
    }
    for rule in (
        "speedup-ratio",
        "efficiency-ratio",
        "throughput-time",
        "total-row",
        "share-of-total",
        "share-range",
        "overhead-ratio",
    ):
        assert not [name for name, each in found if each == rule]
    assert ("004/ddp", "mfu-throughput") not in found


def test_the_rows_of_report_003_break_no_rule():
    report = next(each for each in shipped() if each.report == "003")
    results = next(each for each in tables_of(report) if each.name == "003/results")
    assert 18 == len(results.rows)
    assert {"note"} == {finding.severity for finding in audit([results])}
    applied = {rule.name for rule in RULES if applicable(rule, results)}
    assert {
        "throughput-time",
        "flops-above-peak",
        "weights-above-memory",
        "memory-above-capacity",
        "does-not-divide",
        "layout-product",
        "batch-product",
        "equal-digits",
        "repeats-disagree",
        "blank-metric",
    } <= applied


def test_each_row_of_report_003_can_be_found_wrong():
    """The silence about report 003 is not blindness: a latency 5 % off is found in every row."""
    report = next(each for each in shipped() if each.report == "003")
    results = next(each for each in tables_of(report) if each.name == "003/results")
    for row in range(18):
        changed = with_cell(results, row, "latency", scaled(1.05)(text(results, row, "latency")))
        assert "throughput-time" in rules_of(changed), results.rows[row].name
