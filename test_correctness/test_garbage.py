"""The search for garbage is put off and comes back, whatever happens in between."""

from __future__ import annotations

import gc

import pytest

from perfsuite.base import garbage


@pytest.fixture(autouse=True)
def search():
    yield
    gc.enable()


@garbage.kept()
def searched() -> bool:
    with garbage.kept():
        pass
    return gc.isenabled()


def test_nothing_is_searched_inside_and_everything_after():
    assert not searched()
    assert gc.isenabled()
    with pytest.raises(KeyError), garbage.kept():
        raise KeyError
    assert gc.isenabled()


def test_who_never_searches_does_not_afterwards():
    gc.disable()
    assert not searched()
    assert not gc.isenabled()
