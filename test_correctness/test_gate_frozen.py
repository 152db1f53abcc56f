"""The gate says of 2,000 simulated cases exactly what it said when benchmarks/gate_frozen.py stored it."""

import itertools

import pytest

from benchmarks.gate_frozen import FILE, Frozen, numbers

FEW = (0, 17, 10, 27, 4, 12, 37, 20, 25, 28, 52, 83, 139)
"""Scenes of 1 to 12 cases on every host, one of 30, and six that alone show one bound of the judge."""


def stored():
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {int(number): list(own) for number, own in itertools.groupby(lines, lambda line: line.partition("/")[0])}


@pytest.mark.parametrize("scenes", [FEW, pytest.param(tuple(numbers()), marks=pytest.mark.slow, id="all")])
def test_no_verdict_request_or_word_changed(scenes):
    lines = stored()
    assert numbers() == list(lines)
    for number in scenes:
        assert lines[number] == list(Frozen(number).lines())
