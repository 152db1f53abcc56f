"""The cases of model parallelism at both scales: every one is legal on its ranks, and is the run that a report has."""

import inspect
from types import SimpleNamespace

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.published.lookup import lookup
from perfsuite.runtime.values import recorded
from test_perf import test_long_sequences, test_meshes, test_oneflow, test_tensor_parallel

SCALES = ("full", "small")


def taken(test, **arguments):
    """What a test of the suite hands to perf: the workload and its number of ranks."""
    handed = []
    if "require_fit" in inspect.signature(test).parameters:
        arguments["require_fit"] = lambda step, ranks: None
    test(lambda workload, on: handed.append((workload, getattr(on, "world_size", on))), **arguments)
    (workload, ranks) = handed[0]
    shape = MeshShape.parse(workload.mesh)
    assert shape.world_size == ranks
    assert workload.work(shape).flops["exact"] > 0
    return workload, ranks


def sizes(test, scale):
    (mark,) = (mark for mark in test.pytestmark if mark.name == "perf_sizes")
    return mark.kwargs[scale]


def choices(test):
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return [getattr(choice, "values", (choice,))[0] for choice in mark.args[1]]


@pytest.mark.parametrize("scale", SCALES)
def test_cases_of_meshes_have_one_batch_on_every_mesh(scale):
    test = test_meshes.test_meshes
    found = [taken(test, mesh=mesh, scale=scale) for mesh in sizes(test, scale)]
    batches = {
        (workload.model, ranks, workload.work(MeshShape.parse(workload.mesh)).samples) for workload, ranks in found
    }
    assert len(batches) == len({ranks for _, ranks in found})
    for mesh in sizes(test_meshes.test_components, scale):
        assert "traffic" in taken(test_meshes.test_components, mesh=mesh)[0].builds


@pytest.mark.parametrize("scale", SCALES)
def test_lengths_have_one_batch_every_way(scale):
    for test, name in (
        (test_long_sequences.test_long_sequences, "way"),
        (test_long_sequences.test_attention, "method"),
    ):
        for length in sizes(test, scale):
            found = [taken(test, length=length, scale=scale, **{name: way})[0] for way in choices(test)]
            works = [workload.work(MeshShape.parse(workload.mesh)) for workload in found]
            assert 1 == len({(work.samples, work.tokens / work.samples) for work in works})
            assert works[0].tokens / works[0].samples == length


@pytest.mark.parametrize("scale", SCALES)
def test_tensor_parallel_cases_are_legal(scale):
    test = test_tensor_parallel.test_tensor_parallel
    for model in sizes(test, scale):
        for count in (1, 2, 4, 8):
            workload, _ = taken(test, ranks=SimpleNamespace(world_size=count), model=model)
            assert workload.find_model().layers == {"gpt3-175b": 8, "gpt3-13b": 40, "gpt2-tiny": 1}[model]
    for features in sizes(test_tensor_parallel.test_column_and_row, scale):
        sides = tuple(map(int, features.split("x")))
        for split in choices(test_tensor_parallel.test_column_and_row):
            workload, ranks = taken(test_tensor_parallel.test_column_and_row, features=sides, split=split)
            found = lookup("a100", "tensor_linear", recorded(workload.parameters()), ranks, metric="step_time_s")
            assert len(found) == (scale == "full" and split in ("none", "column", "row"))


@pytest.mark.parametrize("scale", SCALES)
def test_oneflow_cases_are_what_their_names_say_and_the_reports_are_found(scale):
    for case in sizes(test_oneflow.test_oneflow, scale):
        workload, ranks = taken(test_oneflow.test_oneflow, case=case, scale=scale)
        told = recorded(workload.parameters())
        found = [figure.name for figure in lookup("v100", "train_step", told, ranks, metric="step_time_s")]
        name, _, attention = case.partition("-")
        assert workload.attention == (attention or "auto")
        assert (name in found) == (scale == "full"), (name, found)
        model = workload.find_model()
        if scale == "full":
            tp = MeshShape.parse(workload.mesh).size("tp")
            assert (model.tokens_per_sample, model.vocabulary % (128 * tp), workload.dtype) == (2048, 0, "fp16")
        assert name.endswith(f"_{workload.global_batch_size}_{model.width}x{model.layers}")
