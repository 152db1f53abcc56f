"""The fixtures of a performance test: ``perf``, ``perf_ranks`` and ``perf_platform``.

``ranks`` and ``platform`` are short names of the last two.  A project that has fixtures of these names keeps its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from perfsuite.base.errors import DeviceUnusable, InvalidParameter, PerfsuiteError, UnsupportedCase, first_line
from perfsuite.plugin import projecting
from perfsuite.plugin.benchmark import ONE_RECORD, clock_key, feed, feed_nothing, require_own_benchmark
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

NEVER_CALLED = (
    "perf was asked for and never called: nothing was measured; call perf(...) once, or drop it from the arguments"
)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of ranks that a case is for; hand it to ``perf`` as ``on=ranks``."""

    world_size: int


@dataclass(kw_only=True)
class CaseState:
    """What became of one set-up of a perf test; kept in the stash of its item for the hooks that report it."""

    called: bool = False
    unfit: str = ""
    """Why the case does not fit on its devices, where it is projected all the same; empty where it does."""
    result: Result | None = None
    log_tails: dict[int, str] = field(default_factory=dict)
    """Rank -> last lines of its log, of a failed case."""


state_key = pytest.StashKey[CaseState]()


def params_of(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a test, those of our fixtures by their short names."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    ours = {short: params[name] for name, short in SHORT_NAMES.items() if name in params}
    return {name: value for name, value in params.items() if name not in SHORT_NAMES} | ours


def _platform_of(request: pytest.FixtureRequest) -> DeviceModel:
    """Return the platform of this case: name, title and the rates of its data sheet."""
    suite = suite_of(request.config)
    name = params_of(request.node).get("platform", suite.machine.name)
    return suite.machine.model if name == suite.machine.name else suite.catalog.find(name)


def _ranks_of(request: pytest.FixtureRequest) -> Ranks:
    """Return the ranks of this case, from ``@world_sizes`` or an indirect parametrization."""
    count = params_of(request.node).get("ranks")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidParameter(f"ranks={count!r} is not a number of ranks; give a whole number of at least 1")
    return Ranks(world_size=count)


# No short name asks for a long one: which fixtures a test needs is settled before an installed plugin's of the same
# short name gives way (collisions.py).
perf_platform, platform = (pytest.fixture(name=name)(_platform_of) for name in ("perf_platform", "platform"))
perf_ranks, ranks = (pytest.fixture(name=name)(_ranks_of) for name in ("perf_ranks", "ranks"))


class Perf(Protocol):
    """What the fixture ``perf`` is; for annotations in tests."""

    def __call__(self, what: Any, /, on: Ranks | int | None = None, **parameters: Any) -> Result:
        """Time ``what`` on these ranks and return the result."""


@pytest.fixture
def perf(request: pytest.FixtureRequest, perf_platform: DeviceModel, benchmark: Any) -> Iterator[Perf]:
    """Time a workload on the ranks of this case: ``perf(what, on=None, **parameters) -> Result``.

    ``what`` is a :class:`perfsuite.Workload`, a class of them that ``parameters`` are the fields of, or a function at
    module level that gets a rank and ``parameters`` and returns one iteration as a callable; a functools.partial of
    either adds its keywords to ``parameters``.  ``on`` is the fixture ``ranks`` or a number of ranks; without it there
    is one rank.  To be called once per test.
    """
    item: pytest.Function = request.node
    require_own_benchmark(benchmark)
    benchmark.params = params_of(item) or None  # --benchmark-group-by=param:ranks
    state = item.stash[state_key] = CaseState()  # of this set-up: plugins that run a failed test again make another

    def run(what: Any, /, on: Ranks | int | None = None, **parameters: Any) -> Result:
        __tracebackhide__ = True
        if state.called:
            raise InvalidParameter("perf was called twice in one test; one test is one case: parametrize it instead")
        state.called = True
        if getattr(benchmark, "_mode", None):  # without it pytest-benchmark says so, after everything was measured
            raise InvalidParameter(ONE_RECORD)
        if not is_case(item):
            raise InvalidParameter("perf was asked for by getfixturevalue; name it among the arguments of the test")
        from perfsuite.run.session import Case  # there since collection

        suite, workload = suite_of(item.config), make_workload(what, parameters)
        budget = budget_of(item, suite.settings.budget)
        case = Case(
            id=item.nodeid,
            workload=workload,
            world_size=_world_size(item, on),
            budget=replace(budget, sustain_s=budget.sustain_s or workload.sustained_s()),
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
    if not getattr(benchmark, "_mode", None):  # it was not measured, or failed before that
        feed_nothing(benchmark)


def make_workload(what: Any, parameters: Mapping[str, Any]) -> Workload:
    """The workload that ``perf(what, **parameters)`` means; InvalidParameter when it means none."""
    if isinstance(what, Workload):
        if not hasattr(what, "__dataclass_fields__"):
            raise InvalidParameter(
                f"{type(what).__name__} is no dataclass, so nobody knows its parameters; "
                "write @dataclass(frozen=True, kw_only=True) above it"
            )
        if parameters:
            raise InvalidParameter(
                f"perf got {', '.join(parameters)} beside a finished {type(what).__name__}; "
                f"give it to the workload: perf({type(what).__name__}({next(iter(parameters))}=...), ...)"
            )
        return what
    if isinstance(what, type) and issubclass(what, Workload):
        return make_workload(what(**parameters), {})
    if inspect.isfunction(what):
        return FunctionWorkload(function=what, arguments=parameters)
    if isinstance(what, functools.partial):
        if what.args:
            raise InvalidParameter(
                f"perf was given a partial with the positional arguments {what.args!r:.60}, but the first argument is "
                "the rank; give them by name"
            )
        return make_workload(what.func, {**what.keywords, **parameters})
    if inspect.ismethod(what):
        raise InvalidParameter(
            f"perf was given the method {what.__qualname__} bound to an object that the ranks do not have; "
            "make it a function at module level and pass what it needs of the object as parameters"
        )
    raise InvalidParameter(
        f"perf was given {what!r:.60}, which is neither a workload nor a function at module level; "
        "the ranks find only those by name"
    )


def _world_size(item: pytest.Function, on: Ranks | int | None) -> int:
    """Ranks to run on; InvalidParameter when the call contradicts what the id of the case says."""
    said = next(
        (value for name in ("perf_ranks", "ranks") if isinstance(value := item.funcargs.get(name), Ranks)), None
    )
    count = on.world_size if isinstance(on, Ranks) else on
    if said is not None and count != said.world_size:
        raise InvalidParameter(
            f"the case is one of {said.world_size} ranks, but perf was called with on={count}; call it with on=ranks"
        )
    if count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidParameter(f"perf was called with on={on!r}; give the fixture ranks or a number of at least 1")
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
    except DeviceUnusable as unusable:  # the first case fails for it; those that need as many devices are skipped
        suite.unusable = case.world_size, f"not tried, as in {case.id}: {first_line(unusable)}"
        raise
