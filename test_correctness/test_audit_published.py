"""What the rules find in the published tables, table by table, and what they must leave alone there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfsuite.audit.audit import RULES, audit
from perfsuite.audit.read import tables_of
from perfsuite.published.lookup import shipped
from test_correctness.helpers.audit_tables import rules_of, scaled, table, text, with_cell

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
    "004/ring-attention": {"flops-above-peak"},
    "004/moe": {"mfu-throughput", "flops-above-peak", "mfu-peak", "speedup-above-n"},
    "004/3d": {"mfu-throughput", "does-not-divide", "flops-above-peak", "mfu-peak"},
    "004/5d": {"implied-parameters", "more-devices-than-there-are"},
    "004/weak": {"same-run-disagrees", "tables-differ"},
    "004/strong": {"flops-above-peak", "more-devices-than-there-are", "tables-differ"},
}


MPT = [
    "70b 2048 64 42.57 421.2583 8 4 2048 32 66523 1039 64862437376",
    "30b 8192 8 29.92 296.1077 1 21 168 1 11072 1384 30019254272",
    "30b 2048 32 43.92 434.6371 14 3 1344 36 73860 2308 29975214080",
    "30b 2048 16 43.07 426.1622 10 3 480 17 36209 2263 29975214080",
    "13b 32768 8 31.68 313.4795 1 3 24 0 15812 1976 13011240960",
    "7b 65536 8 28.59 282.9422 1 2 16 0 15654 1956 6918905856",
    "3b 32768 8 28.84 285.4036 3 6 144 1 46984 5873 2730480640",
    "3b 2048 64 40.8 403.7625 6 3 1152 703 1441663 22525 2651837440",
]
"""H100 rows of scripts/train/benchmarking/README.md in mosaicml/llm-foundry: rates are cut off, attention is most of
the work of long sequences, nothing says layers or width."""
HEADER = (
    "model sequence_length devices mfu:% tflops micro_batch_size num_micro_batches global_batch_size throughput "
    "tokens_per_s tokens_per_s_per_device parameters"
)
WITH_THROUGHPUT = table(HEADER, *MPT, peak_tflops="989.4", device="H100")
TOKENS = replace(
    WITH_THROUGHPUT, columns=tuple(column for column in WITH_THROUGHPUT.columns if column.name != "throughput")
)
SWEEP = table(
    "message_size communication_time:us algbw busbw",
    "1073741824 4029.4 266.48 466.33",
    "17179869184 62648 274.23 479.90",
    devices="8",
    collective="all_reduce",
)
"""Two sizes of test_correctness/samples/nccl-tests/all_reduce-8xH100.log."""
RUNS = table(
    "strategy parameters:B devices tflops training_time:days",
    *("ptd-p 174.6 384 153 84", "ptd-p 174.6 768 149 43", "ptd-p 174.6 1536 141 23"),
    *("ptd-p 529.6 560 171 156", "ptd-p 529.6 1120 167 80", "ptd-p 529.6 2240 159 42"),
    *("zero-3 174.6 384 144 90", "zero-3 174.6 768 88 74", "zero-3 174.6 1536 44 74"),
)
"""Constructed after Narayanan et al. 2021 (arXiv 2104.04473), table 2: the figures agree with each other."""
REAL = {
    "mpt": TOKENS,
    "nccl": SWEEP,
    "megatron": RUNS,
    **{each.name: each for report in shipped() for each in tables_of(report)},
}

CHANGED = [
    ("speedup-ratio", "004/ddp", 0, "throughput", 1.3),
    ("efficiency-ratio", "004/strong", 1, "efficiency", 0.7),
    ("throughput-time", "003/results", 0, "latency", 1.05),
    ("overhead-ratio", "004/ring-attention", 1, "throughput", 1.3),
    ("parts-above-whole", "000/time", 0, "data", 1.3),
    ("parts-below-whole", "000/time", 0, "step", 3.0),
    ("total-row", "004/5d", 0, "compute_time", 1.3),
    ("share-of-total", "004/5d", 0, "compute_time", 1.3),
    ("share-range", "004/router", 0, "all_to_all_time", 1.3),
    ("share-out-of-range", "004/ddp", 0, "mfu", 3.0),
    ("rates-disagree", "mpt", 2, "tokens_per_s_per_device", 32.0),
    ("tokens-above-peak", "mpt", 2, "tokens_per_s", 4.0),
    ("mfu-tokens", "mpt", 3, "mfu", 0.3),
    ("tflops-rate", "mpt", 3, "tflops", 0.2),
    ("mfu-tflops", "mpt", 3, "tflops", 0.8),
    ("mfu-tflops-peak", "mpt", 3, "mfu", 0.4),
    ("tflops-tokens", "mpt", 3, "tflops", 0.8),
    ("tflops-time", "megatron", 1, "training_time", 1.1),
    ("bandwidth-size", "nccl", 0, "algbw", 1.05),
    ("busbw-algbw", "nccl", 1, "busbw", 1.05),
    ("zero-figure", "003/results", 0, "latency", 0.0),
    ("memory-above-capacity", "003/results", 0, "memory", 3.0),
    ("layout-product", "003/cases", 0, "num_nodes", 3.0),
    ("batch-product", "001/latte-l", 0, "local_batch_size", 3.0),
    ("repeats-disagree", "003/results", 1, "latency", 1.3),
]
"""Rules that no published table breaks: a real one in which they hold, with a cell that is off by a factor."""


@pytest.mark.parametrize(("rule", "name", "row", "column", "factor"), CHANGED)
def test_a_changed_cell_of_a_real_table_is_found(rule, name, row, column, factor):
    real = REAL[name]
    changed = scaled(factor)(text(real, row, column))
    if next(each for each in real.columns if each.name == column).meaning.exact:
        changed = changed.partition(".")[0]
    assert rule not in rules_of(real)
    assert rule in rules_of(with_cell(real, row, column, changed))


def test_one_time_in_every_row_of_a_real_table_is_found():
    real = changed = REAL["001/latte-l"]
    for row, each in enumerate(real.rows):
        changed = with_cell(changed, row, "iterations_per_s", "1.52") if "iterations_per_s" in each.cells else changed
    assert "constant-measurement" not in rules_of(real)
    assert "constant-measurement" in rules_of(changed)


def test_every_rule_is_broken_by_a_real_table_or_by_one_changed_cell_of_it():
    shown = set().union(*EXPECTED.values(), {rule for rule, *_ in CHANGED}, {"constant-measurement"})
    assert {rule.name for rule in RULES} == shown


def test_a_real_table_of_language_models_is_plausible():
    # notes: the larger runs have the larger batches, and rates below 1 sample/s were cut off to 0
    assert {"speedup-above-n", "zero-figure"} >= rules_of(WITH_THROUGHPUT)
    assert set() == rules_of(SWEEP) | rules_of(RUNS)
    assert set() == rules_of(TOKENS)


def test_the_rules_find_what_is_wrong_with_each_published_table():
    found: dict[str, set[str]] = {}
    for report in shipped():
        for finding in audit(tables_of(report)):
            for name in finding.tables:
                found.setdefault(name, set()).add(finding.rule)
    assert EXPECTED == found


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
        ("004/schedules", "bubble-below-bound", ["22.4% is below the bound 27.3%", "12.7% is below the bound 15.8%"]),
        ("004/schedules", "1f1b-memory-grows", ["23 with 16 micro-batches and 19 with 8"]),
        ("004/stages", "bubble-falls-with-stages", ["28.5% with 2 stages to 8.7% with 16"]),
        ("004/tensor", "weights-above-memory", ["(175 GB in 16 bit); 42 GB", "(43.75 GB in 16 bit); 12 GB"]),
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
    report = next(each for each in shipped() if each.report == name[:3])
    told = [each for each in audit(tables_of(report)) if name in each.tables]
    found = "\n".join(each.message for each in told if each.rule == rule)
    assert [] == [each for each in numbers if each not in found]
