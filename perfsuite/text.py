"""Text that others wrote, shown as text: on a terminal, in Markdown, in a cell of a spreadsheet."""

from __future__ import annotations

import html
import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_MARKDOWN = re.compile(r"([\\`*\[\]~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=:)/(?=/)|(?<=www)\.)")
"""Marks, underscores at an end of a word, and what would make a link of an address."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: str) -> str:
    r"""Text on a terminal: what would steer it, hide, or turn a line's direction, is shown as ``?``.

    >>> plain("a\x1b[31mb")
    'a?[31mb'
    """
    return _CONTROL.sub("?", text)


def markdown_text(text: str) -> str:
    r"""Text in Markdown that is neither a tag, a link nor a mark of any kind; the pipe is the table's own to escape.

    >>> print(markdown_text("<b>[x](y)</b>"))
    &lt;b&gt;\[x\](y)&lt;/b&gt;
    """
    return _MARKDOWN.sub(r"\\\1", html.escape(plain(text), quote=False))


def cell_text(text: str) -> str:
    """Text in CSV that no spreadsheet takes for a formula; after OWASP's advice on CSV injection.

    >>> cell_text("=1+1"), cell_text("gpt2")
    ("'=1+1", 'gpt2')
    """
    return f"'{plain(text)}" if text.startswith(_FORMULA) else plain(text)
