"""What parameters may be: equal and of the same type on the rank, told apart in records, named in ids, else refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.codec import to_json
from perfsuite.record.workload import FunctionWorkload
from perfsuite.runtime.values import Holder, decode, encode, recorded, refer, resolve, token
from test_correctness.helpers import steps
from test_correctness.helpers.scripted_driver import ROOT, repository

HOLDER = Holder(rootpath=ROOT, test_module=__name__)


class Way(enum.Enum):
    UP = "up"
    DOWN = "down"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    rows: int
    columns: int = 3
    way: Way = Way.UP
    dtype: torch.dtype = torch.float32
    inner: Shape | None = None
    area: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "area", self.rows * self.columns)


@dataclasses.dataclass(frozen=True)
class Forgets:
    seed: dataclasses.InitVar[int]


@dataclasses.dataclass(frozen=True, eq=False)
class OnlyItself:
    rows: int = 1


class Word(str):
    pass


def function(rank):
    pass


def types_of(value):
    """The type of every part."""
    if isinstance(value, dict):
        return type(value), [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    return type(value)


def on_the_rank(value):
    return decode(json.loads(json.dumps(encode(value, HOLDER, "step(value=...)"))))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
SPECIAL = st.sampled_from(
    [Way.DOWN, Level.LOW, Access.READ, Access.READ | Access.WRITE, torch.bfloat16, Point(1), function, Way, int]
) | st.builds(Shape, rows=st.integers(), dtype=st.sampled_from([torch.float64, torch.int8]))
KEYS = st.recursive(SCALARS | SPECIAL, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
VALUES = st.recursive(
    SCALARS | SPECIAL,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50)  # a twentieth of a second each
@given(VALUES)
def test_a_value_arrives_equal_and_of_the_same_type(value):
    assert value == on_the_rank(value)
    assert types_of(value) == types_of(on_the_rank(value))


@given(VALUES)
def test_a_record_is_plain_json(value):
    assert recorded(value) == json.loads(json.dumps(recorded(value)))


JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(JSON)
def test_plain_json_is_recorded_as_ever(value):
    assert value == to_json(value) == recorded(value)  # journals and baselines of earlier versions still match


def test_what_json_cannot_say_arrives_as_well():
    assert math.isnan(on_the_rank(math.nan))
    assert on_the_rank(-math.inf) == -math.inf
    assert on_the_rank(Shape(rows=2, inner=Shape(rows=3))).inner.area == 9
    assert on_the_rank(torch.channels_last) is torch.channels_last


@pytest.mark.parametrize(
    ("value", "record", "id"),
    [
        ({1: 2}, [[1, 2]], None),
        ({"1": 2}, {"1": 2}, None),
        (Way.UP, "Way.UP", None),
        (Level.LOW, "Level.LOW", None),
        (torch.bfloat16, "torch.bfloat16", "bfloat16"),
        (Point(1), {"Point": {"x": 1, "y": 0.0}}, "Point(x=1,y=0.0)"),
        (
            Shape(rows=2, way=Way.DOWN, dtype=torch.int8),
            {"Shape": {"rows": 2, "columns": 3, "way": "Way.DOWN", "dtype": "torch.int8", "inner": None}},
            "Shape(rows=2,way=DOWN,dtype=int8)",
        ),
        (Shape(rows=1, inner=Shape(rows=2)), None, "Shape(rows=1,inner=Shape(rows=2))"),
        (function, f"{__name__}:function", None),
        (Point((1, [2])), {"Point": {"x": [1, [2]], "y": 0.0}}, "Point(x=[1,[2]],y=0.0)"),  # type: ignore[arg-type]
        (Point(function), None, "Point(x=function,y=0.0)"),  # type: ignore[arg-type]
        (Point(torch.ones(2)), None, None),  # type: ignore[arg-type]
        (Point([object()]), None, None),  # type: ignore[arg-type]
        ((1, [2]), [1, [2]], None),
    ],
)
def test_records_and_ids_say_what_it_was(value, record, id):
    assert record is None or record == recorded(value)
    assert id == token(value)


def local():
    class Hidden(enum.Enum):
        MEMBER = 1

    @dataclasses.dataclass(frozen=True)
    class Local:
        rows: int = 1

    return Hidden.MEMBER, Local()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "step(value=...) is a object, which cannot be sent to the ranks; pass numbers, strings, "),
        (Path("x"), "step(value=...) is a PosixPath, which cannot be sent"),
        ({1, 2}, "step(value=...) is a set, which cannot be sent"),
        (b"x", "step(value=...) is a bytes, which cannot be sent"),
        (torch.ones(1), "step(value=...) is a Tensor, which cannot be sent"),
        (torch.ones(2).numpy()[0], "step(value=...) is a float32, which cannot be sent"),
        (Word("x"), "step(value=...) is a Word, which cannot be sent"),
        (OrderedDict(a=1), "step(value=...) is a OrderedDict, which cannot be sent"),
        ([{"a": object()}], "step(value=...) is a object, which cannot be sent"),
        (functools.partial(function), "step(value=...) is a partial, which cannot be sent"),
        ("x".upper, "step(value=...) is a builtin_function_or_method, which cannot be sent"),
        (HOLDER.name, "step(value=...) is a method, which cannot be sent"),
        (lambda: 1, "step(value=...): <lambda> of "),
        (local()[0], "step(value=...): local.<locals>.Hidden of "),
        (local()[1], "step(value=...): local.<locals>.Local of "),
        (dataclasses.replace(Shape(rows=1), way=object()), "step(value=...).way is a object, which cannot be sent"),  # type: ignore[arg-type]
        (OnlyItself(), "step(value=...) is a OnlyItself that cannot be rebuilt from its fields (the new one is not"),
        (Forgets(seed=1), "step(value=...) is a Forgets that cannot be rebuilt from its fields (TypeError: "),
    ],
)
def test_anything_else_is_refused_with_one_line(value, message):
    with pytest.raises(InvalidParameter) as refused:
        encode(value, HOLDER, "step(value=...)")
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_the_error_names_function_and_parameter():
    workload = FunctionWorkload(function=steps.add_up, arguments={"by_stage": {1: 2}, "thing": object()})
    with pytest.raises(InvalidParameter, match=r"^add_up\(thing=\.\.\.\) is a object, which cannot be sent"):
        refer(workload, ROOT)
    kept = FunctionWorkload(function=steps.add_up, arguments={"by_stage": {1: 2}})
    assert kept == resolve(json.loads(json.dumps(refer(kept, ROOT))))


def test_ids_name_dataclasses_and_dtypes_of_perf_cases_alone(pytester, monkeypatch):
    tests = """
import enum
from typing import NamedTuple
import pytest, torch

class Way(enum.Enum):
    UP = "up"

class Point(NamedTuple):
    x: int

VALUES = pytest.mark.parametrize("value", [Way.UP, Point(1), Product(side=8), torch.bfloat16])

@VALUES
def test_mine(perf, value):
    assert perf(step, value=value, by_stage={1: 2}).parameters["by_stage"] == [[1, 2]]

@VALUES
def test_theirs(value):
    pass
"""
    repo = repository(pytester, monkeypatch, tests)
    mine, theirs = (repo.run("--collect-only", "-q", "-k", name).outlines[:4] for name in ("mine", "theirs"))
    assert [
        "test_it.py::test_mine[cpu-Way.UP]",
        "test_it.py::test_mine[cpu-Point(x=1)]",
        "test_it.py::test_mine[cpu-Product(side=8)]",
        "test_it.py::test_mine[cpu-bfloat16]",
    ] == mine
    assert ["test_it.py::test_theirs[Way.UP]", "test_it.py::test_theirs[value1]"] == theirs[:2]
    found = repo.run(
        "test_it.py::test_mine[cpu-Product(side=8)]", "test_it.py::test_mine[cpu-Way.UP]", "--perf-journal=j"
    )
    found.assert_outcomes(passed=2)
    resumed = repo.run("-k", "mine", "--perf-resume=j")
    resumed.assert_outcomes(passed=4)
    assert 4 == len(repo.driver.jobs)  # the two that the journal has are not run again
