"""Give way to options, ini keys and fixtures that another plugin or a conftest.py declares too.

pytest refuses a second option of the same name.  So perfsuite withdraws its options while other plugins and conftest.py
files declare theirs, and then declares the remaining names again.  :func:`option` and :func:`ini` read perfsuite's
options and ini keys; they return perfsuite's default for a name of another plugin.  A fixture of another plugin goes
before perfsuite's fixture of the same name.  One exception: if the other plugin is installed but not part of the
project, perf cases get perfsuite's ``platform`` and ``ranks``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import pytest

taken_key = pytest.StashKey[dict[str, Any]]()
"""perfsuite's defaults of options that belong to other plugins, by pytest's name of the option."""
_inis_key = pytest.StashKey[dict[str, tuple[str, Any]]]()
"""Help text and default of perfsuite's ini keys; in pytest a second key of the same name replaces the first."""
_declared_key = pytest.StashKey[list[tuple[Any, Any]]]()
"""pytest's objects of perfsuite's options with their groups; a conftest.py may add others to a group."""
_watching_key = pytest.StashKey[Callable[[], None]]()
_FIXTURES = "perfsuite.plugin.fixtures"
D = TypeVar("D")


class _Polite:
    """A parser that leaves out options whose names are taken; ini keys are declared the first time only.

    ``early``: the values of options are not checked, because another plugin may still declare the option.
    """

    def __init__(
        self,
        parser: Any,
        inis: dict[str, tuple[str, Any]],
        declared: list[tuple[Any, Any]],
        *,
        early: bool,
        again: bool,
    ) -> None:
        self._parser = parser
        self._inis, self._declared = inis, declared
        self._early, self._again = early, again
        self._group: Any = None
        groups = {id(group): group for group in (*parser._groups, parser._anonymous)}
        options = [option for group in groups.values() for option in group.options]
        self._known = {name for option in options for name in (option.dest, *option.names())}
        self.taken: dict[str, Any] = {}

    def getgroup(self, name: str, description: str = "") -> _Polite:
        self._group = self._parser.getgroup(name, description)
        return self

    def addoption(self, name: str, **attributes: Any) -> None:
        dest = name.lstrip("-").replace("-", "_")
        if {name, dest} & self._known:
            flag = attributes.get("action") == "store_true"
            self.taken[dest] = attributes.get("default", False if flag else None)
        else:
            if self._early and "action" not in attributes:
                attributes = {"nargs": "?", "default": attributes.get("default")}
            self._group.addoption(name, **attributes)
            self._declared.append((self._group, self._group.options[-1]))

    def addini(self, name: str, text: str, **attributes: Any) -> None:
        if self._again:
            return
        self._inis[name] = (text, attributes.get("default"))
        if name not in getattr(self._parser, "_inidict", ()):
            self._parser.addini(name, text, **attributes)


def _declare(
    parser: pytest.Parser, config: pytest.Config, declare: Callable[[pytest.Parser], None], *, again: bool = True
) -> None:
    early = _watching_key in config.stash and not getattr(config.pluginmanager, "_conftest_plugins", ())
    inis, declared = config.stash.setdefault(_inis_key, {}), config.stash.setdefault(_declared_key, [])
    polite = _Polite(parser, inis, declared, early=early, again=again)
    declare(cast("pytest.Parser", polite))
    config.stash[taken_key] = polite.taken


def give_way(parser: pytest.Parser, config: pytest.Config, declare: Callable[[pytest.Parser], None]) -> None:
    """Declare perfsuite's options, and withdraw them while another plugin or a conftest.py declares its own."""
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
                _declare(parser, config, declare)

    config.stash[_watching_key] = config.pluginmanager.add_hookcall_monitoring(before, after)
    _declare(parser, config, declare, again=False)


def _withdraw(parser: Any, config: pytest.Config) -> None:
    """Remove perfsuite's options, and no others of their groups; pytest has no public way to do so."""
    declared = config.stash.get(_declared_key, [])
    for group, option in declared:
        arguments = getattr(group, "_arggroup", None)  # since pytest 9.0; older versions read the list only
        if arguments is not None:
            # All groups and the parser share this table.
            removed = {id(action): action for action in map(arguments._option_string_actions.pop, option.names())}
            for action in removed.values():
                arguments._remove_action(action)
        vars(config.option).pop(option.dest, None)  # else the default of the other option would not be set
        group.options[:] = [each for each in group.options if each is not option]
    declared.clear()


def stop_giving_way(config: pytest.Config) -> None:
    """Stop watching, once all plugins have declared options or the command line was parsed before this plugin came."""
    if (stop := config.stash.get(_watching_key, None)) is not None:
        stop()
        del config.stash[_watching_key]


def settle(parser: pytest.Parser, config: pytest.Config, declare: Callable[[pytest.Parser], None]) -> None:
    """Declare perfsuite's options finally, those with free names."""
    stop_giving_way(config)
    _withdraw(parser, config)
    _declare(parser, config, declare)


def option(config: pytest.Config, name: str, default: Any = None) -> Any:
    """Return an option of perfsuite or pytest-benchmark; perfsuite's default if another plugin has the name."""
    taken = config.stash.get(taken_key, {})
    return taken[name] if name in taken else config.getoption(name, default)


def ini(config: pytest.Config, name: str) -> Any:
    """Return the value of an ini key of perfsuite; its default if another plugin has the name."""
    text, default = config.stash[_inis_key][name]
    declared = getattr(getattr(config, "_parser", None), "_inidict", {})
    return config.getini(name) if declared.get(name, (text,))[0] == text else default


def lines(config: pytest.Config) -> list[str]:
    """Return a warning about options that belong to other plugins; empty if perfsuite has all of its options."""
    names = ", ".join("--" + dest.replace("_", "-") for dest in config.stash.get(taken_key, {}))
    return [f"another plugin or a conftest.py has {names}: perfsuite's option of that name is off"] if names else []


def let_others_go_first(session: pytest.Session) -> None:
    """Put perfsuite's fixtures behind those of the same name of other plugins, in any order of loading."""
    manager: Any = session._fixturemanager  # pytest has no public way; it exists since pytest_sessionstart
    for name in ("perf", "platform", "ranks"):
        getattr(manager, "_arg2fixturedefs", {}).get(name, []).sort(key=lambda each: not _is_own(each))
        for found in getattr(manager, "_arg2node2fixturedefs", {}).get(name, {}).values():  # pytest 9.2: in reverse
            found.sort(key=_is_own)


def take_own(config: pytest.Config, definitions: dict[str, Any]) -> None:
    """Give a perf case perfsuite's ``platform`` and ``ranks`` before those of installed plugins, in place."""
    plugins = {getattr(plugin, "__name__", "") for plugin, _ in config.pluginmanager.list_plugin_distinfo()}
    installed = {name.partition(".")[0] for name in plugins}
    for name in {"platform", "ranks"} & set(definitions):
        found = definitions[name]
        tops = [_module(each).partition(".")[0] for each in found]
        end = max((number for number, top in enumerate(tops, start=1) if top in installed), default=0)
        definitions[name] = [*sorted(found[:end], key=_is_own), *found[end:]]


def is_ours(definitions: Mapping[str, Sequence[Any]], name: str) -> bool:
    """Return whether a test gets perfsuite's fixture of a name, or one that requests it."""
    for each in reversed(definitions.get(name, ())):
        if _is_own(each):
            return True
        if name not in each.argnames:  # it replaces the fixtures before it and does not request them
            return False
    return False


def hidden(definitions: Sequence[Any]) -> str:
    """Return the module of another plugin whose fixture ``perf`` goes before perfsuite's; empty without one."""
    if not definitions or definitions[-1].baseid or not any(map(_is_own, definitions[:-1])):
        return ""
    return _module(definitions[-1])


def _module(definition: Any) -> str:
    return getattr(definition.func, "__module__", "")


def _is_own(definition: Any) -> bool:
    return _module(definition) == _FIXTURES
