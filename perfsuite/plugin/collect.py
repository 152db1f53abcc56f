"""Collection: which platforms, sizes and world sizes become cases, how they are called, and which are skipped why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite import suite as shipped
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.plugin import collisions
from perfsuite.plugin.gate_options import gate_options_key
from perfsuite.plugin.options import budget_of, settings_key
from perfsuite.plugin.state import suite_key, suite_of
from perfsuite.plugin.sweep import SHORT_NAMES, Scale, Sweep, read_sweep

if TYPE_CHECKING:
    from perfsuite.platforms.base import DeviceModel
    from perfsuite.plugin.suite import Suite


_LEFT_OUT = "perfsuite_left_out"
_left_out_key = pytest.StashKey[int]()
Definitions = Mapping[str, Sequence[Any]]
"""The fixtures that a test can ask for, by name; the last of a name is the one that it gets."""


def _is_perf(fixturenames: Iterable[str], definitions: Definitions) -> bool:
    """Whether a test uses this plugin's ``perf``, which brings ``perf_platform`` and ``benchmark`` with it.

    A fixture of the same name in somebody's conftest or plugin does not, and its tests are left alone.
    """
    if not {"perf", "perf_platform", "benchmark"} <= set(fixturenames):
        return False
    if not definitions:  # of a pytest that keeps them elsewhere
        return True
    return collisions.is_ours(definitions, "perf")


def definitions_of(item: pytest.Item) -> Definitions:
    """The fixtures of a collected test."""
    # pytest has no public way to ask which fixtures a test gets.
    found: Definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return found


def is_case(item: pytest.Item) -> bool:
    """Whether a collected test is a perf case."""
    return _is_perf(getattr(item, "fixturenames", ()), definitions_of(item))


def cases_of(session: pytest.Session) -> list[pytest.Item]:
    """The perf cases among the tests that will run."""
    return [item for item in session.items if is_case(item)]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give every perf case the marker ``perf``, before ``-m`` selects."""
    if is_case(item):
        item.add_marker("perf")


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
    """One parametrize call with platform, ranks, size and dtype, so that the id reads ``s4000-ws8-64MiB-bf16``."""
    if not _is_perf(metafunc.fixturenames, getattr(metafunc, "_arg2fixturedefs", {})):
        return (yield)
    collisions.take_own(metafunc.config, getattr(metafunc, "_arg2fixturedefs", {}))
    suite = suite_of(metafunc.config)
    suite.asked = True
    if suite.prepare():
        try:
            _generate(metafunc, suite)
        except ConfigurationError as error:
            pytest.fail(f"{metafunc.definition.nodeid}: {error}", pytrace=False)
    suite.naming = True
    try:
        return (yield)
    finally:
        suite.naming = False


def pytest_make_parametrize_id(config: pytest.Config, val: object) -> str | None:
    """Name what pytest would only number, in the ids of perf cases; those of other tests are not ours."""
    suite = config.stash.get(suite_key, None)
    if suite is None or not suite.naming:
        return None
    from perfsuite.runtime.values import token  # pytest runs without a perf case go without it

    return token(val)


def _generate(metafunc: pytest.Metafunc, suite: Suite) -> None:
    elsewhere = _parametrized(metafunc)
    definitions = getattr(metafunc, "_arg2fixturedefs", {})
    theirs = {
        short for short in SHORT_NAMES.values() if short in definitions and not collisions.is_ours(definitions, short)
    }
    sweep = read_sweep(metafunc.definition, metafunc.fixturenames, elsewhere, theirs)
    if suite.settings.shapes is not None:
        sweep = suite.settings.shapes.apply(metafunc.function.__name__, sweep)
    # One rank is what a test without @world_sizes runs on; whoever parametrizes ranks decides alone.
    filled = {
        long: short if short in set(metafunc.fixturenames) - theirs else long for long, short in SHORT_NAMES.items()
    }
    ranks = (filled["perf_ranks"],) if sweep.world_sizes else ()
    platforms = () if filled["perf_platform"] in elsewhere else (filled["perf_platform"],)
    arguments = (*platforms, *ranks, *sweep.arguments)
    if not arguments:
        return
    cases = [case for model in suite.platforms for case in _cases(sweep, model, suite, bool(platforms))]
    if not cases:
        # pytest makes an item of an empty list, whose one trace would be a skip.
        cases = [pytest.param(*[None] * len(arguments), marks=pytest.mark.perf_nothing)]
    metafunc.parametrize(arguments, cases, indirect=[*platforms, *ranks])


def _cases(sweep: Sweep, model: DeviceModel, suite: Suite, with_platform: bool) -> Iterable[Any]:
    platform_mark = pytest.mark.platform(name=model.name)
    platform = (model.name,) if with_platform else ()
    marks: dict[tuple[int, bool, bool], Sequence[pytest.MarkDecorator]] = {}
    for point in sweep.points(scale_of(model, suite), suite.launch_sizes(model)):
        count, key = point.world_size, (point.needs, point.extended, point.acceptance)
        if key not in marks:  # the same for all sizes and dtypes: 10,000 cases share a few marks
            why_not = suite.why_not(model, point.needs)
            marks[key] = [
                platform_mark,
                pytest.mark.world_size(n=point.needs),
                *([pytest.mark.extended] if point.extended else []),
                *([pytest.mark.acceptance] if point.acceptance else []),
                # A case that is projected is begun, says what it would run, and is skipped then.
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
    """The scale of a platform's cases: what the user asks for, else small on a CPU, where full sizes take hours.

    The session's own platform may be simulated, on a CPU too.
    """
    if suite.settings.scale:
        return suite.settings.scale
    if model.name == suite.machine.name:
        return suite.machine.scale
    return "small" if model.family == "cpu" else "full"


def _parametrized(metafunc: pytest.Metafunc) -> frozenset[str]:
    """Arguments that get their values from parametrize marks, or ``dtype`` from a fixture of the user's."""
    names: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        written = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        names |= {name.strip() for name in written.split(",")} if isinstance(written, str) else set(written)
        if not mark.kwargs.get("indirect"):
            names.discard("platform")  # values of the user's own, which no platform of ours is named by
    # pytest has no public way to ask whether a fixture of a name exists; without this attribute none is assumed.
    definitions = getattr(metafunc, "_arg2fixturedefs", {})
    return frozenset(names | ({"dtype"} & set(definitions)))


def refuse_wrong_cases(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """What is wrong with the set-up or a marker ends the run, also when all perf cases are about to be deselected."""
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
    """Deselect the extended cases of the small scale, unless the command line selects cases itself."""
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
    """Deselect these cases unless a node id on the command line selects them; returns how many."""
    named = tuple(arg.partition("::")[2] for arg in config.args if "::" in arg)
    given = tuple(f"{name}{end}" for name in named for end in ("[", "::"))
    ids = {item: item.nodeid.partition("::")[2] for item in cases}
    left_out = [item for item, name in ids.items() if name not in named and not name.startswith(given)]
    if left_out:
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)
    return len(left_out)


def _is_extended(item: pytest.Item, suite: Suite) -> bool:
    platform = item.get_closest_marker("platform")
    if item.get_closest_marker("extended") is None or platform is None or not is_case(item):
        return False
    name = platform.kwargs["name"]
    model = suite.machine.model if name == suite.machine.name else suite.catalog.find(name)
    return scale_of(model, suite) == "small"


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """The header: platform, devices, transport, torch, and what to beware of; nothing without perf cases.

    With -q only that a launch runs the other tests on one rank.
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
            f"perfsuite: {plural(others, 'test')} beside the perf cases {'runs' if others == 1 else 'run'} on rank 0 "
            f"only, without the variables of {suite.cluster.name}; tests that need all ranks belong into a run of "
            "their own: -m 'not perf'"
        )
    return header


def _hidden(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """A warning for tests that look like perf cases and get another plugin's ``perf``."""
    found = [
        module
        for item in items
        if (module := collisions.hidden(definitions_of(item).get("perf", ())))
        and ("ranks" in getattr(item, "fixturenames", ()) or any(item.iter_markers("perf_sizes")))
    ]
    told = f"{plural(len(found), 'test')} {'gets' if len(found) == 1 else 'get'} that one"
    return [
        f"perfsuite: warning: plugin {name} has a fixture perf too: {told} and measures nothing with perfsuite; "
        f"run with -p no:{name} to measure"
        for name, plugin in config.pluginmanager.list_name_plugin()
        if getattr(plugin, "__name__", "") in found
    ]


# -- beside pytest-xdist: perf cases never share a machine with other tests, so its workers leave measured ones out ----


def refuse_dealt_out(config: pytest.Config) -> None:
    """Refuse what measures for the record where tests are about to be dealt out; before any worker starts."""
    option = config.option
    dealt_out = getattr(option, "tx", None) and getattr(option, "dist", "no") != "no"
    if dealt_out and config.stash[gate_options_key].fresh:
        raise pytest.UsageError(
            "--perf-gate, --perf-update and --perf-runs measure, which nobody does beside other tests; "
            "leave -n out, or add -n0"
        )
    if dealt_out:
        config.pluginmanager.register(_Controller(config), "perfsuite.distributed")


def leave_out_measured(session: pytest.Session) -> None:
    """In a worker: deselect perf cases, unless each only runs once, and tell the controller how many there were."""
    config = session.config
    if not hasattr(config, "workerinput") or config.stash[settings_key].budget.smoke:
        return
    if cases := cases_of(session):
        session.items[:] = [item for item in session.items if not is_case(item)]
        config.hook.pytest_deselected(items=cases)
        worker: Any = config  # pytest-xdist adds what a worker says to its controller
        worker.workeroutput[_LEFT_OUT] = len(cases)


class _Controller:
    """Registered where pytest-xdist deals tests out, which has the hook that it implements."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects the same tests: one count is all."""
        count = getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0)
        self._config.stash[_left_out_key] = max(count, self._config.stash.get(_left_out_key, 0))


def show_left_out(terminalreporter: Any, config: pytest.Config) -> None:
    """One line and the command that runs what was left out."""
    count = config.stash.get(_left_out_key, 0)
    if count:
        from perfsuite.base.masking import masked_words

        command = " ".join(["pytest", *masked_words(map(str, config.invocation_params.args)), "-n0"])
        told = f"{plural(count, 'perf case')} left out, measured alone or not at all"
        terminalreporter.write_line(f"perfsuite: {told}: {command}", yellow=True)
