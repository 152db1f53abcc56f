"""Names that another plugin or a conftest.py has too: theirs stay as they are, ours are not to be had.

pytest refuses a second option of one name.  So ours are taken back while other plugins and conftest.py files declare
theirs, and declared again with what is left.  Options and ini keys of ours are read by :func:`option` and :func:`ini`,
which return our default where the name is somebody else's.  A fixture of another plugin goes before ours of that name,
except that perf cases get our ``platform`` and ``ranks`` where the other plugin is merely installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import pytest

GROUP = "perfsuite"
taken_key = pytest.StashKey[dict[str, Any]]()
"""Our defaults of options that others have, by the name under which pytest keeps them."""
_inis_key = pytest.StashKey[dict[str, tuple[str, Any]]]()
"""Help text and default of our ini keys; pytest lets a second key of one name take the place of the first."""
_declared_key = pytest.StashKey[list[Any]]()
"""Our options as pytest keeps them; a conftest.py may have others in a group of our name."""
_watching_key = pytest.StashKey[Callable[[], None]]()
_FIXTURES = "perfsuite.plugin.fixtures"
D = TypeVar("D")


class _Polite:
    """A parser that leaves out options whose names are taken; ini keys are declared the first time only.

    ``early``: what an option takes is not checked, because it may turn out to be somebody else's.
    """

    def __init__(
        self, parser: Any, inis: dict[str, tuple[str, Any]], declared: list[Any], *, early: bool, again: bool
    ) -> None:
        self._parser = parser
        self._inis, self._declared = inis, declared
        self._early, self._again = early, again
        self._group: Any = None
        self.taken: dict[str, Any] = {}

    def getgroup(self, name: str, description: str = "") -> _Polite:
        self._group = self._parser.getgroup(name, description)
        return self

    def addoption(self, name: str, **attributes: Any) -> None:
        groups = {id(group): group for group in (*self._parser._groups, self._parser._anonymous)}
        dest = name.lstrip("-").replace("-", "_")
        options = [option for group in groups.values() for option in group.options]
        if any(name in option.names() or option.dest == dest for option in options):
            flag = attributes.get("action") == "store_true"
            self.taken[dest] = attributes.get("default", False if flag else None)
        else:
            if self._early and "action" not in attributes:
                attributes = {"nargs": "?", "default": attributes.get("default")}
            self._group.addoption(name, **attributes)
            self._declared.append(self._group.options[-1])

    def addini(self, name: str, told: str, **attributes: Any) -> None:
        if self._again:
            return
        self._inis[name] = (told, attributes.get("default"))
        if name not in getattr(self._parser, "_inidict", ()):
            self._parser.addini(name, told, **attributes)


def _declare(
    parser: pytest.Parser, config: pytest.Config, ours: Callable[[pytest.Parser], None], *, again: bool = True
) -> None:
    """Declare our options that nobody else has; remember the others."""
    early = _watching_key in config.stash and not getattr(config.pluginmanager, "_conftest_plugins", ())
    inis, declared = config.stash.setdefault(_inis_key, {}), config.stash.setdefault(_declared_key, [])
    polite = _Polite(parser, inis, declared, early=early, again=again)
    ours(cast("pytest.Parser", polite))
    config.stash[taken_key] = polite.taken


def give_way(parser: pytest.Parser, config: pytest.Config, ours: Callable[[pytest.Parser], None]) -> None:
    """Declare our options, and take them back whenever another plugin or a conftest.py declares its own."""
    inside = 0

    def before(hook: str, *_: object) -> None:
        nonlocal inside
        if hook == "pytest_addoption":
            inside += 1
            _withdraw(parser, config)

    def after(_outcome: object, hook: str, *_: object) -> None:
        nonlocal inside
        if hook == "pytest_addoption":
            inside -= 1
            if not inside:  # a plugin may load another one
                _declare(parser, config, ours)

    config.stash[_watching_key] = config.pluginmanager.add_hookcall_monitoring(before, after)
    _declare(parser, config, ours, again=False)


def _withdraw(parser: Any, config: pytest.Config) -> None:
    """Take our options back, and no other of our group; pytest has no public way to do so."""
    group, ours = parser.getgroup(GROUP), config.stash.get(_declared_key, [])
    arguments = getattr(group, "_arggroup", None)  # from pytest 9.0 on; older ones look at the list alone
    for option in ours:
        if arguments is not None:
            # The group and the parser share this table.
            removed = {id(action): action for action in map(arguments._option_string_actions.pop, option.names())}
            for action in removed.values():
                arguments._remove_action(action)
        vars(config.option).pop(option.dest, None)  # else their default would not be set
    group.options[:] = [option for option in group.options if not any(option is one for one in ours)]
    ours.clear()


def stop_giving_way(config: pytest.Config) -> None:
    """Everybody has declared their options, or this plugin came with a conftest.py and the command line is parsed."""
    if (stop := config.stash.get(_watching_key, None)) is not None:
        stop()
        del config.stash[_watching_key]


def settle(parser: pytest.Parser, config: pytest.Config, ours: Callable[[pytest.Parser], None]) -> None:
    """Declare our options for good, with what others have left."""
    stop_giving_way(config)
    _withdraw(parser, config)
    _declare(parser, config, ours)


def option(config: pytest.Config, name: str, default: Any = None) -> Any:
    """The value of an option of ours or of pytest-benchmark's; our default where another plugin has the name."""
    taken = config.stash.get(taken_key, {})
    return taken[name] if name in taken else config.getoption(name, default)


def ini(config: pytest.Config, name: str) -> Any:
    """The value of an ini key of ours; our default where another plugin has the name."""
    told, default = config.stash[_inis_key][name]
    known = getattr(getattr(config, "_parser", None), "_inidict", {})
    return config.getini(name) if known.get(name, (told,))[0] == told else default


def lines(config: pytest.Config) -> list[str]:
    """A warning for a run with perf cases that has not all of our options."""
    names = ", ".join("--" + dest.replace("_", "-") for dest in config.stash.get(taken_key, {}))
    return [f"another plugin or a conftest.py has {names}: perfsuite's option of that name is off"] if names else []


def let_others_go_first(session: pytest.Session) -> None:
    """Put our fixtures behind those of the same name of other plugins, whichever plugin was loaded last."""
    manager: Any = session._fixturemanager  # pytest has no public way; it is there since pytest_sessionstart
    for name in ("perf", "platform", "ranks"):
        getattr(manager, "_arg2fixturedefs", {}).get(name, []).sort(key=lambda each: not _is_own(each))
        for found in getattr(manager, "_arg2node2fixturedefs", {}).get(name, {}).values():  # pytest 9.2: in reverse
            found.sort(key=_is_own)


def take_own(config: pytest.Config, definitions: dict[str, Any]) -> None:
    """Give a perf case our ``platform`` and ``ranks`` before those of installed plugins; whoever is asked for stays."""
    plugins = {getattr(plugin, "__name__", "") for plugin, _ in config.pluginmanager.list_plugin_distinfo()}
    installed = {name.partition(".")[0] for name in plugins}
    for name in {"platform", "ranks"} & set(definitions):
        found = definitions[name]
        tops = [_module(each).partition(".")[0] for each in found]
        end = max((number for number, top in enumerate(tops, start=1) if top in installed), default=0)
        definitions[name] = [*sorted(found[:end], key=_is_own), *found[end:]]


def is_ours(definitions: Mapping[str, Sequence[Any]], name: str) -> bool:
    """Whether a test gets our fixture of a name, or one that takes ours."""
    for each in reversed(definitions.get(name, ())):
        if _is_own(each):
            return True
        if name not in each.argnames:  # it replaces those before, and passes none of them on
            return False
    return False


def hidden(definitions: Sequence[Any]) -> str:
    """The module of another plugin whose fixture ``perf`` goes before ours; empty without one."""
    if not definitions or definitions[-1].baseid or not any(map(_is_own, definitions[:-1])):
        return ""
    return _module(definitions[-1])


def _module(definition: Any) -> str:
    return getattr(definition.func, "__module__", "")


def _is_own(definition: Any) -> bool:
    return _module(definition) == _FIXTURES
