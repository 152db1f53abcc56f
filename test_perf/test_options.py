"""What each option buys on this machine: one case per setting, to be read beside the case without it.

Communication: compression, overlap, size of the buckets, variables of the library.  Memory: computing activations
again, moving state to the host, spreading it.
"""

from __future__ import annotations

import pytest

from perfsuite import sizes, workloads, world_sizes
from perfsuite.base.errors import UnsupportedCase
from perfsuite.base.units import MIB
from perfsuite.plugin.state import suite_of

SPREAD = {
    "whole": ("ddp", {}),
    "optimizer": ("zero_redundancy", {}),
    "gradients": ("fsdp", {"reshard": False}),
    "parameters": ("fsdp", {"reshard": True}),
}
OFFLOADED = {
    "on-device": ("fsdp", {}),
    "all": ("fsdp", {"offload": True}),
    "optimizer": ("zero2", {"offload_optimizer": True}),
    "optimizer-cpu-adam": ("zero2", {"offload_optimizer": True, "cpu_adam": True}),
}
_COMPILED = [pytest.mark.extended, pytest.mark.perf_timeout("15min")]
"""Marks of what is compiled when it first runs: 132 s on two quiet cores, more than 15 minutes beside a load of 20."""
_SETTING_RANKS = 2
SETTINGS = (
    *("default", "ring", "tree", "simple", "large-buffers", "no-peers", "two-channels"),
    *("no-infiniband", "gpu-direct", "outer-interfaces"),
)


@pytest.fixture
def environment(request, platform):
    """Variables that make the communication library, in the version that ranks load, use this setting."""
    word, suite = request.param, suite_of(request.config)
    if word == "default" or suite.why_not(platform, _SETTING_RANKS):  # the reason of that skip comes first
        return {}
    family = suite.machine.family
    worker = suite.session.environment_now().get("worker") or {}
    backend = suite.settings.backend or family.backend
    try:
        return family.communication_setting(word, backend=backend, version=str(worker.get(backend, "")))
    except UnsupportedCase as reason:
        pytest.skip(str(reason))


# -- communication -----------------------------------------------------------------------------------------------


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(2)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_overlap(perf, ranks, model, overlap):
    """Gradients travel while the backward goes on, or all together after it."""
    options = {"overlap": overlap}
    workload = workloads.TrainStep(
        model=model, strategy="ddp", options=options, micro_batch_size=4, builds=("exposed",)
    )
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(2)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression(perf, ranks, model, compression):
    """Gradients travel in half as many bytes."""
    options = {"compression": compression}
    perf(workloads.TrainStep(model=model, strategy="ddp", options=options, micro_batch_size=4), on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(2)
@pytest.mark.parametrize("buckets", [1, 4, 16], ids="buckets{}".format)
def test_bucket_size(perf, ranks, model, buckets):
    """A few large messages or many small ones: about this many buckets, of equal size."""
    from perfsuite.models import find  # collecting needs no models

    options = {"bucket_mib": 4 * find(model).parameters / buckets / MIB}
    perf(workloads.TrainStep(model=model, strategy="ddp", options=options, micro_batch_size=4), on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(_SETTING_RANKS)
@pytest.mark.parametrize("environment", SETTINGS, indirect=True)
def test_library_setting(perf, ranks, model, environment):
    """Variables of the communication library, read when it starts; those of the network act between hosts alone."""
    workload = workloads.TrainStep(model=model, strategy="ddp", environment=environment, micro_batch_size=4)
    perf(workload, on=ranks)


# -- memory ------------------------------------------------------------------------------------------------------


@sizes(param="model", full=["gpt2"], small=["gpt2-tiny"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_checkpointing(perf, model, checkpointing):
    """What computing activations again costs and saves on one card."""
    perf(workloads.TrainStep(model=model, micro_batch_size=4, checkpointing=checkpointing, builds=("memory",)))


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(2)
@pytest.mark.parametrize("spread", SPREAD)
def test_sharding(perf, ranks, model, spread):
    """What is spread over the cards: nothing, optimizer state, gradients too, parameters too."""
    strategy, options = SPREAD[spread]
    perf(
        workloads.TrainStep(model=model, strategy=strategy, options=options, micro_batch_size=4, builds=("memory",)),
        on=ranks,
    )


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(2)
@pytest.mark.parametrize(
    "offloaded", [pytest.param(name, marks=_COMPILED if "cpu-adam" in name else ()) for name in OFFLOADED]
)
def test_offload(perf, ranks, model, offloaded, platform):
    """State that lives in host memory; on a CPU that is the same memory, and what is left is the cost of moving it."""
    if "cpu-adam" in offloaded and platform.family != "cpu":
        pytest.skip(f"on {platform.title} the case 'optimizer' steps by DeepSpeed's CPU Adam already")
    strategy, options = OFFLOADED[offloaded]
    perf(
        workloads.TrainStep(model=model, strategy=strategy, options=options, micro_batch_size=4, builds=("memory",)),
        on=ranks,
    )
