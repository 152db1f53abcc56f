"""What ``perf``, ``ranks`` and ``platform`` do for a test, and what they refuse."""

import pytest

from perfsuite.record.workload import FunctionWorkload
from test_correctness.helpers.scripted_driver import ids, repository


def test_functions_classes_and_partials_get_the_parameters_of_perf_and_one_rank_by_default(pytester, monkeypatch):
    tests = """
import functools
import pytest
from perfsuite import PerfsuiteError

@world_sizes(2)
def test_function(perf, ranks):
    assert perf(step, on=ranks, message_bytes=7, way="up").parameters == {"message_bytes": 7, "way": "up"}

def test_class(perf):
    assert perf(Product, side=8).parameters == {"side": 8, "dtype": "fp32"}

def test_number(perf):
    assert perf(Product(side=8), on=3).world_size == 3

def test_partial_function(perf):
    wide = functools.partial(functools.partial(step, n=3, way="up"), n=4)
    assert perf(wide, way="down").parameters == {"n": 4, "way": "down"}

def test_partial_class(perf):
    assert perf(functools.partial(Product, side=8)).parameters == {"side": 8, "dtype": "fp32"}

def test_expected_error(perf):
    with pytest.raises(PerfsuiteError, match="neither a workload"):
        perf(42)
"""
    repo = repository(pytester, monkeypatch, tests)
    assert repo.run("-W", "error").parseoutcomes() == {"passed": 6}
    job, *_ = (job for job in repo.driver.jobs if isinstance(job.workload, FunctionWorkload))
    assert (job.workload.function.__name__, job.workload.arguments) == ("step", {"message_bytes": 7, "way": "up"})
    assert (job.world_size, job.test_module) == (2, "test_it")
    assert [each.world_size for each in repo.driver.timed()] == [1, 3, 1]


REFUSED = [
    ("perf(step); perf(step)", "perf was called twice in one test, but one test is one case; parametrize the test"),
    (
        "import functools; perf(functools.partial(step, 3))",
        "perf was given a partial with the positional arguments (3,), but the first argument is the rank; give them*",
    ),
    ("perf(Sum().work)", "perf was given the method Sum.work bound to an object that the ranks do not have; make it *"),
    (
        "perf(type('Bare', (Workload,), {'work': None, 'build': None}))",
        "Bare is not a dataclass, so its parameters are unknown; write @dataclass(frozen=True, kw_only=True)*",
    ),
    ("def bare(): pass\n    perf(bare)", "each rank calls *.bare(rank), but it is defined as bare(): too many *"),
    ("perf(42)", "perf was given 42, which is neither a workload nor a function at module level*"),
    ("perf(Sum(), side=3)", "perf got a Sum object and side; give parameters to the workload: perf(Sum(side=*"),
    ("perf(step, on=0)", "perf was called with on=0; give the fixture perf_ranks or a number of at least 1"),
    ("perf(step, on='two')", "perf was called with on='two'; give the fixture perf_ranks or a number of at least 1"),
    ("perf(step, on=True)", "perf was called with on=True; give the fixture perf_ranks or a number of at least 1"),
    ("assert 1 == 2", "E       assert 1 == 2"),
    ("pass", "perf was never called, so nothing was measured; call perf(...) once, or remove it from the arguments"),
]
FORGOTTEN = "the case is one of 2 ranks, but perf was called with on=*; call it with on=perf_ranks"


def test_what_perf_refuses(pytester, monkeypatch):
    """With ``-W error`` too: pytest-benchmark does not warn that such a case left its fixture unused."""
    tests = "".join(f"def test_bad{number}(perf):\n    {body}\n" for number, (body, _) in enumerate(REFUSED))
    for number, on in enumerate(["", ", on=1", ", on=None"]):
        tests += f"@world_sizes(2)\ndef test_forgot{number}(perf, ranks):\n    perf(step{on})\n"
    repo = repository(pytester, monkeypatch, tests)
    for options in ([], ["-W", "error"]):
        found = repo.run(*options)
        assert found.parseoutcomes() == {"failed": len(REFUSED) + 3}
        found.stdout.fnmatch_lines([message for _, message in REFUSED] + [FORGOTTEN] * 3)
        assert "Traceback" not in found.stdout.str()


def test_a_test_may_say_why_it_never_calls_perf(pytester, monkeypatch):
    tests = """
import pytest

def test_skips(perf):
    pytest.skip("not today")

@pytest.mark.xfail(reason="to be written", strict=True)
def test_expected(perf):
    raise NotImplementedError
"""
    repo = repository(pytester, monkeypatch, tests)
    repo.run().assert_outcomes(skipped=1, xfailed=1)
    assert repo.driver.jobs == []


@pytest.mark.parametrize("options", [[], ["--benchmark-disable"]])
def test_perf_and_benchmark_do_not_share_a_test(pytester, monkeypatch, options):
    bodies = ["perf(step); benchmark(int)", "benchmark(int); perf(step, on=2)", "benchmark(int)"]
    tests = "".join(f"def test_{n}(perf, benchmark):\n    {body}\n" for n, body in enumerate(bodies))
    tests += "def test_more(perf, benchmark):\n    benchmark.extra_info['seed'] = 7\n    perf(step, on=3)\n"
    repo = repository(pytester, monkeypatch, tests)
    found = repo.run(*options)
    found.assert_outcomes(failed=3, passed=1)
    found.stdout.fnmatch_lines(
        [
            "perf and benchmark were both used in one test, and a case has one record; "
            "use perf for code on ranks and benchmark for a function of this process, each in its own test"
        ]
        * 3
    )
    assert "Traceback" not in found.stdout.str()
    measured = [job.world_size for job in repo.driver.jobs if isinstance(job.workload, FunctionWorkload)]
    assert measured == [1, 3]


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
    found.stdout.fnmatch_lines(
        ["*fixtures of perfsuite were requested by getfixturevalue; add perf to the arguments of the test"]
    )


def test_wrong_ranks_and_platforms_get_one_sentence(pytester, monkeypatch):
    tests = """
import pytest

@world_sizes(2)
def test_decorated(perf_ranks):
    pass

def test_short(ranks):
    pass

@pytest.mark.parametrize("perf_ranks", [2, 0], indirect=True)
def test_given(perf_ranks):
    assert perf_ranks.world_size == 2

@pytest.mark.parametrize("perf_ranks", [None], indirect=True)
def test_case(perf, perf_ranks):
    pass

@pytest.mark.parametrize("perf_platform", ["nowhere"], indirect=True)
def test_place(perf_platform):
    pass
"""
    found = repository(pytester, monkeypatch, tests).run()
    found.assert_outcomes(passed=1, errors=5)
    found.stdout.fnmatch_lines(
        [
            "_* ERROR at setup of test_decorated _*",
            "test_decorated takes perf_ranks but not perf, so it is not a case and has no ranks; add perf to its *",
            "_* ERROR at setup of test_short _*",
            "test_short takes ranks but not perf, *",
            "_* ERROR at setup of test_given* _*",
            "ranks=0 is not a number of ranks; give a whole number of at least 1",
            "_* ERROR at setup of test_case* _*",
            "ranks=None is not a number of ranks; give a whole number of at least 1",
            "_* ERROR at setup of test_place* _*",
            "platform 'nowhere' is unknown; *",
        ],
        consecutive=True,
    )


def test_a_conftest_with_fixtures_of_the_short_names_keeps_them_and_perf_has_its_own(pytester, monkeypatch):
    theirs = """
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
    repo = repository(pytester, monkeypatch, tests, conftest=theirs)
    repo.run("--benchmark-disable").assert_outcomes(passed=6)
    (pytester.path / "test_it.py").write_text(
        "from perfsuite import world_sizes\n\n@world_sizes(2)\ndef test_wrong(perf, ranks):\n    perf(len, on=ranks)\n"
    )
    repo.run().stdout.fnmatch_lines(["*@world_sizes sets 'perf_ranks', which the test does not take; add it to*"])


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
    tests = "@world_sizes(2, 4, extended=(4,))\ndef test_ours(perf, ranks):\n    perf(step, on=ranks)\n"
    repo = repository(pytester, monkeypatch, tests)
    for expression, selected in (
        ("perf_extended and extended", "test_ours[cpu-ws4]"),
        ("perf_world_size(n=2) and world_size(n=2) and platform(name='cpu')", "test_ours[cpu-ws2]"),
    ):
        assert ids(repo.run("--collect-only", "-q", "-m", expression)) == [selected]
