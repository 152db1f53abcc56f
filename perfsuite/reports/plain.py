"""Text of others, which may hold anything, as text that does nothing but be read; and lines no wider than a screen."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

_ACTIVE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, which begin escape sequences and forge lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of what follows
    "\u200b-\u200d\u2028\u2029\u2060\ufeff"  # what nobody sees, and other ends of lines
    "\ud800-\udfff]"  # halves of characters, which no file in UTF-8 can hold
)
LONGEST = 300
"""Characters of one text of others: an id of 10 kB is cut, not printed."""


def printable(text: object, longest: int = LONGEST) -> str:
    r"""What does more than be read is written as an escape, and too long a text is cut in its middle.

    >>> print(printable("a\x1b[31mb\u202ec\udcff"), printable("x" * 20, 9))
    a\x1b[31mb\u202ec\udcff xxx...xxx
    """
    whole = str(text)
    if len(whole) > longest:
        half = (longest - 3) // 2
        whole = f"{whole[:half]}...{whole[-half:]}"
    return _ACTIVE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), whole)


def encodable(text: str, encoding: str | None) -> str:
    """The text with what ``encoding`` lacks in ASCII: a terminal may have no more.

    >>> encodable("±2 °C", "ascii")
    '+-2  C'
    """
    plain = text.replace("±", "+-").replace("°", " ") if (encoding or "ascii").lower() in _ASCII else text
    return plain.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")


_ASCII = ("ascii", "us-ascii", "ansi_x3.4-1968", "646")


def folded(line: str, width: int, indent: str = "  ") -> list[str]:
    """The line in lines of at most ``width``; a word that is longer, an id or a path, stands alone on its own.

    >>> folded("see t.py::test_case_with_a_long_name now", 20)
    ['see', '  t.py::test_case_with_a_long_name', '  now']
    """
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line.lstrip(),
        width,
        initial_indent=line[: len(line) - len(line.lstrip())],
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"(),;]+/)+([^\s/:'\"(),;]*)")


def without_paths(text: str) -> str:
    """Absolute paths cut to their last part: what is meant for others does not tell where somebody works.

    >>> without_paths("in /home/me/repo/test_it.py: see https://a.b/c/d")
    'in test_it.py: see https://a.b/c/d'
    """
    return _PATH.sub(r"\1", text)


def without_hosts(text: str, hosts: Iterable[str]) -> str:
    """The text with the names of hosts and users left out.

    >>> without_hosts("rank 3 on node17 was lost", ["node17"])
    'rank 3 on (host) was lost'
    """
    for host in hosts:
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "(host)", text)
    return text
