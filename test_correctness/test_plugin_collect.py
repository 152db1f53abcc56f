"""Which cases there are, how they are called, which are skipped why."""

import dataclasses

import pytest

from perfsuite.platforms import Machine, detect_machine, families, load_catalog
from perfsuite.plugin import suite
from test_correctness.helpers.scripted_driver import repository

SWEPT = """
@sizes(full=["1GiB"], small=["1KiB", "1MiB"])
@world_sizes(2, 4)
@dtypes("fp32", "bf16", only_at="1MiB")
def test_sum(perf, ranks, message_bytes, dtype):
    perf(Sum(message_bytes=message_bytes, dtype=dtype), on=ranks)

@sizes(full=["4096x4096x4096"], small=["64x32x16"], param="shape")
def test_product(perf, shape):
    assert shape == (64, 32, 16)

def test_alone(perf):
    perf(step)
"""


def ids(result):
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_ids_name_platform_ranks_size_and_dtype_and_cases_get_those_values(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, SWEPT)
    assert ids(repo.run("--collect-only", "-q")) == [
        "test_sum[cpu-ws2-1KiB-fp32]",
        "test_sum[cpu-ws2-1MiB-fp32]",
        "test_sum[cpu-ws2-1MiB-bf16]",
        "test_sum[cpu-ws4-1KiB-fp32]",
        "test_sum[cpu-ws4-1MiB-fp32]",
        "test_sum[cpu-ws4-1MiB-bf16]",
        "test_product[cpu-64x32x16]",
        "test_alone[cpu]",
    ]
    repo.run("-k", "test_sum").assert_outcomes(passed=6, deselected=2)
    jobs = [(job.world_size, job.workload.message_bytes, job.workload.dtype) for job in repo.driver.timed()]
    assert jobs[:3] == [(2, 1024, "fp32"), (2, 1 << 20, "fp32"), (2, 1 << 20, "bf16")]
    assert [world_size for world_size, _, _ in jobs] == [2, 2, 2, 4, 4, 4]


NAMED = """
@sizes(full=["2D_2x4x1_16_1536x16"], small=["2D_1x2x1_2_64x2", "DP_1x1x1_2_64x2", "7b"], param="name")
def test_named(perf, name):
    assert name in ("2D_1x2x1_2_64x2", "DP_1x1x1_2_64x2", "7b")
"""


def test_names_may_begin_with_a_digit(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, NAMED)
    found = repo.run("-rA")
    found.assert_outcomes(failed=3)
    for name in ("2D_1x2x1_2_64x2", "DP_1x1x1_2_64x2", "7b"):  # each got its name, and measured nothing
        found.stdout.fnmatch_lines([f"FAILED *::test_named[[]cpu-{name}[]] - *perf was never called*"])
    assert ids(repo.run("--collect-only", "-q", "-k", "s4000")) == ["test_named[s4000-2D_2x4x1_16_1536x16]"]


EXTENDED = """
import pytest

@world_sizes(1, 2, extended=[2])
def test_sum(perf, ranks):
    perf(Sum(), on=ranks)

@pytest.mark.extended
def test_long(perf):
    perf(step)

@pytest.mark.extended
def test_of_others():
    pass

@sizes(full=["2D_1x1"], small=["1D", "2D", "3D"], param="name", extended=["2D", "3D"])
def test_named(perf, name):
    perf(step)
"""


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ([], ["test_sum[cpu-ws1]", "test_of_others", "test_named[cpu-1D]"]),
        (
            ["-m", "extended"],
            ["test_sum[cpu-ws2]", "test_long[cpu]", "test_of_others", "test_named[cpu-2D]", "test_named[cpu-3D]"],
        ),
        (["-m", "perf"], ["test_sum[cpu-ws1]", "test_named[cpu-1D]"]),
        (["-m", "not perf"], ["test_of_others"]),
        (["-k", "test_sum"], ["test_sum[cpu-ws1]", "test_sum[cpu-ws2]"]),
        (["test_it.py::test_long"], ["test_long[cpu]"]),
        (["test_it.py::test_sum[cpu-ws2]", "test_it.py::test_long[cpu]"], ["test_sum[cpu-ws2]", "test_long[cpu]"]),
        (
            ["--perf-scale=full"],
            ["test_sum[cpu-ws1]", "test_sum[cpu-ws2]", "test_long[cpu]", "test_of_others", "test_named[cpu-2D_1x1]"],
        ),
    ],
)
def test_extended_cases_of_the_small_scale_run_where_they_are_selected(pytester, monkeypatch, arguments, selected):
    found = repository(pytester, monkeypatch, EXTENDED).run("--collect-only", "-q", *arguments)
    assert selected == ids(found)


def test_a_run_says_how_many_extended_cases_it_leaves_out(pytester, monkeypatch):
    done = repository(pytester, monkeypatch, EXTENDED).run()
    done.assert_outcomes(passed=3, deselected=4)
    done.stdout.fnmatch_lines(["perfsuite: 4 extended cases left out; -m extended runs them"])


def test_the_scale_can_be_chosen_and_is_not_in_the_id(pytester, monkeypatch):
    found = repository(pytester, monkeypatch, SWEPT).run("--collect-only", "-q", "--perf-scale=full")
    assert "test_sum[cpu-ws2-1GiB-fp32]" in ids(found)
    assert "test_product[cpu-4096x4096x4096]" in ids(found)
    # the one size of the other dtypes is not among the full ones
    assert not [each for each in ids(found) if "bf16" in each]


@pytest.mark.parametrize(
    "selection",
    [["-k", "s4000"], ["-m", 'platform(name="s4000")'], ["test_it.py::test_alone[s4000]"]],
    ids=["keyword", "marker", "node id"],
)
def test_a_platform_that_is_named_is_collected_and_skipped(pytester, monkeypatch, selection):
    repo = repository(pytester, monkeypatch, SWEPT)
    found = repo.run(*selection)
    found.stdout.fnmatch_lines(["perfsuite: * skipped: MTT S4000 not found: no /dev/mtgpu* here; run inside *"])
    assert found.parseoutcomes().keys() <= {"skipped", "deselected"}
    assert repo.driver.jobs == []


def test_a_platform_whose_name_is_only_part_of_a_word_is_not_named(pytester, monkeypatch):
    found = repository(pytester, monkeypatch, SWEPT).run("--collect-only", "-q", "-k", "xs4000 or cpu")
    assert not [each for each in ids(found) if "s4000" in each]


def test_the_platform_of_the_session_can_be_overridden(pytester, monkeypatch):
    found = repository(pytester, monkeypatch, SWEPT).run("-rs", "--perf-platform=h200", "-k", "alone")
    found.stdout.fnmatch_lines(["SKIPPED *: *H200 * not found*"])
    assert found.parseoutcomes() == {"skipped": 1, "deselected": 3}


def test_users_parametrizations_combine(pytester, monkeypatch):
    tests = """
import pytest

@pytest.mark.parametrize("way", ["up", "down"])
@world_sizes(2)
def test_both(perf, ranks, way):
    perf(step, on=ranks)

@pytest.mark.parametrize("dtype", ["a", "b"])
def test_own_dtype(perf, dtype):
    perf(step)

@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_own_ranks(perf, ranks):
    assert perf(step, on=ranks).world_size == ranks.world_size

@pytest.fixture
def dtype():
    return "mine"

def test_dtype_fixture(perf, dtype):
    assert dtype == "mine"
    perf(step)
"""
    repo = repository(pytester, monkeypatch, tests)
    assert ids(repo.run("--collect-only", "-q")) == [
        "test_both[cpu-ws2-up]",
        "test_both[cpu-ws2-down]",
        "test_own_dtype[cpu-a]",
        "test_own_dtype[cpu-b]",
        "test_own_ranks[cpu-1]",
        "test_own_ranks[cpu-3]",
        "test_dtype_fixture[cpu]",
    ]
    repo.run().assert_outcomes(passed=7)


def test_decorators_work_on_classes_and_modules_and_the_nearest_counts(pytester, monkeypatch):
    tests = """
pytestmark = world_sizes(2)

def test_of_the_module(perf, ranks):
    perf(step, on=ranks)

@world_sizes(3)
class TestIt:
    def test_of_the_class(self, perf, ranks):
        perf(step, on=ranks)

    @world_sizes(4)
    def test_own(self, perf, ranks):
        perf(step, on=ranks)
"""
    repo = repository(pytester, monkeypatch, tests)
    repo.run().assert_outcomes(passed=3)
    assert [job.world_size for job in repo.driver.jobs] == [2, 3, 4]


MALFORMED = [
    ('@sizes(full=["1MB"], small=["1KiB"])', "message_bytes", "size '1MB' is not a number followed by B, KiB*"),
    ('@sizes(full="1MiB", small=["1KiB"])', "message_bytes", "@sizes: full='1MiB' is not a list of sizes*"),
    ("@sizes(full=[], small=[1])", "message_bytes", "@sizes: full=* is not a list of sizes*"),
    ("@sizes(full=[-1], small=[1])", "message_bytes", "@sizes: -1 is not a size for message_bytes*"),
    ('@sizes(full=["8x"], small=["8x8"], param="shape")', "shape", "@sizes: '8x' is not a size for shape*"),
    ('@sizes(full=["8x8.x8"], small=["8x8"], param="shape")', "shape", "@sizes: '8x8.x8' is not a size for shape*"),
    ('@sizes(full=["1024"], small=[8], param="count")', "count", "@sizes: '1024' is not a size for count*"),
    ('@sizes(full=["64MiB"], small=[8], param="buffer")', "buffer", "@sizes: '64MiB' is not a size for buffer*"),
    ("@sizes(full=[1], small=[1024, '1KiB'])", "message_bytes", "@sizes has 1KiB twice*"),
    (
        "@sizes(full=[8], small=[1, 2], extended=[8])",
        "message_bytes",
        "@sizes: extended=[8] is not among the sizes of @sizes; choose from 1B, 2B",
    ),
    ("@sizes(full=[1], small=[1], param='no name')", "message_bytes", "@sizes: param='no name' is not the name*"),
    ("@sizes(full=[1], small=[1])", "", "@sizes sets 'message_bytes', which the test does not take*"),
    ("@sizes(full=[1], small=[1])\n" * 2, "message_bytes", "is decorated with @sizes 2 times*"),
    ("@world_sizes(0)", "ranks", "@world_sizes*: every world size is a whole number of at least 1*"),
    ("@world_sizes()", "ranks", "@world_sizes*: every world size is*"),
    ("@pytest.mark.perf_world_sizes(2)", "ranks", "has the marker perf_world_sizes without its data*"),
    ("@pytest.mark.perf_sizes(small=[1])", "message_bytes", "has the marker perf_sizes without its data*"),
    ("@pytest.mark.perf_world_size(n=2)", "", "*perf_world_size, which perfsuite sets itself*; write @world_sizes(2)*"),
    ('@pytest.mark.perf_platform("s4000")', "", "*perf_platform, which perfsuite sets itself*; leave it out, and*"),
    ("@world_sizes(2, 2)", "ranks", "@world_sizes has 2 twice*"),
    ("@world_sizes(2, full=[2, 4, 4])", "ranks", "@world_sizes has 4 twice; write each once"),
    ("@world_sizes(2, full=[0])", "ranks", "@world_sizes: full=(0,): every world size is a whole number*"),
    ("@world_sizes(1, 2, extended=[4])", "ranks", "@world_sizes(1, 2): extended=[4] is not among the world sizes*"),
    ("@world_sizes(2, more='all')", "ranks", "@world_sizes(2): more='all' is unknown; choose True, 'whole' or*"),
    ("@world_sizes(2)", "", "@world_sizes sets 'ranks', which the test does not take*"),
    ("", "ranks", "takes ranks without a number of them*"),
    ('@dtypes("fp8x")', "dtype", "@dtypes: 'fp8x' is unknown; choose from fp64*"),
    ("@dtypes()", "dtype", "@dtypes() has no dtype*"),
    ('@dtypes("fp32", only_at="1KiB")', "dtype", "@dtypes: only_at='1KiB' is a size; add @sizes*"),
    (
        '@sizes(full=[1], small=[2])\n@dtypes("fp32", only_at=4)',
        "dtype, message_bytes",
        "@dtypes: only_at=4 is not among the sizes of @sizes; choose from 1B, 2B",
    ),
]


def test_a_malformed_decorator_names_file_and_function(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, "")
    for number, (decorators, arguments, _) in enumerate(MALFORMED):
        function = f"def test_bad(perf{', ' if arguments else ''}{arguments}):\n    pass\n"
        text = f"import pytest\nfrom perfsuite import *\n{decorators}\n{function}"
        pytester.makepyfile(**{f"test_bad{number:02}": text})
    found = repo.run()
    found.assert_outcomes(errors=len(MALFORMED))
    found.stdout.no_fnmatch_line("During handling*")  # each error is printed once
    messages = [f"test_bad{number:02}.py::test_bad: {message}" for number, (_, _, message) in enumerate(MALFORMED)]
    found.stdout.fnmatch_lines([message.replace("[", "[[]") for message in messages])
    assert "Traceback" not in found.stdout.str()


def test_a_decorator_without_values_is_an_error_at_the_decorated_function(pytester, monkeypatch):
    found = repository(pytester, monkeypatch, "@world_sizes\ndef test_bare(perf, ranks):\n    pass\n").run()
    found.assert_outcomes(errors=1)
    told = "E*@world_sizes above test_bare has no values; write for example @world_sizes(2, 4, 8)"
    found.stdout.fnmatch_lines([told])


@pytest.fixture
def two_h200(monkeypatch):
    """This machine has two H200."""
    cpu, model = detect_machine(load_catalog(), "cpu"), load_catalog().find("h200")
    device = dataclasses.replace(cpu.devices[0], reported_name="NVIDIA H200")
    devices = (device, dataclasses.replace(device, index=1))
    machine = Machine(family=families()["cuda"], model=model, devices=devices)
    monkeypatch.setattr(suite, "detect_machine", lambda *_: machine)


ON_RANKS = """
@world_sizes(2, 4)
def test_ranks(perf, ranks):
    perf(step, on=ranks)

def test_number(perf):
    perf(step, on=3)

@dtypes("fp32", "bf16", "int32")
def test_dtype(perf, dtype):
    perf(NativeProduct(dtype=dtype))

class NativeProduct(Product):
    def native_dtype(self):
        return self.dtype
"""


@pytest.mark.usefixtures("two_h200")
def test_ranks_beyond_the_devices_are_skipped_unless_they_may_share(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, ON_RANKS)
    found = repo.run("-rs", "-k", "not dtype")
    found.assert_outcomes(passed=1, skipped=2, deselected=3)
    found.stdout.fnmatch_lines(
        [
            "SKIPPED *: 4 ranks on a host with 2 devices; use 2 such hosts (torchrun --nnodes=2 "
            "--nproc-per-node=2 -m pytest ...), or --perf-oversubscribe, which lets ranks share them",
            "SKIPPED * test_it.py:*: 3 ranks on a host with 2 devices; use --perf-oversubscribe, which lets "
            "ranks share them",
        ]
    )
    repo.run("--perf-oversubscribe", "-k", "not dtype").assert_outcomes(passed=3, deselected=3)


@pytest.mark.usefixtures("two_h200")
def test_a_dtype_that_the_device_lacks_is_skipped(pytester, monkeypatch):
    found = repository(pytester, monkeypatch, ON_RANKS).run("-rs", "-k", "dtype")
    found.assert_outcomes(passed=2, skipped=1, deselected=3)
    found.stdout.fnmatch_lines(["SKIPPED * test_it.py:*: no native int32 on 2 x NVIDIA H200*"])


def test_on_a_cpu_what_needs_other_instructions_or_an_accelerator_is_skipped(pytester, monkeypatch):
    tests = """
@dtypes("tf32")
def test_dtype(perf, dtype):
    perf(Needy(dtype=dtype))

def test_option(perf):
    perf(Needy())

class Needy(Product):
    def native_dtype(self):
        return "tf32" if self.dtype == "tf32" else ""

    def needs_accelerator(self):
        return "async_tensor"
"""
    found = repository(pytester, monkeypatch, tests).run("-rs")
    found.assert_outcomes(skipped=2)
    found.stdout.fnmatch_lines_random(["* no CPU has instructions for tf32", "* async_tensor needs an accelerator; *"])
