"""Options whose names another plugin or a conftest.py has too: theirs stay as they are, ours are not to be had.

A conftest.py declares its options after installed plugins have declared theirs, and pytest refuses a second option of
one name.  So ours are taken back while conftest.py files are loaded, and declared again with what is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

GROUP = "perfsuite"
taken_key = pytest.StashKey[dict[str, Any]]()
"""Our defaults of options that others have, by the name under which pytest keeps them."""


class _Polite:
    """A parser that leaves out options whose names are taken; ini keys are declared the first time only.

    ``early``: what an option takes is not checked, because it may turn out to be somebody else's.
    """

    def __init__(self, parser: Any, *, early: bool, again: bool) -> None:
        self._parser = parser
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
        elif self._early and "action" not in attributes:
            self._group.addoption(name, nargs="?", default=attributes.get("default"))
        else:
            self._group.addoption(name, **attributes)

    def addini(self, *arguments: Any, **attributes: Any) -> None:
        if not self._again:
            self._parser.addini(*arguments, **attributes)


def declare(
    parser: pytest.Parser, config: pytest.Config, ours: Callable[[pytest.Parser], None], *, again: bool = False
) -> None:
    """Declare our options that nobody else has; remember the others."""
    early = not getattr(config.pluginmanager, "_conftest_plugins", ())  # else one of those loads this plugin
    polite = _Polite(parser, early=early and not again, again=again)
    ours(cast("pytest.Parser", polite))
    config.stash[taken_key] = polite.taken


def withdraw(parser: Any, config: pytest.Config) -> None:
    """Take our options back; pytest has no public way to do so."""
    group = parser.getgroup(GROUP)
    for option in group.options:
        action = getattr(option, "_action", None)  # from pytest 9 on; older ones look at the list alone
        if action is not None:
            group._arggroup._remove_action(action)
            for name in option.names():
                del parser.optparser._option_string_actions[name]
        with contextlib.suppress(AttributeError):
            delattr(config.option, option.dest)  # else their default would not be set
    group.options.clear()


@contextlib.contextmanager
def our_values(config: pytest.Config) -> Iterator[None]:
    """While our options are read: in place of what others keep under those names, our defaults."""
    taken = config.stash.get(taken_key, {})
    theirs = {dest: getattr(config.option, dest) for dest in taken if hasattr(config.option, dest)}
    vars(config.option).update(taken)
    try:
        yield
    finally:
        for dest in taken:
            delattr(config.option, dest)
        vars(config.option).update(theirs)


def lines(config: pytest.Config) -> list[str]:
    """A warning for a run with perf cases that has not all of our options."""
    names = ", ".join("--" + dest.replace("_", "-") for dest in config.stash.get(taken_key, {}))
    return [f"another plugin or a conftest.py has {names}: perfsuite's option of that name is off"] if names else []
