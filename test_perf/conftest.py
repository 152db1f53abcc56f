"""Fixtures of the suite that ships; its options are in perfsuite/plugin/published.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from perfsuite.base.units import GIB
from perfsuite.plugin.collect import scale_of
from perfsuite.plugin.fixtures import state_key
from perfsuite.plugin.state import suite_of
from perfsuite.published.recipes import find


@pytest.fixture
def data_for(request):
    """Return a function that finds a model's samples: the user's folder for it, else files that perfsuite generates."""
    directory = request.config.getoption("perf_data")

    def find(model, otherwise="generated"):
        own = Path(directory).resolve() / model if directory else None
        return str(own) if own is not None and own.exists() else otherwise

    return find


@pytest.fixture
def as_published(request, data_for):
    """Return a function that makes a recipe's training step, with the user's data, loss steps and target loss."""
    options = request.config.getoption
    asked = {"loss_steps": options("perf_loss_steps"), "target_loss": options("perf_target_loss")}
    chosen = {name: value for name, value in asked.items() if value is not None}

    def step(name):
        from perfsuite.workloads.training.train_step import TrainStep

        parameters = find(name).parameters
        data = data_for(parameters["model"], parameters.get("data", "synthetic"))
        return TrainStep(**{**parameters, "data": data, **chosen, "program": as_given(parameters, data)})

    return step


def as_given(parameters, data):
    """Return the training program of a recipe, without its encoders if the user's data are encoded already."""
    from perfsuite.models.dataset import part_names

    program = dict(parameters.get("program", {}))
    if "latents" in part_names(Path(data)):
        program.pop("encoders", None)
    return program


@pytest.fixture
def require_fit(request, platform):
    """Return a function that skips a training step that does not fit on the case's devices by estimate.
    Ranks on a CPU share the memory of their host; the number of a launcher's hosts is unknown here.  In a run that
    projects the case keeps the reason and its projection instead.
    """

    def require(step, world_size):
        from perfsuite.workloads.training.train_step import why_not_fit

        suite, device = suite_of(request.config), platform
        machine = suite.machine
        here = platform.name == machine.name
        shared = here and platform.memory is None and machine.family.shareable and suite.cluster is None
        found_gib = (machine.devices[0].memory_bytes or 0) / GIB if machine.devices and here else 0
        if machine.simulated and here and found_gib and platform.memory:
            device = dataclasses.replace(platform, memory=dataclasses.replace(platform.memory, value=found_gib))
        why_not = why_not_fit(step, world_size, device, found_gib if shared else None)
        if why_not and suite.projects:
            request.node.stash[state_key].unfit = why_not
        elif why_not:
            pytest.skip(why_not)

    return require


@pytest.fixture
def scale(request, platform):
    """Return ``full`` or ``small``, for cases whose size alone does not decide between two models."""
    return scale_of(platform, suite_of(request.config))


@pytest.fixture
def narrow(request, platform, scale):
    """Return the dtype of training: fp32 at the small scale, else bf16, or fp16 if the device has no bf16."""
    if scale == "small":
        return "fp32"
    machine = suite_of(request.config).machine
    dtypes = {*platform.tflops, *platform.native}
    for dtype in ("bf16", "fp16"):
        if machine.natively(dtype) if platform.name == machine.name else dtype in dtypes or not dtypes:
            return dtype
    return "fp32"


@pytest.fixture
def at_size(scale, narrow):
    """Return a function that makes a training step's settings at this scale: a strategy with its options, and more.
    Small steps keep their settings.  At full size products are in 16 bits, FSDP gathers in 16 bits, and activations are
    computed again unless ``checkpointing`` says otherwise, so that a model fits on the cards of the reports.
    """

    def settings(strategy, options=None, checkpointing="full"):
        small = {"strategy": strategy, "options": options or {}}
        if scale == "small":
            return small
        mixed = {"mixed_precision": True} if strategy == "fsdp" else {}
        return {**small, "options": {**small["options"], **mixed}, "dtype": narrow, "checkpointing": checkpointing}

    return settings
