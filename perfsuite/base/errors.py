"""Every exception that perfsuite raises for its users.

A message has three parts in one line: the input, the rule that it breaks, and the remedy, for example
``tp=3 does not divide num_heads=16; choose 1, 2, 4, 8 or 16``. Broken invariants of perfsuite itself are asserts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar


class PerfsuiteError(Exception):
    """Base of all exceptions that perfsuite raises for its users."""


class ConfigurationError(PerfsuiteError):
    """An option, ini value, configuration file, size or launcher environment is wrong; the run does not start."""


class UnknownPlatform(ConfigurationError):
    """A platform name is not in platforms.toml."""


class LaunchError(ConfigurationError):
    """The launcher's environment is unsupported, contradictory or unsafe."""


class UnsupportedCase(PerfsuiteError):
    """The case cannot run on this machine; the message names the missing part and becomes the reason of a skip."""


class ExpectedFailure(PerfsuiteError):
    """A rank called ``pytest.xfail``; the message has its reason."""


class CaseError(PerfsuiteError):
    """One case failed; the other cases go on."""


class InvalidParameter(CaseError):
    """A parameter of a workload breaks a rule."""


class WrongResult(CaseError):
    """The timed object computed a wrong result; Workload.check raises it with ``expected`` and ``got``."""

    def __init__(self, what: str, **values: object) -> None:
        """``values`` are ``expected=`` and ``got=``, or none if ``what`` contains them."""
        self.values = values
        super().__init__(f"{what}: expected {values['expected']!r}, got {values['got']!r}" if values else what)


class RanksFailed(CaseError):
    """Some ranks of a case died, raised or hung; ``str()`` is a report with host, cause and stack of each."""

    raised: tuple[type[BaseException], ...] = ()  # Loaded types that ranks raised; empty if one died or hung.


class DeviceUnusable(CaseError):
    """The ranks' torch cannot use a device of this host: a failure, while a missing device is a skip."""


class OutOfMemory(CaseError):
    """A rank's device memory is full; the message is ``OOM at X GiB of Y``, with the purpose if it was not a tensor."""


class AgentLost(CaseError):
    """A process of a cluster launch that serves a rank is lost; the running case fails and the run ends."""


class VerdictFailed(PerfsuiteError):
    """A judge, such as the gate, fails a case that ran; ``xfail`` needs ``raises=VerdictFailed`` to expect it."""


class FileError(PerfsuiteError):
    """A file is damaged or unusable; the message is one line for any content of the file."""

    def __init__(self, message: str) -> None:
        """Escape ``message``, which may contain names and values of the file."""
        from perfsuite.base.text import escaped  # this module is loaded in every pytest run

        super().__init__(escaped(message))


class BaselineError(FileError):
    """A baseline or a history cannot be read or must not be written; the message has file, line and reason."""


class ImportFailed(FileError):
    """A file of another tool cannot be read or lacks data; the message has file, line, reason and remedy."""


class JournalError(FileError):
    """A journal cannot be written, read or resumed from."""


class CaseStopped(BaseException):
    """A signal ended the running case; it is not an Exception, so that a test cannot catch it by accident."""

    def __init__(self, signal: str) -> None:
        """``signal`` is its name, for example SIGTERM."""
        self.signal = signal
        super().__init__(f"stopped by {signal} while this case was running")


E = TypeVar("E", bound=BaseException)


def also(base: type[E], other: type[BaseException]) -> type[E]:
    """Return a class of exceptions with one message that is a ``base`` and an ``other``; ``base`` if that fails.

    >>> error = also(RanksFailed, ZeroDivisionError)("rank 1 raised it")
    >>> isinstance(error, RanksFailed), isinstance(error, ZeroDivisionError), str(error), type(error).__name__
    (True, True, 'rank 1 raised it', 'RanksFailed')
    """
    bases = (other,) if issubclass(other, base) else (base,) if issubclass(base, other) else (base, other)
    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__init__": base.__init__ if bases[0] is base else BaseException.__init__,
        "__str__": lambda self: str(self.args[0]) if self.args else "",
    }
    try:
        made = type(base.__name__, bases, members)
        made("")
    except Exception:  # incompatible layouts, a class with other arguments, or one without subclasses
        return base
    return made


def first_line(message: object) -> str:
    r"""Return the first line of an exception or a message; empty if it has none.

    >>> first_line(ValueError("rank 1 died\nTraceback ...")), first_line(ValueError())
    ('rank 1 died', '')
    """
    return str(message).strip().partition("\n")[0]


MOST_NAMES = 30  # Names that a message lists.


def nearest(name: str, names: Iterable[str], *, most: int = 3, likeness: float = 0.4) -> list[str]:
    """Return the names that are similar to a mistyped one, the most similar first."""
    return difflib.get_close_matches(name, list(names), n=most, cutoff=likeness)


def nearest_multiples(count: int, of: int) -> str:
    """Return the end of a message about a count that does not divide: the multiples below and above it.

    >>> nearest_multiples(7, 2), nearest_multiples(1, 4)
    ('6 or 8', '4')
    """
    below = count // of * of
    return f"{below} or {below + of}" if below else str(of)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an invalid name: the similar names, or all of them up to MOST_NAMES.

    >>> did_you_mean("dpp", ["single", "ddp", "fsdp"]), did_you_mean("x", ["single", "ddp"])
    ('did you mean ddp or fsdp?', 'did you mean single or ddp?')
    """
    names = list(names)
    near = nearest(name, names) or names
    if len(near) > MOST_NAMES:
        return f"choose from {', '.join(near[:MOST_NAMES])} and {len(near) - MOST_NAMES} more"
    return f"did you mean {' or '.join(near)}?"
