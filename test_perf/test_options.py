"""Effect of each option on this machine: one case per setting, to compare with the case without it.

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
_COMPILED = [pytest.mark.perf_extended, pytest.mark.perf_timeout("15min")]
"""Marks of a case that compiles at its first run: 132 s on two idle cores, more than 15 minutes at a load of 20."""
BETWEEN_HOSTS = ("no-infiniband", "gpu-direct", "outer-interfaces")
"""Settings of the network, which do not affect ranks of one host: these use memory and local links."""
SETTINGS = (
    *("default", "ring", "tree", "simple", "large-buffers", "no-peers", "two-channels"),
    *BETWEEN_HOSTS,
)
every_rank = world_sizes(2, more="whole")


def why_not_on(hosts, word, world_size):
    """Return why a setting has no effect on this many hosts; empty if it has one."""
    if word not in BETWEEN_HOSTS or hosts > 1:
        return ""
    return (
        f"setting {word} acts between hosts only, and the {world_size} ranks of this case are on one host; start the "
        "run on two hosts (torchrun --nnodes=2 ...), whose case of all ranks measures it"
    )


@pytest.fixture
def environment(request, platform, ranks):
    """Return the variables that make the ranks' version of the communication library use this setting."""
    word, suite = request.param, suite_of(request.config)
    if word == "default" or suite.why_not(platform, ranks.world_size):  # that skip's reason comes first
        return {}
    family = suite.machine.family
    worker = suite.session.environment_now().get("worker") or {}
    backend = suite.settings.backend or family.backend
    try:
        variables = family.communication_setting(word, backend=backend, version=str(worker.get(backend, "")))
    except UnsupportedCase as reason:
        pytest.skip(str(reason))
    why_not = why_not_on(suite.hosts_of(ranks.world_size), word, ranks.world_size)
    if why_not:
        pytest.skip(why_not)
    return variables


# -- communication -----------------------------------------------------------------------------------------------


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@every_rank
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_overlap(perf, ranks, model, overlap, *, at_size, require_fit):
    """Gradients are sent during the backward, or all together after it."""
    case = at_size("ddp", {"overlap": overlap})
    workload = workloads.TrainStep(model=model, micro_batch_size=4, builds=("exposed",), **case)
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@every_rank
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression(perf, ranks, model, compression, *, at_size, require_fit):
    """Gradients are sent in half as many bytes."""
    workload = workloads.TrainStep(model=model, micro_batch_size=4, **at_size("ddp", {"compression": compression}))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@every_rank
@pytest.mark.parametrize("buckets", [1, 4, 16], ids="buckets{}".format)
def test_bucket_size(perf, ranks, model, buckets, *, at_size, require_fit):
    """Few large messages or many small ones: about this many buckets, of equal size."""
    from perfsuite.models import find  # collecting needs no models

    case = at_size("ddp", {"bucket_mib": 4 * find(model).parameters / buckets / MIB})
    workload = workloads.TrainStep(model=model, micro_batch_size=4, **case)
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@every_rank
@pytest.mark.parametrize("environment", SETTINGS, indirect=True)
def test_library_setting(perf, ranks, model, environment, *, at_size, require_fit):
    """Variables of the communication library, read at its start; those of the network need two hosts."""
    workload = workloads.TrainStep(model=model, environment=environment, micro_batch_size=4, **at_size("ddp"))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


# -- memory ------------------------------------------------------------------------------------------------------


@sizes(param="model", full=["gpt2"], small=["gpt2-tiny"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_checkpointing(perf, model, checkpointing, narrow, require_fit):
    """Cost and savings of computing activations again on one card."""
    workload = workloads.TrainStep(
        model=model, micro_batch_size=4, dtype=narrow, checkpointing=checkpointing, builds=("memory",)
    )
    require_fit(workload, 1)
    perf(workload)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@every_rank
@pytest.mark.parametrize("spread", SPREAD)
def test_sharding(perf, ranks, model, spread, *, at_size, require_fit):
    """Sharding over the cards: nothing, optimizer state, also gradients, also parameters."""
    workload = workloads.TrainStep(model=model, micro_batch_size=4, builds=("memory",), **at_size(*SPREAD[spread]))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@every_rank
@pytest.mark.parametrize(
    "offloaded", [pytest.param(name, marks=_COMPILED if "cpu-adam" in name else ()) for name in OFFLOADED]
)
def test_offload(perf, ranks, model, offloaded, platform, *, at_size, require_fit):
    """State in host memory; on a CPU that is the same memory, so only the cost of moving it remains."""
    if "cpu-adam" in offloaded and platform.family != "cpu":
        pytest.skip(f"on {platform.title} the case 'optimizer' steps by DeepSpeed's CPU Adam already")
    workload = workloads.TrainStep(
        model=model, micro_batch_size=4, builds=("memory",), **at_size(*OFFLOADED[offloaded])
    )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)
