"""A chart's specification as SVG for this page: with a role and a name, ids of its own, no style and no script in it.

``vl-convert-python`` draws; it is imported only here and only when a page is made.  Without it there is no picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from perfsuite.reports.page.text import deep, visible

NO_RENDERER = "charts are drawn by vl-convert-python, which is not installed: pip install 'perfsuite[report]'"
_IDS = re.compile(r'(?<= id=")([\w-]+)(?=")|(?<=url\(#)([\w-]+)(?=\))')
_ROLE = re.compile(r' (?:role|aria-roledescription)="[^"]*"')
"""Of parts of a picture: what is one image to a reader has no parts."""
_BACKGROUND = re.compile(r'<rect width="\d+" height="\d+" fill="white"/>')

Draw = Callable[[Mapping[str, Any], str, str], str]
"""From a specification, its name and the beginning of its ids to SVG; empty where it cannot be drawn."""


def renderer() -> Draw | None:
    """What draws charts; None where the extra is not installed."""
    try:
        import vl_convert
    except ImportError:
        return None

    def draw(spec: Mapping[str, Any], name: str, prefix: str) -> str:
        return named(vl_convert.vegalite_to_svg(deep(dict(spec))), name, prefix)

    return draw


def named(svg: str, name: str, prefix: str) -> str:
    """The picture as one image with a name, its ids apart from those of others on the page.

    >>> named('<svg class="a"><clipPath id="c0"/><g clip-path="url(#c0)"/></svg>', 'a "b"', "k")
    '<svg role="img" aria-label="a &quot;b&quot;" class="a"><clipPath id="kc0"/><g clip-path="url(#kc0)"/></svg>'
    """
    apart = _IDS.sub(lambda match: prefix + match[0], _BACKGROUND.sub("", svg, count=1))
    whole = _ROLE.sub("", apart).replace(' aria-label="', ' data-told="')
    return whole.replace("<svg ", f'<svg role="img" aria-label="{escape(visible(name))}" ', 1)
