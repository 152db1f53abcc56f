"""The constraints pin each package once on every Python that perfsuite says it runs on."""

import re
from collections import Counter

import pytest
from packaging.requirements import Requirement

from test_correctness.helpers.scripted_driver import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_is_pinned_once(python):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    assert {pin.name: 1 for pin in pins} == Counter(pin.name for pin in here)
    assert all(re.fullmatch(r"==[\d.]+", str(pin.specifier)) for pin in pins)


def test_the_oldest_of_them_is_the_one_that_the_package_asks_for():
    assert f'requires-python = ">={PYTHONS[0]}"' in (ROOT / "pyproject.toml").read_text()
