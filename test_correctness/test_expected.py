"""What ``xfail`` and ``pytest.raises`` see of a case that fails: the exception that its ranks raised."""

import re

import pytest

from perfsuite.base.errors import OutOfMemory, RanksFailed, UnsupportedCase, WrongResult, also
from perfsuite.runtime.failures import RankFailure, exception_of
from test_correctness.helpers.scripted_driver import measurement, repository


class Own(ValueError):
    """Wants more than a message."""

    def __init__(self, what, why):
        super().__init__(what, why)


def rank(number, error, *, kind="exception", state="raised"):
    types = [[each.__module__, each.__qualname__] for each in type(error).__mro__[:-2]] if error else ()
    what = f"{type(error).__name__}: {error}" if error else "killed by SIGKILL"
    return RankFailure(rank=number, host="here", state=state, what=what, phase="timing", kind=kind, types=types)


def raised(*failures):
    return exception_of(len(failures), failures, "")


ZERO, KEY, OS = ZeroDivisionError("by zero"), KeyError("nothing"), OSError(28, "disk full")


@pytest.mark.parametrize("error", [ZERO, KEY, OS, Own("a", "b"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")])
def test_the_exception_of_all_ranks_is_one_of_theirs_too(error):
    found = raised(rank(0, error), rank(1, error))
    assert isinstance(found, RanksFailed)
    assert isinstance(found, type(error))
    assert str(found).startswith(f"rank 0 on here raised {type(error).__name__}: ")
    assert type(found).__name__ == "RanksFailed"


def test_a_class_that_this_process_does_not_have_is_what_it_inherits_from():
    error = rank(0, Own("a", "b"))
    elsewhere = [["nowhere", "Own"], ["test_correctness.test_expected", "Missing"], *error.types[1:]]
    found = raised(RankFailure(**{**vars(error), "types": elsewhere}))
    assert isinstance(found, ValueError)
    assert not isinstance(found, Own)
    assert type(raised(RankFailure(**{**vars(error), "types": [["nowhere", "Own"]]}))) is RanksFailed


def test_the_exit_of_a_rank_does_not_end_the_run():
    found = raised(rank(0, pytest.exit.Exception("leave", 3)))
    assert isinstance(found, RanksFailed)
    assert not isinstance(found, pytest.exit.Exception)
    assert str(found).startswith("rank 0 on here raised Exit: leave")


@pytest.mark.parametrize("other", [rank(1, None, state="died", kind=""), rank(1, None, state="hung", kind="")])
def test_a_rank_that_died_or_hung_is_nothing_that_an_exception_explains(other):
    found = raised(rank(0, ZERO), other)
    assert not isinstance(found, ZeroDivisionError)
    assert found.raised == ()


def test_of_several_exceptions_the_lowest_ranks_stands_for_all():
    found = raised(rank(1, KEY), rank(0, ZERO), rank(2, KEY))
    assert isinstance(found, ZeroDivisionError)
    assert not isinstance(found, KeyError)
    assert found.raised == (ZeroDivisionError, KeyError)


class Sharp(WrongResult):
    pass


def test_a_class_of_the_users_own_among_perfsuites_is_seen():
    found = raised(rank(0, Sharp("it is wrong"), kind="wrong_result"))
    assert isinstance(found, Sharp)


@pytest.mark.parametrize("error", [StopIteration(), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_steer_pytest_is_not_raised_there(error):
    found = raised(rank(0, error))
    assert isinstance(found, RanksFailed)
    assert not isinstance(found, type(error))


def test_classes_that_do_not_go_together_leave_the_failure():
    class Demanding(Exception):
        def __new__(cls, one, two):
            return super().__new__(cls, one)

    assert also(RanksFailed, Demanding) is RanksFailed


IMPORTS = "import pytest\nfrom perfsuite import WrongResult, PerfsuiteError\n"
TEST = """
@pytest.mark.xfail({mark})
def test_{number}(perf):
    perf(step, fault={fault!r})
"""
FAILS = {
    "zero": raised(rank(0, ZERO), rank(1, ZERO)),
    "zero and key": raised(rank(0, ZERO), rank(1, KEY)),
    "key and zero": raised(rank(0, KEY), rank(1, ZERO)),
    "zero and death": raised(rank(0, ZERO), rank(1, None, state="died", kind="")),
    "wrong": raised(rank(0, WrongResult("wrong"), kind="wrong_result")),
    "memory": OutOfMemory("OOM at 44 GiB of 48 GiB"),
    "unsupported": UnsupportedCase("not here"),
    "nothing": None,
}
MARKS = [
    ("zero", "", "xfailed"),
    ("zero", "strict=True", "xfailed"),
    ("zero", "raises=ZeroDivisionError", "xfailed"),
    ("zero", "raises=ArithmeticError, strict=True", "xfailed"),
    ("zero", "raises=(KeyError, ZeroDivisionError)", "xfailed"),
    ("zero", "raises=PerfsuiteError", "xfailed"),
    ("zero", "raises=KeyError", "failed"),
    ("zero", "raises=pytest.RaisesExc(ZeroDivisionError, match='by zero')", "xfailed"),
    ("zero", "False, reason='elsewhere', raises=ZeroDivisionError", "failed"),
    ("zero", "True, reason='here', raises=ZeroDivisionError", "xfailed"),
    ("zero and key", "", "xfailed"),
    ("zero and key", "raises=(KeyError, ZeroDivisionError)", "xfailed"),
    ("zero and key", "raises=ZeroDivisionError", "failed"),
    ("key and zero", "raises=ZeroDivisionError", "failed"),
    ("key and zero", "raises=(LookupError, ArithmeticError)", "xfailed"),
    ("zero and death", "raises=ZeroDivisionError", "failed"),
    ("wrong", "raises=WrongResult", "xfailed"),
    ("wrong", "raises=AssertionError", "failed"),
    ("memory", "raises=RuntimeError", "xfailed"),
    ("memory", "raises=KeyError", "failed"),
    ("memory", "strict=True", "xfailed"),
    ("unsupported", "raises=KeyError", "skipped"),
    ("nothing", "raises=KeyError", "xpassed"),
    ("nothing", "raises=KeyError, strict=True", "failed"),
]


def test_xfail_sees_what_the_ranks_raised(pytester, monkeypatch):
    def script(job):
        error = FAILS[job.workload.parameters()["fault"]]
        if error is not None:
            raise error
        return measurement(job)

    # pytest has RaisesExc from 8.4 on
    marks = [each for each in MARKS if hasattr(pytest, "RaisesExc") or "RaisesExc" not in each[1]]
    tests = [TEST.format(number=number, mark=mark, fault=fault) for number, (fault, mark, _) in enumerate(marks)]
    found = repository(pytester, monkeypatch, IMPORTS + "".join(tests), script).run("-v")
    said = re.findall(r"::test_(\d+)\S* (XFAIL|FAILED|SKIPPED|XPASS)", found.stdout.str().partition("= FAILURES")[0])
    words = {"XFAIL": "xfailed", "FAILED": "failed", "SKIPPED": "skipped", "XPASS": "xpassed"}
    told = {int(number): words[word] for number, word in said}
    assert [(*each[:2], told.get(number)) for number, each in enumerate(marks)] == marks


RAISES = """
import pytest

def test_one(perf):
    with pytest.raises(ZeroDivisionError, match="by zero"):
        perf(step)

def test_either(perf):
    with pytest.raises((KeyError, ZeroDivisionError)):
        perf(step)

def test_another(perf):
    with pytest.raises(OSError):
        perf(step)
"""


def test_pytest_raises_sees_it_too(pytester, monkeypatch):
    def script(job):
        raise FAILS["zero"]

    found = repository(pytester, monkeypatch, RAISES, script).run("-rA")
    found.assert_outcomes(passed=2, failed=1)
    found.stdout.fnmatch_lines(["FAILED test_it.py::test_another[[]cpu] - Failed: rank 0 on here raised ZeroDivision*"])
