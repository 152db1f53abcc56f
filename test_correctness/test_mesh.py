"""Mesh shapes: names and sizes of axes, and where ranks stand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import AXES, MeshShape

SETTINGS = settings(max_examples=50, deadline=None)


@st.composite
def shapes(draw):
    """Shapes of up to four axes, given in any order."""
    without = draw(st.sampled_from([{"dp"}, {"dp_replicate", "dp_shard"}]))
    names = draw(st.lists(st.sampled_from([axis for axis in AXES if axis not in without]), unique=True, max_size=4))
    return MeshShape(axes=tuple((name, draw(st.integers(1, 4))) for name in names))


@SETTINGS
@given(shapes())
def test_a_shape_survives_printing_and_parsing(shape):
    assert shape == MeshShape.parse(str(shape))
    assert shape == MeshShape.of(**dict(shape.axes))
    assert math.prod(shape.sizes) == shape.world_size


@SETTINGS
@given(shapes(), st.randoms(use_true_random=False))
def test_the_order_of_axes_does_not_depend_on_how_they_were_given(shape, random):
    shuffled = list(shape.axes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert shape == MeshShape(axes=tuple(shuffled))
    assert sorted(shape.names, key=AXES.index) == list(shape.names)


@SETTINGS
@given(shapes())
def test_ranks_are_numbered_like_a_row_major_array(shape):
    array = np.arange(shape.world_size).reshape(shape.sizes)
    for index in np.ndindex(*shape.sizes):
        coordinates = dict(zip(shape.names, index, strict=True))
        assert int(array[index]) == shape.rank_of(coordinates)
        assert coordinates == shape.coordinates(int(array[index]))


@SETTINGS
@given(shapes(), st.data())
def test_groups_partition_the_ranks(shape, data):
    axes = data.draw(st.lists(st.sampled_from(AXES), unique=True))
    groups = {shape.group(rank, *axes) for rank in range(shape.world_size)}
    assert list(range(shape.world_size)) == sorted(itertools.chain(*groups))
    size = math.prod(shape.size(axis) for axis in axes)
    assert {size} == {len(group) for group in groups}
    for group in groups:
        assert list(group) == sorted(group)
        fixed = [{name: at for name, at in shape.coordinates(rank).items() if name not in axes} for rank in group]
        assert all(each == fixed[0] for each in fixed)


def test_axes_that_a_shape_lacks_have_size_one():
    assert 1 == MeshShape.of(dp=4).size("tp")
    assert 1 == MeshShape.parse("1").world_size
    assert "1" == str(MeshShape.of())
    assert 2 == MeshShape.of(dp=4).rank_of({"dp": 2})
    assert 0 == MeshShape.of(dp=4, tp=2).rank_of({})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshShape.parse("dp"), "'dp' is not an axis followed by its size"),
        (lambda: MeshShape.parse(""), "write for example 'dp2-tp4'"),
        (lambda: MeshShape.parse("dp2--tp2"), "'' is not an axis followed by its size"),
        (lambda: MeshShape.parse("dp2-xy2"), "'xy' is unknown; choose from pp, dp,"),
        (lambda: MeshShape.of(dp=0), "size 0; a size is at least 1"),
        (lambda: MeshShape.parse("dp2-dp2"), "name one axis twice"),
        (lambda: MeshShape.of(dp=2, dp_shard=2), "either dp, or dp_replicate and dp_shard"),
        (lambda: MeshShape.of(dp=2).coordinates(2), "rank 2 is not in mesh dp2; it has ranks 0 to 1"),
        (lambda: MeshShape.of(dp=2).coordinates(-1), "rank -1 is not in mesh"),
        (lambda: MeshShape.of(dp=2).rank_of({"dp": 2}), "dp=2 is not in mesh dp2; choose 0 to 1"),
    ],
)
def test_impossible_shapes_say_what_to_choose(make, message):
    assert callable(make)
    with pytest.raises(InvalidParameter, match=message):
        make()
