"""Every exception perfsuite raises for its users.

::

    PerfsuiteError
    ├── ConfigurationError        an option, ini value, TOML file, size or launcher environment is wrong
    │   ├── UnknownPlatform       a platform name that no row of platforms.toml has
    │   └── LaunchError           the launcher's environment is unknown, contradictory or unsafe
    ├── UnsupportedCase           the case cannot run on this machine: becomes a skip that names what is missing
    ├── ExpectedFailure           a rank called pytest.xfail: becomes one of the test
    ├── CaseError                 one case failed; the other cases go on
    │   ├── InvalidParameter      a workload parameter breaks a rule
    │   ├── WrongResult           what was timed computed the wrong thing
    │   ├── RanksFailed           ranks died, raised or hung
    │   ├── OutOfMemory           the device's memory ran out; the session makes it a result, not a failure
    │   └── AgentLost             a cluster's agent is gone: the case fails and the run ends
    ├── VerdictFailed             a judge, such as the gate, fails a case that ran; an xfail must name it
    └── FileError                 its message is one line, whatever is in the file
        ├── BaselineError         a stored file is truncated, hand-broken, foreign or of a newer schema
        ├── HistoryError          a history is damaged, of other hardware, or cannot be written
        ├── ImportFailed          a file of another tool cannot be read, or says too little to be compared
        └── JournalError          a journal cannot be written, read or resumed from
    CaseStopped                   a signal ended the running case; no PerfsuiteError, not even an Exception

A message says what was given, which rule it breaks and what to do, in one line:
``tp=3 does not divide num_heads=16; choose 1, 2, 4, 8 or 16``.  Broken invariants of perfsuite itself are asserts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar


class PerfsuiteError(Exception):
    """Base of everything that perfsuite raises for its users."""


class ConfigurationError(PerfsuiteError):
    """An option, ini value, configuration file, size or launcher environment is wrong; the run does not start."""


class UnknownPlatform(ConfigurationError):
    """A platform name that no row of platforms.toml has."""


class LaunchError(ConfigurationError):
    """The launcher's environment is unknown, contradictory or unsafe."""


class UnsupportedCase(PerfsuiteError):
    """The case cannot run on this machine; the message names what is missing and becomes the reason of a skip."""


class ExpectedFailure(PerfsuiteError):
    """A rank called ``pytest.xfail``; the message has its reason."""


class CaseError(PerfsuiteError):
    """One case failed; the other cases go on."""


class InvalidParameter(CaseError):
    """A parameter of a workload breaks a rule."""


class WrongResult(CaseError):
    """The object that was timed computed something else than it should have.

    Raised by :meth:`perfsuite.record.workload.Workload.check`; `repr` puts ``expected`` and ``got`` into the message.
    """

    def __init__(self, what: str, **values: object) -> None:
        """``values`` are ``expected=`` and ``got=``, or none when ``what`` already says it."""
        self.values = values
        super().__init__(f"{what}: expected {values['expected']!r}, got {values['got']!r}" if values else what)


class RanksFailed(CaseError):
    """Some ranks of a case died, raised or hung; ``str()`` is a report that names each with host, cause and stack."""

    raised: tuple[type[BaseException], ...] = ()
    """The types that ranks raised, by rank, as far as this process knows them; none where a rank died or hung."""


class DeviceUnusable(CaseError):
    """A device that this host has cannot be used by its ranks' torch: a failure, where a missing device is a skip."""


class OutOfMemory(CaseError):
    """A rank has no device memory left; the message is ``OOM at X GiB of Y``, and for what where not for a tensor."""


class AgentLost(CaseError):
    """A process of a cluster launch that serves a rank is gone; the running case fails and the run ends."""


class VerdictFailed(PerfsuiteError):
    """A judge, such as the gate, fails a case that ran by itself.

    ``xfail`` expects a failure of the test, and no verdict on its time, unless it says ``raises=VerdictFailed``.
    """


class FileError(PerfsuiteError):
    """A file is damaged or cannot be used; the message is one line, whatever is in the file."""

    def __init__(self, message: str) -> None:
        """Names and values of the file stand in ``message`` as they are: what they could do is escaped here."""
        from perfsuite.base.text import escaped  # this module is loaded in every pytest run

        super().__init__(escaped(message))


class BaselineError(FileError):
    """A stored baseline cannot be read or must not be overwritten; the message names file, line and reason."""


class HistoryError(FileError):
    """A history cannot be read or must not be written; the message names file, line and reason."""


class ImportFailed(FileError):
    """A file of another tool cannot be read, or says too little; the message names file, line, reason and remedy."""


class JournalError(FileError):
    """A journal cannot be written, read or resumed from."""


class CaseStopped(BaseException):
    """A signal ended the case that was running; no ``except Exception`` of a test may keep it alive."""

    def __init__(self, signal: str) -> None:
        """``signal`` is its name: SIGTERM."""
        self.signal = signal
        super().__init__(f"stopped by {signal} while this case was running")


E = TypeVar("E", bound=BaseException)


def also(base: type[E], other: type[BaseException]) -> type[E]:
    """A class of exceptions with one message that are ``base`` and ``other``; ``base`` where Python has none such.

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
    except Exception:  # layouts that do not go together, a class that wants other arguments or no subclasses
        return base
    return made


def first_line(message: object) -> str:
    r"""The first line of an exception or a message; empty where it has none.

    >>> first_line(ValueError("rank 1 died\nTraceback ...")), first_line(ValueError())
    ('rank 1 died', '')
    """
    return str(message).strip().partition("\n")[0]


def nearest(name: str, known: Iterable[str], *, most: int = 3, likeness: float = 0.4) -> list[str]:
    """The known names that a mistyped one may have meant, the likeliest first; empty when it is like none of them."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=likeness)


def nearest_multiples(count: int, of: int) -> str:
    """The end of a message about a count that does not divide: the multiples below and above it that are counts.

    >>> nearest_multiples(7, 2), nearest_multiples(1, 4)
    ('6 or 8', '4')
    """
    below = count // of * of
    return f"{below} or {below + of}" if below else str(of)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that there is not: the nearest names, all of them where none is near.

    >>> did_you_mean("dpp", ["single", "ddp", "fsdp"]), did_you_mean("x", ["single", "ddp"])
    ('did you mean ddp or fsdp?', 'did you mean single or ddp?')
    """
    names = list(known)
    return f"did you mean {' or '.join(nearest(name, names) or names)}?"
