"""Where what things cost is known: steps of simulated devices, projected from kernels and from other steps there."""

from __future__ import annotations

import pytest

from benchmarks.projection_truth import compared
from test_correctness.helpers.simmusa_ranks import require_built

SECONDS = 0.02
"""Most that a step's time may be off, relative: the clock is virtual and the same on every machine."""
MEMORY = {"weights_gib": 1e-3, "gradients_gib": 1e-3, "optimizer_gib": 1e-3, "activations_gib": 0.01, "peak_gib": 5e-3}


@pytest.mark.slow
def test_steps_of_simulated_devices_are_projected():
    require_built()
    calibration, cases = compared()
    assert ("in situ", True) == (calibration.regime, calibration.simulated)
    for case in cases:
        assert abs(case.time_error) <= SECONDS, case.name
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name
        errors = case.memory_errors
        assert set(MEMORY) == set(errors)
        for name, error in errors.items():
            assert abs(error) <= MEMORY[name], (case.name, name)


@pytest.mark.slow
def test_steps_with_context_parallelism_are_projected():
    """Rings of keys, the kernels of each step and what adds their parts up; memory is another matter."""
    require_built()
    _, cases = compared(meshes=["cp2", "cp4"])
    for case in cases:
        assert abs(case.time_error) <= SECONDS, case.name
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name


@pytest.mark.slow
def test_steps_with_experts_are_projected():
    """Experts are started one by one there, and the host waits for routes; beside DDP's accumulation of 3."""
    require_built()
    _, cases = compared("moe-tiny")
    for case in cases:
        limits = {"ddp on 2, 3 micro-batches": 0.055, "recomputed selectively": 0.03}
        assert abs(case.time_error) <= limits.get(case.name, 0.023), case.name
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name
        errors = case.memory_errors
        assert max(abs(errors[name]) for name in ("weights_gib", "gradients_gib", "optimizer_gib")) <= 1e-3, case.name
        # A token's few numbers of a router are not counted.
        assert abs(errors["activations_gib"]) <= 0.01, case.name


@pytest.mark.slow
def test_steps_with_shared_keys_are_projected():
    """A LLaMA: torch's own attention repeats keys and values and keeps them so, and norms what their parts multiply."""
    require_built()
    _, cases = compared("llama2-tiny")
    for case in cases:
        assert abs(case.time_error) <= 0.026, case.name
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name
        assert max(abs(error) for name, error in case.memory_errors.items() if name != "peak_gib") <= 5e-3, case.name


@pytest.mark.slow
def test_a_run_on_more_devices_than_were_calibrated_lies_in_its_band():
    require_built()
    calibration, cases = compared(world=16)
    assert (8, {16}) == (calibration.largest_world, {case.truth.world_size for case in cases})
    for case in cases:
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name
        assert abs(case.memory_errors["peak_gib"]) <= 0.01, case.name
