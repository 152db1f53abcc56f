"""Text of others, which may hold anything, as text that does nothing but be read; and lines no wider than a screen."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable


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


def without_hosts(text: str, hosts: Iterable[str]) -> str:
    """The text with the names of hosts and users left out.

    >>> without_hosts("rank 3 on node17 was lost", ["node17"])
    'rank 3 on (host) was lost'
    """
    for host in hosts:
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "(host)", text)
    return text
