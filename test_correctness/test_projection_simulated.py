"""Where what things cost is known: steps of simulated devices, projected from kernels and from other steps there."""

from __future__ import annotations

import pytest

from benchmarks.projection_truth import compared
from test_correctness.helpers.simmusa_ranks import require_built

SECONDS = 0.02
"""Most that a step's time may be off, relative: the clock is virtual and the same on every machine."""
WHOLE = {"weights_gib": 1e-3, "gradients_gib": 1e-3, "optimizer_gib": 1e-3}
MEMORY = {**WHOLE, "activations_gib": 0.01, "peak_gib": 5e-3}
LLAMA = dict.fromkeys((*WHOLE, "activations_gib"), 5e-3)
TOPICS = {
    "dense": ({}, SECONDS, MEMORY),
    # Rings of keys, the kernels of each step and what adds their parts up; memory is another matter.
    "context parallelism": ({"meshes": ["cp2", "cp4"]}, SECONDS, {}),
    # Experts are started one by one there, and the host waits for routes; a token's few numbers of a router are not
    # counted.
    "experts": ({"model": "moe-tiny"}, 0.023, {**WHOLE, "activations_gib": 0.01}),
    # A LLaMA: torch's own attention repeats keys and values and keeps them so, and norms what their parts multiply.
    "shared keys": ({"model": "llama2-tiny"}, 0.026, LLAMA),
}
MORE_S = {"ddp on 2, 3 micro-batches": 0.055, "recomputed selectively": 0.03}
"""Of experts: beside DDP's accumulation of 3."""


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_steps_of_simulated_devices_are_projected(topic):
    require_built()
    arguments, seconds, memory = TOPICS[topic]
    calibration, cases = compared(**arguments)
    assert ("in situ", True) == (calibration.regime, calibration.simulated)
    for case in cases:
        limit = MORE_S.get(case.name, seconds) if topic == "experts" else seconds
        assert abs(case.time_error) <= limit, case.name
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name
        for name, most in memory.items():
            assert abs(case.memory_errors[name]) <= most, (case.name, name)


@pytest.mark.slow
def test_a_run_on_more_devices_than_were_calibrated_lies_in_its_band():
    require_built()
    calibration, cases = compared(world=16)
    assert (8, {16}) == (calibration.largest_world, {case.truth.world_size for case in cases})
    for case in cases:
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name
        assert abs(case.memory_errors["peak_gib"]) <= 0.01, case.name
