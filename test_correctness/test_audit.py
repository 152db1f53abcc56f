"""The plausibility rules: numbers as intervals, what each rule must flag and must not, tables of a consistent model."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.audit.audit import RULES, applicable, audit, derived_label, more_with
from perfsuite.audit.table import Fact, Row
from perfsuite.published.numbers import Interval, printed
from perfsuite.published.records import PARTS, ROLES
from test_correctness.helpers.audit_cases import CASES
from test_correctness.helpers.audit_tables import (
    pipeline_tables,
    rules_of,
    scaled,
    scaling_tables,
    significant,
    table,
    text,
    with_cell,
)

BY_NAME = {rule.name: rule for rule in RULES}

# ---- numbers ------------------------------------------------------------------------------------------------------


@given(st.decimals("1e-6", "1e9", places=8), st.integers(2, 9))
def test_a_printed_number_contains_what_was_rounded(value, digits):
    shown = significant(float(value), digits)
    interval = printed(shown).numbers[0].rounded
    # float() itself is off by a share of 2**-53
    assert interval.low <= Fraction(float(value)) * (1 + Fraction(1, 2**50))
    assert interval.high >= Fraction(float(value)) * (1 - Fraction(1, 2**50))


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6), st.integers(2, 8))
def test_rounded_quotients_and_products_meet_the_true_ones(a, b, digits):
    x, y = (printed(significant(value, digits)).numbers[0].rounded for value in (a, b))
    slack = Fraction(1, 2**45)
    quotient, true = x.over(y), Fraction(a) / Fraction(b)
    assert quotient.low * (1 - slack) <= true <= quotient.high * (1 + slack)
    product, true = x * y, Fraction(a) * Fraction(b)
    assert product.low * (1 - slack) <= true <= product.high * (1 + slack)


def test_division_by_what_may_be_zero_says_nothing():
    assert Interval.exactly(1).over(printed("0").numbers[0].interval) is None
    assert Interval.exactly(1).over(printed("0.4").numbers[0].interval) is not None


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("245 s/s", 245),
        ("1,812 s/s", 1812),
        ("1.95×", 1.95),
        ("18.9G", 18.9),
        ("406.16 (ms)", 406.16),
        ("1.05(环比)", 1.05),
        ("2.30e13", 2.3e13),
        ("-3.5", -3.5),
        ("0.000104736167192", 0.000104736167192),
        ("> 80 GB", None),
        ("OOM", None),
        ("-", None),
        ("", None),
        ("H100", None),
    ],
)
def test_numbers_in_cells(cell, expected):
    number = printed(cell).number()
    assert expected == (number and float(number.value))


def test_out_of_memory_is_read():
    assert all(printed(cell).out_of_memory for cell in ("OOM", "OOM (TP)", "无法运行", "out of memory"))
    assert not any(printed(cell).out_of_memory for cell in ("room", "45 GB"))


# ---- each rule ----------------------------------------------------------------------------------------------------


def test_every_rule_has_its_cases():
    assert list(BY_NAME) == [rule.name for rule in RULES], "two rules have one name"
    assert set(BY_NAME) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_rule_flags_what_it_must(name):
    rule, (flagged, _) = BY_NAME[name], CASES[name]
    groups = [flagged] if rule.across else [[each] for each in flagged]
    for tables in groups:
        found = [finding for finding in audit(tables) if finding.rule == name]
        assert found
        assert all((rule.severity, rule.label) == (finding.severity, finding.label) for finding in found)
        assert all(finding.message and finding.places for finding in found)
        if rule.label:
            places = [(place.table, place.row, place.column) for finding in found for place in finding.places]
            assert any(
                derived_label(found, table, row=row, column=column) == rule.label for table, row, column in places
            )


@pytest.mark.parametrize("name", CASES)
def test_rule_reads_and_leaves_alone_what_it_must(name):
    rule, (_, silent) = BY_NAME[name], CASES[name]
    assert any(applicable(rule, each) for each in silent)
    for tables in [silent] if rule.across else [[each] for each in silent]:
        assert name not in rules_of(*tables)


@pytest.mark.parametrize("name", CASES)
def test_rule_says_what_it_needs(name):
    rule, (flagged, _) = BY_NAME[name], CASES[name]
    assert all(role in ROLES for need in rule.roles for role in need.split("|"))
    assert any(applicable(rule, each) for each in flagged)
    assert not applicable(rule, table("case", "x"))
    assert rule.checks
    assert rule.source


def test_roles_that_help_equally_come_in_the_order_of_the_rules():
    gains = list(more_with([table("whole:ms config", "100 a")]))
    assert list(PARTS) == [role for role in gains if role in PARTS]


def test_a_missed_last_digit_is_a_note_and_costs_no_label():
    careless = table("devices speedup efficiency:%", "1 1.000 100.0", "4 3.200 80.1")
    (finding,) = audit([careless])
    assert ("efficiency-ratio", "note", None) == (finding.rule, finding.severity, finding.label)
    assert "the last digit" in finding.message
    assert "M" == derived_label([finding], "t")


def test_layers_and_width_without_a_length_leave_the_work_of_attention_unknown():
    """With 32768 tokens 156 TFLOPS are 18,130 tokens/s: 6 N are 6e8 FLOPs per token, attention's 12 L h S are 8e9."""
    facts = {"parameters": "100000000", "num_layers": "6", "hidden_size": "3392"}
    said = "devices tokens_per_s_per_device tflops loss"
    assert set() == rules_of(table(said, "1 18130 156 2.5", **facts))
    known = {**facts, "sequence_length": "32768"}
    assert set() == rules_of(table(said, "1 18130 156 2.5", **known))
    assert "tflops-rate" in rules_of(table(said, "1 18130 500 2.5", **known))


# ---- tables of a consistent model ---------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(scaling_tables())
def test_nothing_is_found_in_a_consistent_scaling_table(valid):
    assert [] == [f"{finding.rule}: {finding.message}" for finding in audit([valid])]
    assert 15 <= sum(applicable(rule, valid) for rule in RULES)


@settings(max_examples=40, deadline=None)
@given(scaling_tables(), st.data())
def test_nothing_is_found_in_any_columns_of_a_consistent_table(valid, data):
    """Above all in those of language models: rates and utilisation without a step time."""
    steps = {"latency", "iterations_per_s", "data_time", "forward_time", "backward_time", "optimizer_time"}
    figures = sorted({column.name for column in valid.columns if column.meaning.kind != "configuration"} - steps)
    kept = data.draw(st.sets(st.sampled_from(figures))) | {column.name for column in valid.of_kind("configuration")}
    kept |= steps if data.draw(st.booleans()) else set()
    known = data.draw(st.sets(st.sampled_from(sorted(valid.facts))))
    facts = {role: fact for role, fact in valid.facts.items() if role in known}
    part = replace(valid, columns=tuple(column for column in valid.columns if column.name in kept), facts=facts)
    assert [] == [f"{finding.rule}: {finding.message}" for finding in audit([part])]


@settings(max_examples=60, deadline=None)
@given(pipeline_tables())
def test_nothing_is_found_in_a_consistent_pipeline_table(valid):
    assert [] == [f"{finding.rule}: {finding.message}" for finding in audit([valid])]


ALL = ""
LANGUAGE = "devices global_batch_size tokens_per_s tokens_per_s_per_device mfu tflops loss"
"""Columns of a table of language models, which has no step time."""


@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize(
    ("rule", "kept", "column", "change"),
    [
        ("speedup-ratio", ALL, "speedup", scaled(1.3)),
        ("efficiency-ratio", ALL, "efficiency", scaled(0.7)),
        ("throughput-time", ALL, "throughput", scaled(1.37)),
        ("throughput-time", ALL, "latency", scaled(0.5)),
        ("mfu-throughput", ALL, "mfu", scaled(0.8)),
        ("mfu-peak", ALL, "mfu", scaled(0.2)),
        ("flops-above-peak", ALL, "tflops", lambda old: "400.0"),
        ("implied-parameters", ALL, "tflops", scaled(0.002)),
        ("share-out-of-range", ALL, "mfu", lambda old: "152.0"),
        ("weights-above-memory", ALL, "memory", scaled(0.0001)),
        ("memory-above-capacity", ALL, "memory", lambda old: "2000000"),
        ("rate-of-out-of-memory", ALL, "memory", lambda old: "OOM"),
        ("blank-metric", ALL, "loss", lambda old: "-"),
        ("rates-disagree", LANGUAGE, "tokens_per_s", scaled(1.3)),
        ("mfu-tokens", LANGUAGE, "mfu", scaled(0.3)),
        ("mfu-tflops", LANGUAGE, "mfu", scaled(0.8)),
        ("mfu-tflops-peak", LANGUAGE, "mfu", scaled(0.4)),
        ("tflops-tokens", LANGUAGE, "tflops", scaled(0.7)),
        ("tflops-rate", LANGUAGE, "tflops", scaled(0.3)),
        ("flops-above-peak", LANGUAGE, "tflops", scaled(20.0)),
    ],
)
@given(data=st.data())
def test_a_changed_cell_is_found_by_its_rule(rule, kept, column, change, data):
    valid = data.draw(scaling_tables())
    if kept:
        columns = tuple(each for each in valid.columns if each.name in kept.split())
        valid = replace(valid, columns=columns, facts={**valid.facts, "model": Fact(text="gpt")})
    row = data.draw(st.integers(1, len(valid.rows) - 1))
    assert rule in rules_of(with_cell(valid, row, column, change(text(valid, row, column))))


@settings(max_examples=8, deadline=None)
@given(valid=pipeline_tables(), data=st.data())
def test_a_bubble_below_its_bound_is_found(valid, data):
    row = data.draw(st.integers(0, len(valid.rows) - 1))
    assert "bubble-below-bound" in rules_of(with_cell(valid, row, "bubble", "0.5"))


CELL = st.one_of(
    st.sampled_from(
        ["", "0", "0.0", "-1", "1", "2", "64", "OOM", "-", "> 80 GB", "44.2/48.0", "100 %", "1F1B", "naive", "total"]
    ),
    st.sampled_from(["1e999999999", "9" * 400, "1.5e30", "1e-30", "٣", "１２", "１"]),
    st.decimals(-(10**6), 10**6, places=3).map(str),
    st.text(max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_table_can_be_audited(data):
    """Zeros, negative numbers, nonsense and missing cells in any roles: findings or none, never an exception."""
    needs = data.draw(st.sampled_from(RULES)).roles
    chosen = [data.draw(st.sampled_from(need.split("|"))) for need in needs]
    extra = data.draw(st.lists(st.sampled_from(list(ROLES)), max_size=5))
    roles = list(dict.fromkeys([*chosen, *extra]))
    facts = data.draw(st.dictionaries(st.sampled_from(list(ROLES)), CELL, max_size=5))
    rows = data.draw(st.lists(st.lists(CELL, min_size=len(roles), max_size=len(roles)), max_size=5))
    made = table(" ".join(roles))
    body = [
        Row(
            name=f"row {index}",
            index={"t": index},
            cells={role: printed(cell) for role, cell in zip(roles, row, strict=True)},
        )
        for index, row in enumerate(rows)
    ]
    made = replace(made, rows=tuple(body), facts={role: Fact(text=text) for role, text in facts.items()}, run_set="r")
    for finding in audit([made, replace(made, name="u")]):
        assert finding.message
        assert finding.places
