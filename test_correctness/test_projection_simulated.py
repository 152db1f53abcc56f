"""Where what things cost is known: steps of simulated devices, projected from kernels and from other steps there."""

from __future__ import annotations

import pytest

from benchmarks.projection_truth import compared
from test_correctness.helpers.simmusa_ranks import require_built

SECONDS = 0.0205
"""Most that a step's time may be off, relative: the clock is virtual, so that it is the same on every machine."""
EXACT = ("weights_gib", "gradients_gib", "optimizer_gib")
MEMORY = {"activations_gib": 0.11, "peak_gib": 0.13}


@pytest.mark.slow
def test_steps_of_simulated_devices_are_projected():
    require_built()
    calibration, cases = compared()
    assert ("in situ", True) == (calibration.regime, calibration.simulated)
    for case in cases:
        assert abs(case.time_error) <= SECONDS, case.name
        assert case.found.low_s <= case.truth.time_s <= case.found.high_s, case.name
        errors = case.memory_errors
        assert {*EXACT, *MEMORY} == set(errors)
        for name, error in errors.items():
            assert abs(error) <= MEMORY.get(name, 1e-3), (case.name, name)
