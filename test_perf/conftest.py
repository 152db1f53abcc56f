"""Options and fixtures of the suite that ships, beside those of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.base.units import GIB
from perfsuite.plugin.collect import scale_of
from perfsuite.plugin.state import suite_of
from perfsuite.published.recipes import find


def pytest_addoption(parser):
    add = parser.getgroup("perfsuite").addoption
    add("--perf-data", metavar="DIR", help="read data sets of your own, a folder for each model: docs/published.md")
    add(
        "--perf-loss-steps",
        type=int,
        metavar="N",
        help="train N steps for the loss of a published run; default: 20, of Latte 100",
    )
    add(
        "--perf-target-loss",
        type=float,
        metavar="LOSS",
        help="measure the time to this loss; default: 0.9 of Latte, none of others",
    )
    add(
        "--perf-memory-budget",
        metavar="SIZE",
        help="what a rank may allocate in test_largest_batch, e.g. 2GiB; default: 16MiB on a CPU, else the device",
    )


@pytest.fixture
def data_for(request):
    """Where the samples of a model come from: the user's folder for it, else files that perfsuite generates."""
    directory = request.config.getoption("perf_data")

    def find(model, otherwise="generated"):
        own = Path(directory).resolve() / model if directory else None
        return str(own) if own is not None and own.exists() else otherwise

    return find


@pytest.fixture
def as_published(request, data_for):
    """The training step of a recipe, by its name; with the user's own data, loss steps and target loss where given."""
    options = request.config.getoption
    asked = {"loss_steps": options("perf_loss_steps"), "target_loss": options("perf_target_loss")}
    chosen = {name: value for name, value in asked.items() if value is not None}

    def step(name):
        from perfsuite.workloads.training.train_step import TrainStep

        parameters = find(name).parameters
        data = data_for(parameters["model"], parameters.get("data", "synthetic"))
        return TrainStep(**{**parameters, "data": data, **chosen})

    return step


@pytest.fixture
def require_fit(request, platform):
    """Skip a training step that cannot fit on the devices of this case, whatever is spread over its ranks.

    Ranks on a CPU share the memory of their host; how many hosts a launcher has is not known here.
    """

    def require(step, world_size):
        from perfsuite.workloads.training.fits import why_not_fit

        memory_gib = platform.memory.value if platform.memory else None
        machine = suite_of(request.config).machine
        alone = suite_of(request.config).cluster is None
        shared = memory_gib is None and machine.family.shareable and platform.name == machine.name and alone
        if shared and machine.devices[0].memory_bytes:
            memory_gib = machine.devices[0].memory_bytes / GIB
        why_not = why_not_fit(step, world_size, platform.title, memory_gib, shared=shared)
        if why_not:
            pytest.skip(why_not)

    return require


@pytest.fixture
def scale(request, platform):
    """``full`` or ``small``: where a size alone does not say which of two models it is for."""
    return scale_of(platform, suite_of(request.config))
