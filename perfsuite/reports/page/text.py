"""Text of unknown origin made safe to look at: nothing invisible, nothing that reorders a line, nothing endless.

What is markup to HTML is escaped by the templates and by the chart renderer; this is for what no escaping helps
against: control characters, bidirectional marks, halves of surrogate pairs, text of 10 kB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfsuite.base.text import printable

LONGEST = 600
"""Characters of one line on a page; a longer one loses its middle."""


def visible(text: str, longest: int = LONGEST) -> str:
    r"""The text line by line as :func:`~perfsuite.reports.plain.printable` writes it.

    >>> print(visible("a\u202eb\nc"), visible("x" * 9, longest=7))
    a\u202eb
    c xx...xx
    """
    if len(text) <= longest and text.isascii() and text.isprintable():
        return text
    return "\n".join(printable(line, longest) for line in text.split("\n"))


def deep(value: Any, told: Callable[[str], str] = str) -> Any:
    """A chart's specification with every text in it put through ``told`` and made :func:`visible`."""
    if isinstance(value, str):
        return visible(told(value))
    if isinstance(value, dict):
        return {name: deep(entry, told) for name, entry in value.items()}
    return [deep(entry, told) for entry in value] if isinstance(value, (list, tuple)) else value
