"""pytest-benchmark gets exactly what the ranks measured, and all it offers works on it."""

import json
import re
import sys

import pytest

from test_correctness.helpers.scripted_driver import ROOT, measurement, repository

TESTS = """
import pytest

@sizes(full=["1GiB"], small=["1KiB", "1MiB"])
@world_sizes(2)
@pytest.mark.benchmark(group="sums")
def test_sum(perf, ranks, message_bytes):
    perf(Sum(message_bytes=message_bytes), on=ranks)

def test_step(perf):
    perf(step)

def test_plain(benchmark):
    benchmark.pedantic(lambda: None, rounds=2)

def test_no_benchmark():
    pass
"""


@pytest.fixture
def repo(pytester, monkeypatch):
    return repository(pytester, monkeypatch, TESTS)


def benchmarks(path):
    return {each["name"]: each for each in json.loads(path.read_text())["benchmarks"]}


def test_samples_and_metrics_enter_the_record_unchanged(repo, pytester):
    repo.run("--benchmark-json=out.json").assert_outcomes(passed=5)
    stored = json.loads(pytester.path.joinpath("out.json").read_text())
    entry = benchmarks(pytester.path / "out.json")["test_sum[cpu-ws2-1MiB]"]
    assert entry["stats"]["data"] == [0.5, 0.25, 1.0]
    assert (entry["stats"]["median"], entry["stats"]["rounds"], entry["stats"]["iterations"]) == (0.5, 3, 1)
    assert entry["group"] == "sums"
    assert entry["params"] == {"platform": "cpu", "ranks": 2, "message_bytes": 1 << 20}
    assert entry["options"]["timer"] == "worker_clock"
    info = entry["extra_info"]
    assert info["algbw_gb_per_s"] == (1 << 20) / 0.5 / 1e9
    assert (info["world_size"], info["iterations_per_sample"], info["slowest_rank"]) == (2, 7, 1)
    assert (info["backend"], info["process"], info["transport"]) == ("gloo", "reused", "local")
    hardware = stored["machine_info"]["perfsuite"]
    assert hardware == {"platform": "cpu", "devices": 1, "fingerprint": info["fingerprint"]}
    assert stored["perfsuite"]["schema"] == 1
    plain = benchmarks(pytester.path / "out.json")["test_plain"]
    assert plain["options"]["timer"] == "perf_counter"


def test_awkward_numbers_survive_to_the_bit_and_a_profile_of_the_feeding(pytester, monkeypatch):
    times = [0.1, 1 / 3, 5e-324, 1e-9, 123456.789, 0.1 + 0.2] * 60
    repo = repository(pytester, monkeypatch, TESTS, lambda job: measurement(job, times))
    done = repo.run("--benchmark-cprofile=tottime", "--benchmark-json=out.json", "-k", "step")
    done.assert_outcomes(passed=1, deselected=4)
    assert benchmarks(pytester.path / "out.json")["test_step[cpu]"]["stats"]["data"] == times


SCRIPTED = """
import os
from perfsuite.plugin.suite import Suite
from test_correctness.helpers.scripted_driver import ScriptedDriver, measurement

pytest_plugins = ["perfsuite.plugin"]
times = tuple(float(time) for time in os.environ.get("TIMES", "0.5 0.25 1.0").split())
Suite._open_driver = lambda suite: ScriptedDriver(lambda job: measurement(job, times))
"""


@pytest.fixture
def in_a_process(repo, pytester, monkeypatch):
    """pytest in the repository in a process of its own, for what does not bear to share one."""
    pytester.makeconftest(SCRIPTED)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda *arguments: pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


@pytest.mark.extended
def test_save_compare_and_fail(in_a_process, pytester, monkeypatch):
    monkeypatch.setenv("TIMES", "0.5 0.5 1.0")
    in_a_process("-k", "sum", "--benchmark-save=first").assert_outcomes(passed=2, deselected=3)
    compare = ("-k", "sum", "-W", "error", "--benchmark-compare", "--benchmark-compare-fail=max:50%")
    found = in_a_process(*compare)  # pytest-benchmark warns when the hardware differs
    found.assert_outcomes(passed=2, deselected=3)
    found.stdout.fnmatch_lines(["*benchmark 'sums': 4 tests*", "test_sum*1KiB* (0001_first)*", "test_sum*1KiB* (NOW)*"])
    monkeypatch.setenv("TIMES", "0.5 0.5 2.0")
    found = in_a_process(*compare)
    assert found.ret != 0
    found.stderr.fnmatch_lines(["*Performance has regressed:*", "*test_sum[[]cpu-ws2-1KiB[]]*"])
    (saved,) = pytester.path.glob(".benchmarks/*/0001_first.json")
    command = pytester.run(sys.executable, "-m", "pytest_benchmark", "compare", str(saved))
    assert command.ret == 0
    command.stdout.fnmatch_lines(["test_sum[[]cpu-ws2-1KiB[]]*", "test_sum[[]cpu-ws2-1MiB[]]*"])


@pytest.mark.extended
def test_autosave_histogram_and_group_by(in_a_process, pytester):
    # pygal looks for its plugins with importlib_metadata, which changes how this process would find pytest's
    found = in_a_process(
        "-k", "sum", "--benchmark-autosave", "--benchmark-histogram=plot", "--benchmark-group-by=param:ranks"
    )
    found.assert_outcomes(passed=2, deselected=3)
    found.stdout.fnmatch_lines(["*benchmark 'ranks=2': 2 tests*"])
    assert len(list(pytester.path.glob(".benchmarks/*/0001_*.json"))) == 1
    assert "test_sum" in pytester.path.joinpath("plot-ranks=2.svg").read_text()


@pytest.mark.extended
def test_a_file_of_other_hardware_is_told_apart(repo, pytester):
    repo.run("--benchmark-save=other", "-k", "sum")
    (saved,) = pytester.path.glob(".benchmarks/*/0001_other.json")
    stored = json.loads(saved.read_text())
    stored["machine_info"]["perfsuite"]["fingerprint"] = "cpu-elsewhere"
    saved.write_text(json.dumps(stored))
    found = repo.run("--benchmark-compare", "-k", "sum")
    found.assert_outcomes(passed=2, deselected=3, warnings=1)
    found.stdout.fnmatch_lines(["*machine_info is different*cpu-elsewhere*"])


def test_only_and_skip(repo):
    repo.run("--benchmark-only").assert_outcomes(passed=4, skipped=1)
    repo.driver.jobs.clear()
    repo.run("--benchmark-skip").assert_outcomes(passed=1, skipped=4)
    assert repo.driver.jobs == []


def test_disabled_runs_every_case_once_and_records_nothing(repo, pytester):
    found = repo.run("--benchmark-disable", "--benchmark-json=out.json", "-W", "error")
    found.assert_outcomes(passed=5)
    assert [job.budget.smoke for job in repo.driver.jobs] == [True] * 3
    found.stdout.fnmatch_lines(
        ["perfsuite: warning: pytest-benchmark is off: *", "3 built, checked and run once, not measured*"]
    )
    out = pytester.path / "out.json"
    assert not out.exists() or out.read_bytes() == b"", "pytest-benchmark 5.1 opens the file before it has anything"


def test_a_case_that_fails_after_it_was_measured_is_in_no_file(pytester, monkeypatch):
    tests = "def test_slow(perf):\n    assert perf(step).median_s < 0.1\ndef test_fine(perf):\n    perf(step)\n"
    repository(pytester, monkeypatch, tests).run("--benchmark-json=out.json").assert_outcomes(passed=1, failed=1)
    assert list(benchmarks(pytester.path / "out.json")) == ["test_fine[cpu]"]


REPLACED = {
    "switched off": ("", ["-p", "no:benchmark"]),
    "a conftest's": ("@pytest.fixture\ndef benchmark():\n    return lambda function: function()\n", []),
    "a conftest's that is nothing": ("@pytest.fixture\ndef benchmark():\n    return None\n", []),
    "one that says it is another": (
        """
class Codspeed:
    @property
    def __class__(self):
        from pytest_benchmark.fixture import BenchmarkFixture
        return BenchmarkFixture
    def pedantic(self, target, **options):
        return target()

@pytest.fixture
def benchmark():
    return Codspeed()
""",
        [],
    ),
    "a plugin's": (
        """
@pytest.fixture
def their_benchmark():
    return lambda function: function()

@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    if hasattr(pytest, "register_fixture"):
        pytest.register_fixture(name="benchmark", func=lambda their_benchmark: their_benchmark, node=session)
    else:
        fixtures = session._fixturemanager._arg2fixturedefs
        fixtures["benchmark"] = fixtures["their_benchmark"]
""",
        [],
    ),
}


@pytest.mark.parametrize("way", REPLACED)
def test_whoever_replaces_the_fixture_benchmark_gets_one_line(pytester, monkeypatch, way):
    conftest, options = REPLACED[way]
    tests = """
def test_perf(perf):
    perf(step)

def test_after(benchmark, perf):
    perf(step)

@pytest.mark.benchmark(group="any")
def test_grouped(perf):
    perf(step)

def test_plain():
    pass
"""
    known = "\ndef pytest_configure(config):\n    config.addinivalue_line('markers', 'benchmark: theirs')\n"
    marker = known if options else ""  # the marker of a test is its author's to declare
    repo = repository(pytester, monkeypatch, "import pytest\n" + tests, conftest=conftest + marker)
    found = repo.run(*options, "-W", "error")
    assert found.parseoutcomes() == {"passed": 1, "errors": 3}
    shown = [line for line in found.outlines if line.startswith("perf stores its samples by pytest-benchmark, ")]
    assert len(shown) == 3
    assert all(line.endswith("or add -m 'not perf' to leave the perf cases out") for line in shown)
    assert not re.search("INTERNALERROR|fixture 'benchmark' not found|Traceback|File ", found.stdout.str())
    assert repo.driver.timed() == []
    plain = repo.run(*options, "-m", "not platform", "-W", "error")
    assert (plain.ret, plain.parseoutcomes()) == (0, {"passed": 1, "deselected": 3})


def test_a_fixture_that_passes_pytest_benchmarks_on_is_not_another(pytester, monkeypatch):
    wraps = "@pytest.fixture\ndef benchmark(benchmark):\n    benchmark.extra_info['seed'] = 7\n    return benchmark\n"
    repo = repository(pytester, monkeypatch, "def test_perf(perf):\n    perf(step)\n", conftest=wraps)
    repo.run("--benchmark-json=out.json").assert_outcomes(passed=1)
    assert benchmarks(pytester.path / "out.json")["test_perf[cpu]"]["extra_info"]["seed"] == 7


def test_a_fixture_perf_of_another_plugin_is_left_alone(pytester, monkeypatch):
    tests = "def test_theirs(perf, platform):\n    assert (perf(2), platform) == (4, 'theirs')\n"
    theirs = """
@pytest.fixture
def platform():
    return "theirs"

@pytest.fixture
def perf(platform, benchmark):
    return lambda number: benchmark(lambda: 2 * number)
"""
    repo = repository(pytester, monkeypatch, tests, conftest=theirs)
    found = repo.run("--benchmark-max-time=0.01", "-v")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["test_it.py::test_theirs PASSED*"])
    assert "journal" not in found.stdout.str()
    assert repo.driver.started == 0


def test_perfsuite_loads_where_pytest_benchmark_is_not_installed(pytester, monkeypatch):
    pytester.makepyfile(test_plain="def test_plain():\n    pass\n")
    pytester.makepyfile(
        program="""
import sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pytest_benchmark":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Gone())
import pytest
sys.exit(pytest.main(["-p", "no:benchmark", "-p", "perfsuite.plugin", "-p", "no:hypothesispytest", "test_plain.py"]))
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = pytester.run(sys.executable, "program.py")
    assert found.ret == 0
    found.assert_outcomes(passed=1)


def test_nor_is_one_whose_other_fixture_fails(pytester, monkeypatch):
    broken = "@pytest.fixture\ndef broken():\n    raise OSError('no data')\n"
    tests = f"import pytest\n\n{broken}\ndef test_bad(perf, broken):\n    perf(step)\n"
    assert repository(pytester, monkeypatch, tests).run("-W", "error").parseoutcomes() == {"errors": 1}
