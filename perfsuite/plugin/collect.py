"""Collection: make cases from platforms, sizes and world sizes, with their ids, marks and skips."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite import suite as shipped
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.plugin import collisions
from perfsuite.plugin.gate_options import asked_on_the_command_line, gate_options_key
from perfsuite.plugin.options import SHORT_MARKERS, budget_of, runs_tests, settings_key, short_names
from perfsuite.plugin.state import suite_key, suite_of
from perfsuite.plugin.sweep import SHORT_NAMES, Scale, Sweep, read_sweep

if TYPE_CHECKING:
    from perfsuite.platforms.base import DeviceModel
    from perfsuite.plugin.suite import Suite


_LEFT_OUT = "perfsuite_left_out"
_left_out_key = pytest.StashKey[int]()
Definitions = Mapping[str, Sequence[Any]]  # The fixtures of a test by name; the last one of a name is used.


def _is_perf(fixturenames: Iterable[str], definitions: Definitions) -> bool:
    """Return whether a test uses perfsuite's ``perf``, which requests ``perf_platform`` and ``benchmark``.

    A fixture ``perf`` of a conftest.py or another plugin does not, and its tests are not changed.
    """
    if not {"perf", "perf_platform", "benchmark"} <= set(fixturenames):
        return False
    return not definitions or collisions.is_ours(definitions, "perf")  # pytest may store definitions elsewhere


def definitions_of(item: pytest.Item) -> Definitions:
    """Return the fixtures of a collected test."""
    # pytest has no public way to get the fixtures of a test.
    found: Definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return found


def is_case(item: pytest.Item) -> bool:
    """Return whether a collected test is a perf case."""
    return _is_perf(getattr(item, "fixturenames", ()), definitions_of(item))


def cases_of(session: pytest.Session) -> list[pytest.Item]:
    """Return the perf cases among the tests that will run."""
    return [item for item in session.items if is_case(item)]


def add_markers(item: pytest.Item) -> None:
    """Give a perf case the marker ``perf`` and its markers by both names, before ``-m`` selects."""
    item.add_marker("perf")
    for short in SHORT_MARKERS if short_names(item.config) else ():
        own, other = item.get_closest_marker(f"perf_{short}"), item.get_closest_marker(short)
        if (mark := own or other) is not None and not (own and other):
            missing: pytest.MarkDecorator = getattr(pytest.mark, short if own else f"perf_{short}")
            item.add_marker(missing.with_args(*mark.args, **mark.kwargs))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Give a module of the installed suite the id that it has in the repository, wherever the environment is.

    Baselines know cases by this id.
    """
    if not module_path.is_relative_to(shipped.FOLDER):
        return None
    node = module_path.relative_to(shipped.FOLDER).as_posix()
    module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=node)
    return module


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[Any]:
    """Parametrize platform, ranks, size and dtype in one call, so that ids have the form ``s4000-ws8-64MiB-bf16``.

    This happens before the first parametrization of another plugin.  A test is not a case if another plugin
    parametrizes ``perf`` itself; an earlier parametrization by perfsuite is then removed.
    """
    __tracebackhide__ = True
    if not _is_perf(metafunc.fixturenames, getattr(metafunc, "_arg2fixturedefs", {})):
        return (yield)
    parametrize, foreign = metafunc.parametrize, False
    suite: Suite | None = None
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # The calls of other plugins so far.

    def begin() -> None:
        nonlocal suite
        if suite is not None or foreign:
            return
        suite = suite_of(metafunc.config)
        suite.asked = suite.naming = True
        collisions.take_own(metafunc.config, getattr(metafunc, "_arg2fixturedefs", {}))
        if suite.prepare():
            try:
                _generate(metafunc, suite, parametrize)
            except ConfigurationError as error:
                raise pytest.fail.Exception(f"{metafunc.definition.nodeid}: {error}", pytrace=False) from None

    def watch(*args: Any, **named: Any) -> None:
        nonlocal foreign
        if "perf" in _names(args[0] if args else named["argnames"]) and not named.get("indirect"):
            foreign, metafunc._calls = True, []  # pytest has no public way
            if suite is not None:
                suite.naming = False
            for earlier, settings in others:
                parametrize(*earlier, **settings)
        begin()
        others.append((args, named))
        parametrize(*args, **named)

    metafunc.parametrize = watch  # type: ignore[method-assign]
    try:
        returned = yield
        begin()
        return returned
    finally:
        metafunc.parametrize = parametrize  # type: ignore[method-assign]
        if suite is not None:
            suite.naming = False


def _names(written: str | Iterable[str]) -> list[str]:
    return [name.strip() for name in written.split(",")] if isinstance(written, str) else list(written)


def pytest_make_parametrize_id(config: pytest.Config, val: object) -> str | None:
    """Return the id of a value that pytest would only number, in perf cases; None for other tests."""
    suite = config.stash.get(suite_key, None)
    if suite is None or not suite.naming:
        return None
    from perfsuite.runtime.values import token  # not imported in runs without a perf case

    return token(val)


def _generate(metafunc: pytest.Metafunc, suite: Suite, parametrize: Callable[..., None]) -> None:
    elsewhere = _parametrized(metafunc)
    definitions = getattr(metafunc, "_arg2fixturedefs", {})
    foreign = {
        short
        for short in SHORT_NAMES.values()
        if not short_names(metafunc.config) or (short in definitions and not collisions.is_ours(definitions, short))
    }
    sweep = read_sweep(metafunc.definition, metafunc.fixturenames, elsewhere, foreign)
    if suite.settings.shapes is not None:
        sweep = suite.settings.shapes.apply(metafunc.function.__name__, sweep)
    # A test without @world_sizes runs on one rank, unless the user parametrizes ranks.
    filled = {
        long: short if short in set(metafunc.fixturenames) - foreign else long for long, short in SHORT_NAMES.items()
    }
    ranks = (filled["perf_ranks"],) if sweep.world_sizes else ()
    platforms = () if filled["perf_platform"] in elsewhere else (filled["perf_platform"],)
    arguments = (*platforms, *ranks, *sweep.arguments)
    if not arguments:
        return
    cases = [case for model in suite.platforms for case in _cases(sweep, model, suite, bool(platforms))]
    if not cases:
        # pytest would make a skipped item of an empty list.
        cases = [pytest.param(*[None] * len(arguments), marks=pytest.mark.perf_nothing)]
    parametrize(arguments, cases, indirect=[*platforms, *ranks])


def _cases(sweep: Sweep, model: DeviceModel, suite: Suite, with_platform: bool) -> Iterable[Any]:
    platform_mark = pytest.mark.perf_platform(name=model.name)
    platform = (model.name,) if with_platform else ()
    marks: dict[tuple[int, bool, bool], Sequence[pytest.MarkDecorator]] = {}
    for point in sweep.points(scale_of(model, suite), suite.launch_sizes(model)):
        count, key = point.world_size, (point.needs, point.extended, point.acceptance)
        if key not in marks:  # equal for all sizes and dtypes: 10,000 cases share a few marks
            why_not = suite.why_not(model, point.needs)
            marks[key] = [
                platform_mark,
                pytest.mark.perf_world_size(n=point.needs),
                *([pytest.mark.perf_extended] if point.extended else []),
                *([pytest.mark.acceptance] if point.acceptance else []),
                # A projected case starts, returns its workload, and is skipped then.
                *([pytest.mark.skip(reason=why_not)] if why_not and not suite.projects else []),
            ]
            if not why_not:
                suite.start_workers()
        yield pytest.param(
            *platform,
            *(() if count is None else (count,)),
            *point.values,
            id="-".join(token for token in (*platform, point.id) if token),
            marks=marks[key],
        )


def scale_of(model: DeviceModel, suite: Suite) -> Scale:
    """Return the scale of a platform's cases: of --perf-scale, else small on a CPU, where full sizes take hours.

    The session's own platform may also be simulated on a CPU.
    """
    if suite.settings.scale:
        return suite.settings.scale
    if model.name == suite.machine.name:
        return suite.machine.scale
    return "small" if model.family == "cpu" else "full"


def _parametrized(metafunc: pytest.Metafunc) -> frozenset[str]:
    """Return the arguments with values from parametrize marks, and ``dtype`` if the user has such a fixture."""
    names: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        written = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        names.update(_names(written))
        if not mark.kwargs.get("indirect"):
            names.discard("platform")  # the user's own values, not names of platforms
    # pytest has no public way to find a fixture by name; without this attribute none is assumed.
    definitions = getattr(metafunc, "_arg2fixturedefs", {})
    return frozenset(names | ({"dtype"} & set(definitions)))


def refuse_wrong_cases(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Raise UsageError for a wrong set-up or marker, even if all perf cases will be deselected."""
    suite = config.stash.get(suite_key, None)
    if suite is not None and suite.problem is not None and suite.asked:
        raise pytest.UsageError(str(suite.problem))
    cases = [item for item in items if is_case(item)]
    for item in cases:
        if item.get_closest_marker("perf_timeout"):
            budget_of(item, config.stash[settings_key].budget)
    shapes = config.stash[settings_key].shapes
    if shapes is not None:
        try:
            shapes.require_known(getattr(item, "originalname", item.name) for item in cases)
        except ConfigurationError as error:
            raise pytest.UsageError(str(error)) from None


def leave_out_extended(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the extended cases of the small scale, unless the command line selects cases."""
    suite = config.stash.get(suite_key, None)
    if suite is None:
        return
    items[:] = [item for item in items if item.get_closest_marker("perf_nothing") is None]
    keyword, expression = config.getoption("keyword") or "", config.getoption("markexpr") or ""
    if "soak" not in keyword + expression and "acceptance" not in keyword + expression:
        soaks = [item for item in items if item.get_closest_marker("soak") is not None and is_case(item)]
        _leave_out(config, items, soaks)
    if not keyword and not set(re.findall(r"[\w.]+", expression)) - {"perf", "not", "and", "or"}:
        suite.left_out = _leave_out(config, items, [item for item in items if _is_extended(item, suite)])


def _leave_out(config: pytest.Config, items: list[pytest.Item], cases: Sequence[pytest.Item]) -> int:
    named = tuple(arg.partition("::")[2] for arg in config.args if "::" in arg)
    beginnings = tuple(f"{name}{end}" for name in named for end in ("[", "::"))
    ids = {item: item.nodeid.partition("::")[2] for item in cases}
    left_out = [item for item, name in ids.items() if name not in named and not name.startswith(beginnings)]
    if left_out:
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)
    return len(left_out)


def _is_extended(item: pytest.Item, suite: Suite) -> bool:
    platform = item.get_closest_marker("perf_platform")
    if item.get_closest_marker("perf_extended") is None or platform is None or not is_case(item):
        return False
    name = platform.kwargs["name"]
    model = suite.machine.model if name == suite.machine.name else suite.catalog.find(name)
    return scale_of(model, suite) == "small"


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Return the header: platform, devices, transport, torch and warnings; empty without perf cases.

    With -q the header only says that a launch runs the other tests on one rank.
    """
    cases = sum(map(is_case, items))
    if config.getoption("collectonly"):
        return []
    if not cases:
        return _hidden(config, items)
    suite = suite_of(config)
    if suite.problem is not None:
        return []
    header = [*suite.header(), *_hidden(config, items)] if config.getoption("verbose", 0) >= 0 else []
    if suite.cluster is not None and (others := len(items) - cases):
        header.append(
            f"perfsuite: {plural(others, 'other test')} {'runs' if others == 1 else 'run'} on rank 0 only, without the "
            f"variables of {suite.cluster.name}; run tests that need all ranks separately: -m 'not perf'"
        )
    return header


def _hidden(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Return a warning for tests that look like perf cases and use another plugin's ``perf``."""
    found = [
        module
        for item in items
        if (module := collisions.hidden(definitions_of(item).get("perf", ())))
        and (collisions.is_ours(definitions_of(item), "ranks") or any(item.iter_markers("perf_sizes")))
    ]
    users = f"{plural(len(found), 'test')} {'uses' if len(found) == 1 else 'use'}"
    return [
        f"perfsuite: warning: plugin {name} has a fixture perf too, which {users}; perfsuite measures nothing there: "
        f"run with -p no:{name} to measure"
        for name, plugin in config.pluginmanager.list_name_plugin()
        if getattr(plugin, "__name__", "") in found
    ]


# -- pytest-xdist: perf cases never share a machine with other tests, so its workers deselect measured ones ----------


def refuse_dealt_out(config: pytest.Config) -> None:
    """Raise UsageError if a run that gates or stores would distribute tests to workers."""
    option = config.option
    dealt_out = getattr(option, "tx", None) and getattr(option, "dist", "no") != "no"
    if not dealt_out or not runs_tests(config):
        return
    needing = asked_on_the_command_line(config)
    if config.stash[gate_options_key].fresh or needing:
        names = needing[0] if needing else "--perf-gate, --perf-update and --perf-runs"
        raise pytest.UsageError(
            f"{names}: cases are not measured while other tests run at the same time; leave -n out, or add -n0"
        )
    config.pluginmanager.register(_Controller(config), "perfsuite.distributed")


def leave_out_measured(session: pytest.Session) -> None:
    """Deselect perf cases in a worker, unless each only runs once, and send their number to the controller."""
    config = session.config
    if not hasattr(config, "workerinput") or config.stash[settings_key].budget.smoke:
        return
    if cases := cases_of(session):
        session.items[:] = [item for item in session.items if not is_case(item)]
        config.hook.pytest_deselected(items=cases)
        worker: Any = config  # pytest-xdist sends workeroutput to the controller
        worker.workeroutput[_LEFT_OUT] = len(cases)


class _Controller:
    """Counts deselected cases of the workers; registered if pytest-xdist distributes tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Keep the count of a worker; every worker collects the same tests."""
        count = getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0)
        self._config.stash[_left_out_key] = max(count, self._config.stash.get(_left_out_key, 0))


def show_left_out(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the number of deselected cases with the command that runs them."""
    count = config.stash.get(_left_out_key, 0)
    if count:
        from perfsuite.base.masking import masked_words

        command = " ".join(["pytest", *masked_words(map(str, config.invocation_params.args)), "-n0"])
        line = f"perfsuite: {plural(count, 'perf case')} left out; to measure them without other tests: {command}"
        terminalreporter.write_line(line, yellow=True)
