"""Text of unknown length for people: its beginning and its end, and how much was left out between them."""

from __future__ import annotations

MESSAGE_CHARS = 4_000
"""Of an exception's message: a page; megabytes of it are somebody's tensor."""
TRACEBACK_CHARS = 16_000
LOG_BYTES = 16_000
"""Of the last lines that a rank wrote."""


def cut(text: str, most_chars: int) -> str:
    """``text``, of which the middle is replaced by a remark when it is longer than ``most_chars`` characters.

    What no encoding can write (half a surrogate pair) is escaped: a report of it must not fail.

    >>> cut("abcdefghij" * 10, 8)
    'abcdef [... 92 of 100 characters left out ...] ij'
    """
    if len(text) > most_chars:
        last = most_chars // 4
        head, tail = text[: most_chars - last], text[len(text) - last :]
        text = f"{head} [... {len(text) - most_chars:,} of {len(text):,} characters left out ...] {tail}"
    return text.encode(errors="backslashreplace").decode()
