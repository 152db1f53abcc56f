"""Conversions, parsers and printers of bytes, seconds and rates."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base import units
from perfsuite.base.errors import ConfigurationError

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@given(st.integers(0, 2**60))
def test_bytes_survive_printing_and_parsing(count):
    assert count == units.parse_bytes(units.format_bytes(count))


@given(number=st.integers(0, 10**6), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " ", "  "]))
def test_a_size_is_its_number_times_its_unit_in_any_case(number, unit, space):
    for spelled in (unit, unit.lower(), unit.upper()):
        assert number * UNITS[unit] == units.parse_bytes(f" {number}{space}{spelled} ")


@given(quarters=st.integers(0, 10**6), unit=st.sampled_from(["KiB", "MiB", "GiB"]))
def test_fractions_of_a_unit_are_exact(quarters, unit):
    assert Fraction(quarters, 4) * UNITS[unit] == units.parse_bytes(f"{quarters // 4}.{quarters % 4 * 25:02}{unit}")


@given(st.integers(1, 2**50))
def test_the_printed_size_uses_the_largest_unit_that_divides_it(count):
    text = units.format_bytes(count)
    unit = text.lstrip("0123456789")
    larger = [size for size in UNITS.values() if size > UNITS[unit]]
    assert all(count % size for size in larger)


@pytest.mark.parametrize(
    "text", ["", "64", "64MB", "MiB", "1.5B", "0.0001KiB", "-1KiB", "1e3KiB", "1KiB/s", "½MiB", "0x10B"]
)
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(ConfigurationError) as raised:
        units.parse_bytes(text)
    assert repr(text) in str(raised.value)
    assert "\n" not in str(raised.value)


@given(
    number=st.integers(0, 10**6),
    unit=st.sampled_from([("", 1), ("s", 1), ("min", 60), ("h", 3600), ("ms", 1e-3), ("us", 1e-6)]),
)
def test_durations(number, unit):
    assert math.isclose(number * unit[1], units.parse_duration(f"{number}{unit[0]}"))


@pytest.mark.parametrize("text", ["", "s", "1d", "1 2", "-3s", "1e3", "3S", "nan"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigurationError, match="write for example '90s'"):
        units.parse_duration(text)


@given(st.floats(1e-9, 1e9))
def test_printed_seconds_are_right_to_four_digits(seconds):
    number, unit = units.format_seconds(seconds).split()
    assert math.isclose(seconds, float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit], rel_tol=6e-4)


@given(count=st.floats(1, 1e15), seconds=st.floats(1e-6, 1e6))
def test_rates_are_powers_of_ten_and_memory_powers_of_two(count, seconds):
    assert math.isclose(units.gb_per_s(count, seconds) * seconds, count * 1e-9)
    assert math.isclose(units.tflops(count, seconds) * seconds, count * 1e-12)
    assert math.isclose(units.seconds_to_us(seconds), seconds * 1_000_000)
    assert math.isclose(units.gib(count) * 1024 * 1024 * 1024, count)


def test_a_column_of_rates_has_the_unit_of_its_median_and_one_of_nothing_keeps_its_own():
    assert units.readable_rate([0.2, 3.0, 500.0], "TFLOPS") == ("TFLOPS", 1.0)
    assert units.readable_rate([], "GB/s") == ("GB/s", 1.0)
