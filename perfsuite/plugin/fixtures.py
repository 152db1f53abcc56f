"""The fixtures of a performance test: ``perf``, ``perf_ranks`` and ``perf_platform``.

``ranks`` and ``platform`` are short names of the last two; ini perf_short_names=false switches them off.  Fixtures of
these names in the project are used first.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from perfsuite.base.errors import DeviceUnusable, InvalidParameter, PerfsuiteError, UnsupportedCase, first_line
from perfsuite.plugin import projecting
from perfsuite.plugin.benchmark import ONE_RECORD, REMEDY, clock_key, feed, feed_nothing, require_own_benchmark
from perfsuite.plugin.collect import is_case
from perfsuite.plugin.options import budget_of
from perfsuite.plugin.state import suite_of
from perfsuite.plugin.sweep import SHORT_NAMES
from perfsuite.record.workload import FunctionWorkload, Workload

if TYPE_CHECKING:
    from perfsuite.platforms import DeviceModel
    from perfsuite.plugin.suite import Suite
    from perfsuite.record.result import Result
    from perfsuite.run.session import Case

NOT_AN_ARGUMENT = "fixtures of perfsuite were requested by getfixturevalue; add perf to the arguments of the test"
NEVER_CALLED = "perf was never called, so nothing was measured; call perf(...) once, or remove it from the arguments"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of ranks that a case is for; hand it to ``perf`` as ``on=ranks``."""

    world_size: int


@dataclass(kw_only=True)
class CaseState:
    """State of one set-up of a perf test, in the stash of its item for the hooks that report it."""

    called: bool = False
    unfit: str = ""  # Reason why a projected case does not fit on its devices; empty if it fits.
    result: Result | None = None
    log_tails: dict[int, str] = field(default_factory=dict)  # Rank -> last lines of its log, for a failed case.


state_key = pytest.StashKey[CaseState]()


def params_of(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a test, those of perfsuite's fixtures by their short names."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    own = {short: params[name] for name, short in SHORT_NAMES.items() if name in params}
    return {name: value for name, value in params.items() if name not in SHORT_NAMES} | own


def _require_argument(request: pytest.FixtureRequest) -> None:
    """Raise FixtureLookupError if a test other than a case only tries the name, as tests of DeepSpeed do."""
    if not is_case(request.node) and request.fixturename not in getattr(request.node, "fixturenames", ()):
        raise pytest.FixtureLookupError(str(request.fixturename), request, NOT_AN_ARGUMENT)


def _platform_of(request: pytest.FixtureRequest) -> DeviceModel:
    """Return the platform of this case: name, title and the rates of its data sheet."""
    _require_argument(request)
    suite = suite_of(request.config)
    name = params_of(request.node).get("platform", suite.machine.name)
    try:
        return suite.machine.model if name == suite.machine.name else suite.catalog.find(name)
    except PerfsuiteError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _ranks_of(request: pytest.FixtureRequest) -> Ranks:
    """Return the ranks of this case, from ``@world_sizes`` or an indirect parametrization."""
    _require_argument(request)
    count = params_of(request.node).get("ranks")
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return Ranks(world_size=count)
    problem = f"ranks={count!r} is not a number of ranks; give a whole number of at least 1"
    if "ranks" not in params_of(request.node):
        problem = (
            f"{request.node.name} takes {request.fixturename} but not perf, so it is not a case and has no ranks; "
            f"add perf to its arguments and @world_sizes(2, 4) above it, or remove {request.fixturename}"
        )
    raise pytest.fail.Exception(problem, pytrace=False)


perf_platform = pytest.fixture(name="perf_platform")(_platform_of)
perf_ranks = pytest.fixture(name="perf_ranks")(_ranks_of)


class ShortNames:
    """The fixtures ``ranks`` and ``platform``, registered as a plugin unless ini perf_short_names is false.

    They do not request the long names: pytest selects the fixtures of a test before an installed plugin's fixture of
    the same short name is moved behind (collisions.py).
    """

    @pytest.fixture
    def platform(self, request: pytest.FixtureRequest) -> DeviceModel:
        """Return the platform of this case; short for ``perf_platform``."""
        return _platform_of(request)

    @pytest.fixture
    def ranks(self, request: pytest.FixtureRequest) -> Ranks:
        """Return the ranks of this case; short for ``perf_ranks``."""
        return _ranks_of(request)


class Perf(Protocol):
    """Type of the fixture ``perf``, for annotations in tests."""

    def __call__(self, workload: Any, /, on: Ranks | int | None = None, **parameters: Any) -> Result:
        """Time ``workload`` on these ranks and return the result."""


@pytest.fixture
def perf(request: pytest.FixtureRequest, perf_platform: DeviceModel, benchmark: Any) -> Iterator[Perf]:
    """Time a workload on the ranks of this case: ``perf(workload, on=None, **parameters) -> Result``.

    ``workload`` is a :class:`perfsuite.Workload`, or a function at module level that takes a rank and ``parameters``
    and returns one iteration as a callable.  ``on`` is the fixture ``perf_ranks`` or a number of ranks (default: 1).
    Call it once per test.
    """
    _require_argument(request)
    item: pytest.Function = request.node
    require_own_benchmark(benchmark)
    benchmark.params = params_of(item) or None  # --benchmark-group-by=param:ranks
    state = item.stash[state_key] = CaseState()  # plugins that run a failed test again set it up again

    def run(workload: Any, /, on: Ranks | int | None = None, **parameters: Any) -> Result:
        __tracebackhide__ = True
        if state.called:
            raise InvalidParameter("perf was called twice in one test, but one test is one case; parametrize the test")
        state.called = True
        if getattr(benchmark, "_mode", None):  # else pytest-benchmark fails after everything was measured
            raise InvalidParameter(ONE_RECORD)
        from perfsuite.run.session import Case  # imported since collection

        suite, timed = suite_of(item.config), make_workload(workload, parameters)
        if suite.place != (os.getpid(), threading.get_ident()):
            raise InvalidParameter(
                f"perf was called in {'a thread' if suite.place[0] == os.getpid() else 'a process'} that a plugin such "
                "as pytest-forked, pytest-parallel or pytest-run-parallel started for the test, and only pytest's own "
                f"can record a case: run without that plugin, {REMEDY}"
            )
        budget = budget_of(item, suite.settings.budget)
        case = Case(
            id=item.nodeid,
            workload=timed,
            world_size=_world_size(item, on),
            budget=replace(budget, sustain_s=budget.sustain_s or timed.sustained_s()),
            platform=perf_platform.name,
            fresh=suite.settings.fresh,
            test_module=item.module.__name__,
        )
        try:
            state.result = _run(suite, case, perf_platform, state.unfit)
        except BaseException as error:
            if isinstance(error, PerfsuiteError) and suite.session:
                state.log_tails = suite.session.log_tails()
            raise
        if state.result.measurement is not None:
            feed(benchmark, item.config.stash[clock_key], state.result)
        return state.result

    yield run
    if not getattr(benchmark, "_mode", None):  # it was not measured, or failed before
        feed_nothing(benchmark)


def make_workload(subject: Any, parameters: Mapping[str, Any]) -> Workload:
    """Return the workload of ``perf(subject, **parameters)``.  Raises InvalidParameter if it is not one."""
    name = type(subject).__name__
    if isinstance(subject, Workload):
        if not hasattr(subject, "__dataclass_fields__"):
            raise InvalidParameter(
                f"{name} is not a dataclass, so its parameters are unknown; "
                "write @dataclass(frozen=True, kw_only=True) above it"
            )
        if parameters:
            raise InvalidParameter(
                f"perf got a {name} object and {', '.join(parameters)}; "
                f"give parameters to the workload: perf({name}({next(iter(parameters))}=...), ...)"
            )
        return subject
    if isinstance(subject, type) and issubclass(subject, Workload):
        return make_workload(subject(**parameters), {})
    if inspect.isfunction(subject):
        signature = inspect.signature(subject, follow_wrapped=False)
        try:
            signature.bind("rank", **parameters)
        except TypeError as error:
            call = ", ".join(["rank", *(f"{each}=..." for each in parameters)])
            defined = f"it is defined as {subject.__name__}{signature}: {error}"
            raise InvalidParameter(f"each rank calls {subject.__qualname__}({call}), but {defined}") from None
        return FunctionWorkload(function=subject, arguments=parameters)
    if isinstance(subject, functools.partial):
        if subject.args:
            raise InvalidParameter(
                f"perf was given a partial with the positional arguments {subject.args!r:.60}, but the first argument "
                "is the rank; give them by name"
            )
        return make_workload(subject.func, {**subject.keywords, **parameters})
    if inspect.ismethod(subject):
        raise InvalidParameter(
            f"perf was given the method {subject.__qualname__} bound to an object that the ranks do not have; "
            "make it a function at module level and pass values of the object as parameters"
        )
    raise InvalidParameter(
        f"perf was given {subject!r:.60}, which is neither a workload nor a function at module level; move it to "
        "module level, where the ranks find it by name"
    )


def _world_size(item: pytest.Function, on: Ranks | int | None) -> int:
    ranks = next(
        (value for name in ("perf_ranks", "ranks") if isinstance(value := item.funcargs.get(name), Ranks)), None
    )
    count = on.world_size if isinstance(on, Ranks) else on
    if ranks is not None and count != ranks.world_size:
        raise InvalidParameter(
            f"the case is one of {ranks.world_size} ranks, but perf was called with on={count}; call it "
            "with on=perf_ranks"
        )
    if count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidParameter(f"perf was called with on={on!r}; give the fixture perf_ranks or a number of at least 1")
    return count


def _run(suite: Suite, case: Case, platform: DeviceModel, unfit: str) -> Result:
    session = suite.session
    assert session is not None, "a perf case runs only after it was collected"
    why_not = unfit or suite.why_not(platform, case.world_size)
    dtype = case.workload.native_dtype()
    if not why_not and dtype and not suite.machine.natively(dtype):
        why_not = suite.machine.why_not_native(dtype)
    needs = case.workload.needs_accelerator()
    if not why_not and needs and suite.machine.name == "cpu":
        why_not = f"{needs} needs an accelerator; leave it out on a cpu"
    if why_not:
        projecting.keep(suite, case, why_not)
        raise UnsupportedCase(why_not)
    try:
        with suite.running_case():
            return session.run(case)
    except DeviceUnusable as unusable:  # this case fails; later cases with as many devices are skipped
        suite.unusable = case.world_size, f"not tried, as in {case.id}: {first_line(unusable)}"
        raise
