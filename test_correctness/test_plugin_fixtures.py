"""What ``perf``, ``ranks`` and ``platform`` do for a test, and what they refuse."""

import pytest

from perfsuite.record.workload import FunctionWorkload
from test_correctness.helpers.scripted_driver import repository


def ids(result):
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_perf_returns_the_result(pytester, monkeypatch):
    tests = """
@world_sizes(2)
def test_sum(perf, ranks, platform):
    result = perf(Sum(message_bytes=1 << 20), on=ranks)
    assert (result.median_s, result.world_size, result.outcome) == (0.5, 2, "measured")
    assert result.metric("algbw_gb_per_s").value == (1 << 20) / 0.5 / 1e9
    assert result.parameters == {"message_bytes": 1 << 20, "dtype": "fp32"}
    assert (result.platform, platform.name, platform.family) == ("cpu", "cpu", "cpu")
    assert result.environment["kernel"]
    assert result.environment["worker"] == {"torch": "scripted"}
    assert result.fingerprint.startswith("cpu-")
"""
    repository(pytester, monkeypatch, tests).run().assert_outcomes(passed=1)


def test_a_function_gets_the_parameters_of_perf(pytester, monkeypatch):
    tests = """
@world_sizes(2)
def test_function(perf, ranks):
    assert perf(step, on=ranks, message_bytes=7, way="up").parameters == {"message_bytes": 7, "way": "up"}
"""
    repo = repository(pytester, monkeypatch, tests)
    repo.run().assert_outcomes(passed=1)
    (job,) = repo.driver.jobs
    assert isinstance(job.workload, FunctionWorkload)
    assert (job.workload.function.__name__, job.workload.arguments) == ("step", {"message_bytes": 7, "way": "up"})
    assert (job.world_size, job.test_module) == (2, "test_it")


def test_a_class_gets_its_fields_from_perf_and_one_rank_by_default(pytester, monkeypatch):
    tests = """
def test_class(perf):
    assert perf(Product, side=8).parameters == {"side": 8, "dtype": "fp32"}

def test_number(perf):
    assert perf(Product(side=8), on=3).world_size == 3
"""
    repo = repository(pytester, monkeypatch, tests)
    repo.run().assert_outcomes(passed=2)
    assert [job.world_size for job in repo.driver.timed()] == [1, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("perf(step); perf(step)", "perf was called twice in one test, but one test is one case; parametrize the test"),
        (
            "import functools; perf(functools.partial(step, 3))",
            "perf was given a partial with the positional arguments (3,), but the first argument is the rank; give them"
            " by name",
        ),
        (
            "perf(Sum().work)",
            "perf was given the method Sum.work bound to an object that the ranks do not have; make it a function at"
            " module level and pass values of the object as parameters",
        ),
        (
            "perf(type('Bare', (Workload,), {'work': None, 'build': None}))",
            "Bare is not a dataclass, so its parameters are unknown; write @dataclass(frozen=True, kw_only=True)*",
        ),
        ("perf(42)", "perf was given 42, which is neither a workload nor a function at module level*"),
        (
            "perf(Sum(), side=3)",
            "perf got a Sum object and side; give parameters to the workload: perf(Sum(side=...), ...)",
        ),
        ("perf(step, on=0)", "perf was called with on=0; give the fixture perf_ranks or a number of at least 1"),
        (
            "perf(step, on='two')",
            "perf was called with on='two'; give the fixture perf_ranks or a number of at least 1",
        ),
        ("perf(step, on=True)", "perf was called with on=True; give the fixture perf_ranks or a number of at least 1"),
    ],
)
def test_what_perf_refuses(pytester, monkeypatch, body, message):
    found = repository(pytester, monkeypatch, f"def test_bad(perf):\n    {body}\n").run("--benchmark-disable")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines([f"{message}"])
    assert "Traceback" not in found.stdout.str()


@pytest.mark.parametrize("on", ["", ", on=1", ", on=None"])
def test_a_case_for_several_ranks_must_run_on_them(pytester, monkeypatch, on):
    tests = f"@world_sizes(2)\ndef test_forgot(perf, ranks):\n    perf(step{on})\n"
    found = repository(pytester, monkeypatch, tests).run()
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        ["the case is one of 2 ranks, but perf was called with on=*; call it with on=perf_ranks"]
    )


def test_a_test_that_never_calls_perf_fails_unless_it_says_otherwise(pytester, monkeypatch):
    tests = """
import pytest

def test_idle(perf):
    pass

def test_skips(perf):
    pytest.skip("not today")

@pytest.mark.xfail(reason="to be written", strict=True)
def test_expected(perf):
    raise NotImplementedError
"""
    repo = repository(pytester, monkeypatch, tests)
    found = repo.run()
    found.assert_outcomes(failed=1, skipped=1, xfailed=1)
    found.stdout.fnmatch_lines(
        ["perf was never called, so nothing was measured; call perf(...) once, or remove it from the arguments"]
    )
    assert repo.driver.jobs == []


@pytest.mark.parametrize("options", [[], ["--benchmark-disable"]])
@pytest.mark.parametrize(
    "body",
    ["perf(step); benchmark(int)", "benchmark(int); perf(step)", "benchmark(int)"],
    ids=["after", "before", "only"],
)
def test_perf_and_benchmark_do_not_share_a_test(pytester, monkeypatch, body, options):
    repo = repository(pytester, monkeypatch, f"def test_both(perf, benchmark):\n    {body}\n")
    found = repo.run(*options)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [
            "perf and benchmark were both used in one test, and a case has one record; "
            "use perf for code on ranks and benchmark for a function of this process, each in its own test"
        ]
    )
    assert "Traceback" not in found.stdout.str()
    assert bool(repo.driver.jobs) == body.startswith("perf")


def test_what_perf_records_can_be_added_to(pytester, monkeypatch):
    tests = "def test_more(perf, benchmark):\n    benchmark.extra_info['seed'] = 7\n    perf(step)\n"
    repository(pytester, monkeypatch, tests).run().assert_outcomes(passed=1)


def test_a_partial_adds_its_keywords(pytester, monkeypatch):
    tests = """
import functools

def test_function(perf):
    wide = functools.partial(functools.partial(step, n=3, way="up"), n=4)
    assert perf(wide, way="down").parameters == {"n": 4, "way": "down"}

def test_class(perf):
    assert perf(functools.partial(Product, side=8)).parameters == {"side": 8, "dtype": "fp32"}
"""
    repository(pytester, monkeypatch, tests).run().assert_outcomes(passed=2)


def test_perf_must_be_an_argument(pytester, monkeypatch):
    tests = """
def test_dynamic(request):
    request.getfixturevalue("perf")(step)

import pytest

@pytest.fixture
def timed(perf):
    return lambda: perf(step)

def test_through_a_fixture(timed):
    assert timed().median_s == 0.5
"""
    found = repository(pytester, monkeypatch, tests).run()
    found.assert_outcomes(failed=1, passed=1)
    found.stdout.fnmatch_lines(["*perf was requested by getfixturevalue; add it to the arguments of the test"])


def test_a_fixture_of_the_same_name_in_another_repository_is_left_alone(pytester, monkeypatch):
    tests = """
import pytest

@pytest.fixture
def perf():
    return 7

@pytest.fixture
def platform():
    return "mine"

def test_theirs(perf, platform):
    assert (perf, platform) == (7, "mine")
"""
    repo = repository(pytester, monkeypatch, tests)
    found = repo.run("--collect-only", "-q")
    found.stdout.fnmatch_lines(["test_it.py::test_theirs"])
    repo.run().assert_outcomes(passed=1)


def test_a_conftest_with_fixtures_of_the_short_names_keeps_them_and_perf_has_its_own(pytester, monkeypatch):
    theirs = """
import pytest

@pytest.fixture(params=["linux", "windows"])
def platform(request):
    return request.param

@pytest.fixture
def ranks():
    return "theirs"
"""
    tests = """
def test_theirs(platform, ranks):
    assert (platform in ("linux", "windows"), ranks) == (True, "theirs")

def test_one(perf):
    assert perf(step).platform == "cpu"

@world_sizes(2)
def test_two(perf, perf_ranks, perf_platform, ranks):
    result = perf(step, on=perf_ranks)
    assert (result.world_size, perf_platform.name, ranks) == (2, "cpu", "theirs")

@world_sizes(2)
def test_both(perf, perf_ranks, platform):
    assert platform in ("linux", "windows")
    perf(step, on=perf_ranks)
"""
    repo = repository(pytester, monkeypatch, tests)
    pytester.makeconftest('pytest_plugins = ["perfsuite.plugin"]\n' + theirs)
    repo.run("--benchmark-disable").assert_outcomes(passed=6)
    (pytester.path / "test_it.py").write_text(
        "from perfsuite import world_sizes\n\n@world_sizes(2)\ndef test_wrong(perf, ranks):\n    perf(len, on=ranks)\n"
    )
    repo.run().stdout.fnmatch_lines(["*@world_sizes sets 'perf_ranks', which the test does not take; add it to*"])


def test_an_error_of_perf_can_be_expected(pytester, monkeypatch):
    tests = """
import pytest
from perfsuite import PerfsuiteError

def test_expected(perf):
    with pytest.raises(PerfsuiteError, match="neither a workload"):
        perf(42)
"""
    assert repository(pytester, monkeypatch, tests).run("-W", "error").parseoutcomes() == {"passed": 1}


SHORT_NAMES_OFF = """
import pytest

@pytest.fixture
def platform():
    return "their platform"

@pytest.mark.extended
def test_theirs(platform):
    assert platform == "their platform"

@world_sizes(2, 4, extended=(4,))
def test_ours(perf, perf_ranks, perf_platform):
    assert perf(step, on=perf_ranks).platform == perf_platform.name
"""


def test_a_project_can_switch_the_short_names_off(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, SHORT_NAMES_OFF)
    ini = pytester.path / "tox.ini"
    ini.write_text(ini.read_text() + "\nperf_short_names = false\nmarkers = extended: a marker of the project\n")
    repo.run("--benchmark-disable").assert_outcomes(passed=2, deselected=1)
    for expression, selected in (
        ("extended", ["test_theirs"]),
        ("perf_extended", ["test_ours[cpu-ws4]"]),
        ("perf_world_size(n=2) and perf_platform(name='cpu')", ["test_ours[cpu-ws2]"]),
    ):
        assert ids(repo.run("--collect-only", "-q", "-m", expression)) == selected
    fixtures = [line.partition(" ")[0] for line in repo.run("--fixtures", "-q").outlines]
    assert ("ranks" in fixtures, fixtures.count("platform"), "perf_ranks" in fixtures) == (False, 1, True)
    (pytester.path / "test_it.py").write_text("def test_short(ranks):\n    pass\n")
    repo.run().stdout.fnmatch_lines(["E *fixture 'ranks' not found"])


def test_the_short_names_are_other_names_of_the_prefixed_ones(pytester, monkeypatch):
    tests = """
@world_sizes(2, 4, extended=(4,))
def test_ours(perf, ranks):
    perf(step, on=ranks)
"""
    repo = repository(pytester, monkeypatch, tests)
    for expression, selected in (
        ("extended", ["test_ours[cpu-ws4]"]),
        ("perf_extended", ["test_ours[cpu-ws4]"]),
        ("world_size(n=2)", ["test_ours[cpu-ws2]"]),
        ("perf_world_size(n=2) and platform(name='cpu')", ["test_ours[cpu-ws2]"]),
    ):
        assert ids(repo.run("--collect-only", "-q", "-m", expression)) == selected
