"""Text that others wrote, shown as text: on a terminal, in Markdown, in a cell of a spreadsheet."""

from __future__ import annotations

import html
import json
import re
from typing import Any

_ACTIVE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, which begin escape sequences and forge lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of what follows
    "\u200b-\u200d\u2028\u2029\u2060\ufeff"  # what nobody sees, and other ends of lines
    "\ud800-\udfff]"  # halves of characters, which no file in UTF-8 can hold
)
LONGEST = 300
"""Characters of one text of others: an id of 10 kB is cut, not printed."""
_MARKDOWN = re.compile(r"([\\`*\[\]~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=:)/(?=/)|(?<=www)\.)")
"""Marks, underscores at an end of a word, and what would make a link of an address."""
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r")
"""What a formula begins with, in both widths."""


def escaped(text: str) -> str:
    r"""Text in which what does more than be read is written as an escape.

    >>> print(escaped("a\x1b[31mb\u202ec\udcff"))
    a\x1b[31mb\u202ec\udcff
    """
    return _ACTIVE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


_COMMAND = re.compile(r"^([ \t]*):(?=:)|#(?=#(?:\[|vso\[|teamcity\[))", re.MULTILINE)
"""What a log of GitHub, Azure or TeamCity takes for a command: ``::error`` begins a line, ``##[`` stands anywhere."""
_ACTIVE_IN_JSON = re.compile(rf"(?!\n){_ACTIVE.pattern}|#(?=#(?:\[|vso\[|teamcity\[))")
_ACTIVE_IN_LINES = re.compile(rf"(?!\n|\r\n){_ACTIVE.pattern}")


def screen_text(text: str) -> str:
    r"""Lines for a terminal or a log: escaped, but for their ends, and no line is a command of a CI service.

    >>> print(screen_text("a\x1b[2J\n::error::b ##[warning]c"))
    a\x1b[2J
    \x3a:error::b \x23#[warning]c
    """
    plain = _ACTIVE_IN_LINES.sub(_escape, text)
    return _COMMAND.sub(lambda match: f"{match[1] or ''}\\x{ord(match[0][-1]):02x}", plain)


def json_text(value: Any, *, indent: int = 1) -> str:
    r"""JSON in which readable letters of any language are letters, and what :func:`escaped` escapes is escaped.

    >>> print(json_text(["\u202ea\x9b", "é"]), end="")
    [
     "\u202ea\u009b",
     "é"
    ]
    """
    return escaped_json(json.dumps(value, indent=indent, ensure_ascii=False)) + "\n"


def escaped_json(text: str) -> str:
    """JSON that means the same, without what :func:`escaped` and :func:`screen_text` escape."""
    return _ACTIVE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def code_text(text: str) -> str:
    r"""Text in Markdown as code.

    >>> print(code_text("t.py::test[a|b`c]"), code_text("`"))
    ``t.py::test[a|b`c]`` `` ` ``
    """
    plain = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{space}{plain}{space}{fence}"


def printable(text: object, longest: int = LONGEST) -> str:
    r"""Text on a line: escaped, and what is too long is cut in its middle.

    >>> print(printable("a\tb"), printable("x" * 20, 9))
    a\tb xxx...xxx
    """
    whole = str(text)
    if len(whole) > longest:
        half = (longest - 3) // 2
        whole = f"{whole[:half]}...{whole[-half:]}"
    return escaped(whole)


def markdown_text(text: str) -> str:
    r"""Text in Markdown that is neither a tag, a link nor a mark of any kind; the pipe is the table's own to escape.

    >>> print(markdown_text("<b>[x](y)</b>"))
    &lt;b&gt;\[x\](y)&lt;/b&gt;
    """
    return _MARKDOWN.sub(r"\\\1", html.escape(escaped(text), quote=False))


def cell_text(text: str) -> str:
    """Text in CSV that no spreadsheet takes for a formula; after OWASP's advice on CSV injection.

    >>> cell_text("=1+1"), cell_text("gpt2")
    ("'=1+1", 'gpt2')
    """
    return f"'{escaped(text)}" if text.startswith(_FORMULA) else escaped(text)


_QUOTED_PATH = re.compile(r"""(?<=(['"]))(?:file://)?(?:~|/|[A-Za-z]:[/\\]|\\\\)(?=[^'"\n/\\]*[/\\])[^'"\n]*(?=\1)""")
_PATH = re.compile(
    r"(?:(?<![A-Za-z0-9_.~/\\-])|(?<=\\[nrt])|(?<=[\s\"']-[A-Za-z]))(?:"  # after \n as repr has it; -I/home/ann/x
    r"[A-Za-z]:(?:[/\\]{1,2}[^/\\:*?\"'<>|,;()\n]+)*[/\\]{1,2}[^\s/\\:*?\"'<>|,;()]*"  # C:\Users\Ann Lee\x, a drive
    r"|\\\\[\w.$-]+(?:\\[^\s\\:*?\"'<>|,;()]+)+"  # \\host\share\x
    r"|~(?:[A-Za-z_][\w.-]*)?(?:/[^\s/:'\"(),;<>|]+)+/?"  # ~ann/x, and not ~12GB/s
    r"|(?:file://)?(?!//)(?:/[^\s/:'\"(),;<>|]+){2,}/?)"
)
"""An absolute path.  The parts of an address follow a letter or another slash, so an address is none."""
_HOME = re.compile(r"(?:file://)?(?:/(?:home|Users)/[^/]+/?|/root/?|[A-Za-z]:[/\\]+Users[/\\]+[^/\\]+[/\\]?)")


def without_paths(text: str) -> str:
    """Text for others without the folders of absolute paths: names of users and hosts may be in them.

    >>> without_paths("no room in /home/ann/run/out.json for 3/4, see https://a.b/c/d and ~/x/y.py")
    'no room in .../out.json for 3/4, see https://a.b/c/d and .../y.py'
    """
    return _PATH.sub(_last_part, _QUOTED_PATH.sub(_last_part, text))


def _last_part(match: re.Match[str]) -> str:
    if _HOME.fullmatch(match[0]):
        return "~"
    parts = [part for part in re.split(r"[/\\]+", match[0]) if part]
    return f".../{parts[-1]}"
