"""Calibration out of stored results: constants of a known device, what is missing, and what never mixes."""

import dataclasses

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.mesh import MeshShape
from perfsuite.baselines import store
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.summarise import case_of
from perfsuite.cli.calibrate import read_observations
from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Calibration, read_calibration
from perfsuite.projection.calibration_of import OTHER_SOFTWARE, calibrate, command_for, require_kind, software_flag
from perfsuite.projection.device_constants import collective_lines, constants_of, kernel_points
from perfsuite.projection.observation import Observation
from perfsuite.record.codec import to_json
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.runtime.values import describe, recorded
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers import measurements
from test_correctness.helpers.command_line import as_json, printed, refused
from test_correctness.helpers.observations import (
    ALPHA_US,
    BUSBW,
    GB_PER_S,
    KERNEL_US,
    TFLOPS,
    beside,
    copied,
    kernels,
    product,
    reduced,
    seen,
    steps,
)
from test_correctness.helpers.scripted_driver import measurement
from test_correctness.helpers.stored_files import HARDWARE, run_of
from test_correctness.test_tables_command import journal as written

CATALOG = load_catalog()


def calibrated(observations):
    (made,) = calibrate(observations, CATALOG)
    return made


def test_constants_of_a_known_device_come_back():
    known = calibrated(kernels()).calibration.constants
    assert pytest.approx(TFLOPS, rel=1e-9) == known["matmul_bf16_tflops"].value
    assert pytest.approx(GB_PER_S, rel=1e-9) == known["memory_gb_per_s"].value
    assert pytest.approx(KERNEL_US, rel=1e-6) == known["kernel_us"].value
    assert pytest.approx(BUSBW, rel=1e-6) == known["link_gb_per_s"].value
    assert pytest.approx(ALPHA_US / (2 * 7), rel=1e-6) == known["link_us"].value
    assert "test_matmul[8192]" in known["matmul_bf16_tflops"].source


def test_units_that_idle_are_told_from_the_rate():
    wave, products = 2e6, [product(side) for side in (1024, 2048, 4096, 8192)]
    slower = [
        dataclasses.replace(one, time_s=one.time_s + wave / one.parameters["m"] ** 2 * (one.time_s - KERNEL_US * 1e-6))
        for one in products
    ]
    known = calibrated([*kernels()[3:], *slower]).calibration.constants
    assert pytest.approx(wave, rel=1e-3) == known["wave_outputs"].value
    smallest = min(slower, key=lambda one: one.parameters["m"])
    late = [dataclasses.replace(one, time_s=5 * one.time_s) if one is smallest else one for one in slower]
    noisy = calibrated([*kernels()[3:], *late]).calibration.constants["wave_outputs"]
    assert "test_matmul" in noisy.source
    assert wave < noisy.value < 3 * wave
    assert pytest.approx(TFLOPS, rel=1e-3) == known["matmul_bf16_tflops"].value


def test_cores_have_no_units_that_idle():
    assert Calibration.from_platform(CATALOG.find("cpu")).value("wave_outputs") == 0.0


def test_what_is_bound_by_the_host_or_in_the_cache_tells_nothing():
    assert kernel_points([product(1024, launch_s=1.0)]) == ()
    cached = constants_of([copied(1 << 20, cache_bytes=1 << 20)], ())["memory_gb_per_s"]
    assert (0.5, True) == (cached.relative_error, "within 4 x the cache" in cached.source)


def test_of_two_kernels_for_one_shape_the_faster_counts():
    given = {"batch_size": 2, "heads": 8, "kv_heads": 8, "sequence_length": 512, "head_width": 64, "dtype": "bf16"}
    slow, fast = (seen("Attention", time_s, f"a[{time_s}]", parameters=given) for time_s in (2e-3, 1e-3))
    (point,) = kernel_points([slow, fast])
    assert (1e-3, "attention_forward", (2, 512, 8, 8, 64)) == (point.time_s, point.kind, point.shape)


@pytest.mark.parametrize(
    ("mesh", "axis", "hosts", "stands"),
    [("dp2-tp4", "tp", 1, (4, 1, 1, 2)), ("dp2-tp4", "dp", 1, (2, 1, 4, 4)), ("dp2-tp4", "dp", 2, (2, 2, 4, 4))],
)
def test_groups_along_an_axis_have_lines_of_their_own(mesh, axis, hosts, stands):
    cases = [
        dataclasses.replace(
            reduced(size, hosts=hosts),
            kind="AxisCollective",
            parameters={"collective": "all_reduce", "mesh": mesh, "axis": axis, "message_bytes": size},
        )
        for size in (1 << 20, 1 << 26)
    ]
    (line,) = collective_lines(cases)
    assert stands == (line.ranks, line.nodes, line.stride, line.concurrent)


def test_a_message_that_hides_whole_and_one_that_does_not():
    for both_s, share in ((8e-3, 1.0), (10e-3, 0.5), (12e-3, 0.0), (13e-3, 0.0)):
        trio = [beside("both", both_s), beside("products", 8e-3), beside("message", 4e-3)]
        traits = calibrated([*kernels(), *trio]).calibration.traits
        assert pytest.approx(share) == traits["overlap_ratio"].value
    assert "overlap_ratio" not in calibrated([*kernels(), *trio[:2]]).calibration.traits


def test_spread_of_ranks_that_wait_for_nobody():
    wide = product(8192, rank_times_s=(0.98, 1.0, 1.02), world_size=3)
    traits = calibrated([*kernels(), wide]).calibration.traits
    assert pytest.approx(0.02) == traits["rank_spread_ratio"].value


def test_block_in_steady_state_and_the_rest_of_a_step():
    without = calibrated(kernels()).calibration
    in_situ = calibrated([*kernels(), *steps(without, ratio=1.2, host_s=0.01)])
    assert ("kernels only", "in situ") == (without.regime, in_situ.calibration.regime)
    traits = in_situ.calibration.traits
    assert pytest.approx(1.2, rel=1e-6) == traits["in_situ_ratio"].value
    assert pytest.approx(0.01, rel=1e-3) == traits["host_step_s"].value
    assert traits["in_situ_ratio"].relative_error < 1e-6
    assert "test_depth[l4]" in traits["in_situ_ratio"].source


def test_another_batch_tells_the_optimizer_from_the_block():
    without = calibrated(kernels()).calibration
    assert not {"optimizer_ratio"} & set(calibrated([*kernels(), *steps(without)]).calibration.traits)
    both = [step for batch in (1, 4) for step in steps(without, ratio=1.2, optimizer=0.65, host_s=0.01, batch=batch)]
    traits = calibrated([*kernels(), *both]).calibration.traits
    assert pytest.approx(0.65, rel=1e-6) == traits["optimizer_ratio"].value
    assert pytest.approx(1.2, rel=1e-6) == traits["in_situ_ratio"].value
    assert pytest.approx(0.01, rel=1e-3) == traits["host_step_s"].value


def test_products_that_wait_for_memory_tell_nothing_of_idle_units():
    small = [
        dataclasses.replace(product(side), time_s=2.2 * 3 * 2 * side**2 / (GB_PER_S * 1e9)) for side in (256, 320, 384)
    ]
    assert "wave_outputs" not in constants_of([*kernels()[3:6], *small], kernel_points(small))
    wide = [*kernels(), *small]
    assert pytest.approx(TFLOPS, rel=1e-3) == calibrated(wide).calibration.constants["matmul_bf16_tflops"].value


@pytest.mark.parametrize(("ratio", "told"), [(1.5, False), (3.0, True), (0.4, True)])
def test_a_block_far_from_the_sum_of_its_kernels_is_told(ratio, told):
    without = calibrated(kernels()).calibration
    made = calibrated([*kernels(), *steps(without, ratio=ratio)])
    assert told == any("times the sum of its kernels" in note for note in made.notes)


def test_more_layers_in_no_more_time_tell_nothing():
    without = calibrated(kernels()).calibration
    flat = [dataclasses.replace(step, time_s=0.1) for step in steps(without)]
    made = calibrated([*kernels(), *flat])
    assert "in_situ_ratio" not in made.calibration.traits
    assert any("took no longer" in note for note in made.notes)


def test_what_is_missing_names_stand_in_and_command():
    gaps = {gap.name: gap for gap in calibrated([product(8192)]).gaps}
    assert {"memory_gb_per_s", "link_gb_per_s", "in_situ_ratio", "launch_us"} <= set(gaps)
    assert "matmul_bf16_tflops" not in gaps
    memory = gaps["memory_gb_per_s"]
    assert memory.stand_in.startswith("614.4 GB/s (0.8 of 768")
    assert memory.command == 'python -m pytest test_perf/test_memory_bandwidth.py -k "s4000"'
    assert gaps["network_gb_per_s"].command.startswith("torchrun --nnodes=2")
    assert "test_depth" in command_for("in_situ_ratio", "s4000")


def test_each_software_has_a_calibration_and_borrows_with_a_wider_error():
    other = [dataclasses.replace(copied(size), software="torch 2.5.0") for size in (1 << 20, 1 << 30)]
    old, new = sorted(calibrate([product(8192), *other], CATALOG), key=lambda made: made.calibration.software)
    assert ("torch 2.5.0", "torch 2.7.1") == (old.calibration.software, new.calibration.software)
    borrowed = new.calibration.constants["memory_gb_per_s"]
    assert pytest.approx(GB_PER_S) == borrowed.value
    assert borrowed.relative_error >= OTHER_SOFTWARE
    assert "under other software (torch 2.5.0)" in borrowed.source
    assert "memory_gb_per_s" in {gap.name for gap in new.gaps}
    assert "calibrate anew" in software_flag(old.calibration, "torch 2.7.1")
    assert software_flag(old.calibration, "torch 2.5.0") == ""


def test_simulated_and_real_never_meet():
    with pytest.raises(ConfigurationError, match="the two never meet"):
        calibrate([product(8192), product(4096, simulated=True)], CATALOG)
    made = calibrated(kernels(simulated=True)).calibration
    assert made.simulated
    with pytest.raises(ConfigurationError, match="made on simulated devices and never projects real ones"):
        require_kind(made, simulated=False)
    with pytest.raises(ConfigurationError, match="made on real devices"):
        require_kind(Calibration(device="s4000"), simulated=True)


def test_nothing_to_calibrate_from():
    with pytest.raises(ConfigurationError, match="none of the results has times"):
        calibrate([], CATALOG)
    with pytest.raises(ConfigurationError, match="nothing calibrates a device in results of Barrier"):
        calibrate([seen("Barrier", 1.0)], CATALOG)


def result_of(workload, time_s, *, ranks=1, simulated=False):
    return measurements.result_of(
        measurement(Job(workload=workload, world_size=ranks, budget=Budget()), (time_s,) * 3),
        f"test_it[s4000-{workload}]",
        workload=describe(workload),
        parameters=recorded(workload.parameters()),
        platform="s4000",
        work=workload.work(MeshShape.of(dp=ranks)),
        environment={"packages": {"torch": "2.7.1"}},
        simulated=simulated,
    )


def multiplied(time_s=1.0, side=4096):
    return result_of(Matmul(m=side, k=side, n=side, dtype="bf16"), time_s)


def test_observation_of_a_result_says_what_it_trains():
    step = TrainStep(model="gpt2-tiny", overrides={"layers": 4})
    observation = Observation.of(result_of(step, 0.25))
    assert ("TrainStep", 0.25) == (observation.kind, observation.time_s)
    assert ("torch 2.7.1", 1) == (observation.software, observation.hosts)
    assert step.work(MeshShape.of()).training.overrides == observation.training.overrides
    assert Observation.of(dataclasses.replace(result_of(step, 0.25), outcome="smoke")) is None


def test_command_writes_a_file_and_tells_what_is_missing(tmp_path, capsys):
    products = [multiplied(side**3 / 4e13, side) for side in (2048, 4096)]
    journal, out = written(tmp_path / "j.jsonl", *products), tmp_path / "made.json"
    (told,) = as_json(capsys, "calibrate", journal, "-o", out)
    made = read_calibration(out)
    assert to_json(made) == told["calibration"]
    assert pytest.approx(80) == made.constants["matmul_bf16_tflops"].value
    told = printed(capsys, "calibrate", journal, "-o", out)
    assert "s4000 under torch 2.7.1: kernels only" in told
    assert "measure it: python -m pytest test_perf/test_memory_bandwidth.py" in told


def test_command_reads_a_baseline_too(tmp_path, capsys):
    identity = case_of(multiplied(), backend="mccl")
    hardware = dataclasses.replace(HARDWARE, platform="s4000")
    new = NewRuns(case=identity, runs=(run_of("s0", median_s=2 * 4096**3 / 8e13),), verdict="pass")
    path = store.update(tmp_path, hardware, [new], mode="append").path
    (observation,) = read_observations(path)
    assert ("Matmul", "s4000", 4096) == (observation.kind, observation.platform, observation.parameters["m"])
    printed(capsys, "calibrate", path, "-o", tmp_path / "made.json")
    rate = read_calibration(tmp_path / "made.json").constants["matmul_bf16_tflops"]
    assert pytest.approx(80, rel=1e-3) == rate.value


def test_results_of_instrumented_ranks_calibrate_nothing(tmp_path, capsys):
    product = multiplied()
    (rank,) = product.measurement.ranks
    rank = dataclasses.replace(rank, instruments=("profiler of torch (end it before the iterations)",))
    slowed = dataclasses.replace(product, measurement=dataclasses.replace(product.measurement, ranks=(rank,)))
    journal = written(tmp_path / "j.jsonl", product, dataclasses.replace(slowed, case="test_other[s4000]"))
    said = refused(capsys, "calibrate", journal, "-o", tmp_path / "made.json")
    assert "j.jsonl: 1 of 2 cases ran under profiler of torch (end it before the iterations)" in said
    assert not (tmp_path / "made.json").exists()


def test_command_holds_one_pair_in_a_file(tmp_path, capsys):
    product = multiplied()
    other = dataclasses.replace(product, case="test_other[s4000]", environment={"packages": {"torch": "2.5.0"}})
    journal = written(tmp_path / "j.jsonl", product, other)
    assert "2 pairs of device and software" in refused(capsys, "calibrate", journal, "-o", tmp_path / "made.json")
