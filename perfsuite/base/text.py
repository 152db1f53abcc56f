"""The only place where text is escaped, cut, folded or stripped of paths: for terminals, Markdown and spreadsheets."""

from __future__ import annotations

import html
import json
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_ACTIVE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, which begin escape sequences and forge lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of the text after them
    "\u200b-\u200d\u2028\u2029\u2060\ufeff"  # invisible characters, and other ends of lines
    "\ud800-\udfff]"  # halves of characters, which UTF-8 cannot encode
)
LONGEST = 300  # Limit of the characters of one foreign text, such as an id of 10 kB.
_MARKDOWN = re.compile(r"([\\`*\[\]~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=:)/(?=/)|(?<=www)\.)")
"""Marks, underscores at an end of a word, and characters that make a link of an address."""
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r")
"""First characters of a formula, in both widths."""


def escaped(text: str) -> str:
    r"""Return text with escapes in place of control, direction and invisible characters.

    >>> print(escaped("a\x1b[31mb\u202ec\udcff"))
    a\x1b[31mb\u202ec\udcff
    """
    return _ACTIVE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


_COMMAND = re.compile(r"^([ \t]*):(?=:)|#(?=#(?:\[|vso\[|teamcity\[))", re.MULTILINE)
"""Commands in logs of GitHub, Azure or TeamCity: ``::error`` at the start of a line, ``##[`` anywhere."""
_ACTIVE_IN_JSON = re.compile(rf"(?!\n){_ACTIVE.pattern}|#(?=#(?:\[|vso\[|teamcity\[))")
_ACTIVE_IN_LINES = re.compile(rf"(?!\n|\r\n){_ACTIVE.pattern}")


def screen_text(text: str) -> str:
    r"""Return lines for a terminal or a log: escaped except for line ends, and without commands of a CI service.

    >>> print(screen_text("a\x1b[2J\n::error::b ##[warning]c"))
    a\x1b[2J
    \x3a:error::b \x23#[warning]c
    """
    plain = _ACTIVE_IN_LINES.sub(_escape, text)
    return _COMMAND.sub(lambda match: f"{match[1] or ''}\\x{ord(match[0][-1]):02x}", plain)


def json_text(value: Any, *, indent: int = 1) -> str:
    r"""Return JSON with letters of all languages unescaped, and escapes where :func:`escaped` has them.

    >>> print(json_text(["\u202ea\x9b", "é"]), end="")
    [
     "\u202ea\u009b",
     "é"
    ]
    """
    return escaped_json(json.dumps(value, indent=indent, ensure_ascii=False)) + "\n"


def escaped_json(text: str) -> str:
    """Return equivalent JSON with escapes where :func:`escaped` and :func:`screen_text` have them."""
    return _ACTIVE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def code_text(text: str) -> str:
    r"""Return text as code in Markdown.

    >>> print(code_text("t.py::test[a|b`c]"), code_text("`"))
    ``t.py::test[a|b`c]`` `` ` ``
    """
    plain = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{space}{plain}{space}{fence}"


def printable(text: object, longest: int = LONGEST) -> str:
    r"""Return text for one line: escaped, and cut in its middle if it is too long.

    >>> print(printable("a\tb"), printable("x" * 20, 9))
    a\tb xxx...xxx
    """
    whole = str(text)
    if len(whole) > longest:
        half = (longest - 3) // 2
        whole = f"{whole[:half]}...{whole[-half:]}"
    return escaped(whole)


def markdown_text(text: str) -> str:
    r"""Return text for Markdown without active tags, links and marks; tables escape the pipe themselves.

    >>> print(markdown_text("<b>[x](y)</b>"))
    &lt;b&gt;\[x\](y)&lt;/b&gt;
    """
    return _MARKDOWN.sub(r"\\\1", html.escape(escaped(text), quote=False))


def cell_text(text: str) -> str:
    """Return text for CSV that no spreadsheet reads as a formula; after OWASP's advice on CSV injection.

    >>> cell_text("=1+1"), cell_text("gpt2")
    ("'=1+1", 'gpt2')
    """
    return f"'{escaped(text)}" if text.startswith(_FORMULA) else escaped(text)


_QUOTED_PATH = re.compile(r"""(?<=(['"]))(?:file://)?(?:~|/|[A-Za-z]:[/\\]|\\\\)(?=[^'"\n/\\]*[/\\])[^'"\n]*(?=\1)""")
_PATH = re.compile(
    r"(?:(?<![A-Za-z0-9_.~/\\-])|(?<=\\[nrt])|(?<=[\s\"']-[A-Za-z]))(?:"  # after an escaped \n; -I/home/ann/x
    r"[A-Za-z]:(?:[/\\]{1,2}[^/\\:*?\"'<>|,;()\n]+)*[/\\]{1,2}[^\s/\\:*?\"'<>|,;()]*"  # C:\Users\Ann Lee\x, a drive
    r"|\\\\[\w.$-]+(?:\\[^\s\\:*?\"'<>|,;()]+)+"  # \\host\share\x
    r"|~(?:[A-Za-z_][\w.-]*)?(?:/[^\s/:'\"(),;<>|]+)+/?"  # ~ann/x, and not ~12GB/s
    r"|(?:file://)?(?!//)(?:/[^\s/:'\"(),;<>|]+){2,}/?)"
)
"""An absolute path. Parts of an internet address follow a letter or another slash, so they do not match."""
_HOME = re.compile(r"(?:file://)?(?:/(?:home|Users)/[^/]+/?|/root/?|[A-Za-z]:[/\\]+Users[/\\]+[^/\\]+[/\\]?)")


def without_paths(text: str) -> str:
    """Return text without the folders of absolute paths, which may contain names of users and hosts.

    >>> without_paths("no room in /home/ann/run/out.json for 3/4, see https://a.b/c/d and ~/x/y.py")
    'no room in .../out.json for 3/4, see https://a.b/c/d and .../y.py'
    """
    return _PATH.sub(_last_part, _QUOTED_PATH.sub(_last_part, text))


def _last_part(match: re.Match[str]) -> str:
    if _HOME.fullmatch(match[0]):
        return "~"
    parts = [part for part in re.split(r"[/\\]+", match[0]) if part]
    return f".../{parts[-1]}"


LONGEST_LINE = 600  # Limit of the characters of one line on a page.


def visible(text: str, longest: int = LONGEST_LINE) -> str:
    r"""Return the text with each line as in :func:`printable`.

    >>> print(visible("a\u202eb\nc"), visible("x" * 9, longest=7))
    a\u202eb
    c xx...xx
    """
    if len(text) <= longest and text.isascii() and text.isprintable():
        return text
    return "\n".join(printable(line, longest) for line in text.split("\n"))


def bare_name(node: str) -> str:
    """Return a node id without its file and class: pytest's name of the test.

    >>> bare_name("test_mine.py::TestMine::test_step[cpu-a::b]")
    'test_step[cpu-a::b]'
    """
    test, bracket, words = (node.partition("::")[2] or node).partition("[")
    return test.rpartition("::")[2] + bracket + words


def listed(names: Sequence[str], most: int, *, joint: str = ", ") -> str:
    """Return the first names, and how many more there are.

    >>> listed(["a", "b", "c", "d"], 2), listed(["a", "b"], 2)
    ('a, b and 2 more', 'a, b')
    """
    return joint.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def spans(numbers: Iterable[int], joint: str = ",") -> str:
    """Return ascending numbers with ranges, as in the kernel's lists.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return joint.join("-".join(map(str, ends)) for ends in found)


def encodable(text: str, encoding: str | None) -> str:
    """Return text in which characters outside of ``encoding`` are replaced by ASCII.

    >>> encodable("±2 °C", "ascii")
    '+-2  C'
    """
    plain = text.replace("±", "+-").replace("°", " ") if (encoding or "ascii").lower() in _ASCII else text
    return plain.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")


_ASCII = ("ascii", "us-ascii", "ansi_x3.4-1968", "646")


def folded(line: str, width: int, indent: str = "  ") -> list[str]:
    """Return the line folded to ``width``; a longer word, such as an id or a path, gets a line of its own.

    >>> folded("see t.py::test_case_with_a_long_name now", 20)
    ['see', '  t.py::test_case_with_a_long_name', '  now']
    """
    plain = padded(line)
    if len(plain) <= width:
        return [line]
    first = line[: len(line) - len(line.lstrip())]
    wrapper = textwrap.TextWrapper(width, first, indent, break_long_words=False, break_on_hyphens=False)
    return [text.replace("\0", "") for text in wrapper.wrap(plain.lstrip())]


def padded(text: str) -> str:
    """Return text with a NUL after each letter that takes two columns of a terminal, so that its length is its width.

    >>> len(padded("test_带宽"))
    9
    """
    wide = unicodedata.east_asian_width
    return text if text.isascii() else "".join(f"{one}\0" if wide(one) in "WF" else one for one in text)


def without_hosts(text: str, hosts: Iterable[str]) -> str:
    """Return the text without the names of hosts and users.

    >>> without_hosts("rank 3 on node17 was lost", ["node17"])
    'rank 3 on (host) was lost'
    """
    for host in hosts:
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "(host)", text)
    return text


MESSAGE_CHARS = 4_000  # Limit of an exception's message: one page.
TRACEBACK_CHARS = 16_000
LOG_BYTES = 16_000  # Limit of the last lines of a rank's log.


def cut(text: str, most_chars: int) -> str:
    """Return ``text`` with a remark in place of its middle if it has more than ``most_chars`` characters.

    Half a surrogate pair, which no encoding can write, is escaped.

    >>> cut("abcdefghij" * 10, 8)
    'abcdef [... 92 of 100 characters left out ...] ij'
    """
    if len(text) > most_chars:
        last = most_chars // 4
        head, tail = text[: most_chars - last], text[len(text) - last :]
        text = f"{head} [... {len(text) - most_chars:,} of {len(text):,} characters left out ...] {tail}"
    return text.encode(errors="backslashreplace").decode()


def matrix_rows(matrix: str) -> dict[str, list[str]]:
    """Return the cells of a ``topo -m`` matrix by the name of their row."""
    return {cells[0]: cells[1:] for cells in map(str.split, matrix.splitlines()) if cells and cells[1:]}
