"""The page itself: sections of a run written as one HTML file, its charts drawn, its style and script inside.

Equal material gives equal bytes: nothing of the moment or the machine that writes it goes in.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import write_file
from perfsuite.base.text import visible
from perfsuite.reports.document import Chart, Charts, Grid, Section
from perfsuite.reports.hosts import numbered
from perfsuite.reports.ids import anchor_of
from perfsuite.reports.material import Material
from perfsuite.reports.over_time import OverTime
from perfsuite.reports.page.charts.look import stamped
from perfsuite.reports.page.sections import SECTIONS
from perfsuite.reports.page.sections.history import history_section

# A chart's specification as SVG for this page: with a role and a name, ids of its own, no style and no script
# in it.

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


MOST_CHARTS = 24
SIMULATED = "SIMULATED DEVICES: no time here is a measurement"
_FIGURE = re.compile(r"[-+]?\d|x \d|\[[-+]?\d|< ?\d")
"""How a cell of a column of numbers begins."""
_LONGEST_FIGURE = 34


def write_page(material: Material, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; ConfigurationError says why it could not be."""
    write_file(path, render(material))


def write_history(over_time: OverTime, path: Path) -> None:
    """Write the page of a history alone; ConfigurationError says why it could not be."""
    title = f"Performance over time: {over_time.history.path.name}"
    simulated = any(session.simulated for session in over_time.history.sessions)
    write_file(path, _render(title, [history_section(over_time, MOST_CHARTS)], {}, simulated=simulated))


def write_fleet(title: str, sections: Sequence[Section], path: Path, *, simulated: bool) -> None:
    """Write the page of a fleet; ConfigurationError says why it could not be."""
    write_file(path, _render(title, sections, {}, simulated=simulated), option="--html")


def render(material: Material) -> str:
    """The page as text.  Raises ConfigurationError where jinja2, which comes with torch, is not installed."""
    sections = [section for make in SECTIONS if (section := make(material)) is not None]
    told = numbered(material.hidden_hosts)
    return _render(_title(material), sections, _anchors(material, sections), told, simulated=material.simulated)


def _render(
    title: str,
    sections: Sequence[Section],
    anchors: Mapping[str, str],
    told: Callable[[str], str] = str,
    *,
    simulated: bool,
) -> str:
    """``told``: what every text goes through."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise ConfigurationError(
            "the page is written by jinja2, which is not installed: pip install 'perfsuite[report]'"
        ) from None
    draw = renderer()
    style, script = (_shipped(name) for name in ("style.css", "script.js"))
    environment = jinja2.Environment(
        autoescape=True,
        finalize=lambda value: visible(told(value)) if type(value) is str else value,
        loader=jinja2.FunctionLoader(lambda name: (_shipped(name), name, lambda: True)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["identity"] = id
    environment.globals.update(anchor=anchors.get, right=right_columns)
    text: str = environment.get_template("page.html").render(
        title=title,
        sections=sections,
        pictures=_pictures(sections, draw, told, simulated=simulated, markup=Markup),
        svg=Markup,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'",
        simulated=SIMULATED if simulated else "",
        missing="" if draw else NO_RENDERER,
    )
    return text


def _shipped(name: str) -> str:
    """A file of the folder of templates."""
    return (resources.files("perfsuite.reports.page") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a policy allows this very style or script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _title(material: Material) -> str:
    run = material.runs[-1].run if material.runs else None
    devices = run.environment.get("devices") if run else None
    name = str(devices[0]).partition(",")[0] if isinstance(devices, Sequence) and devices else ""
    hardware = " x ".join(filter(None, (str(len(devices or ())) if len(devices or ()) > 1 else "", name)))
    told = (hardware or (run.platform if run else ""), f"torch {run.torch}" if run and run.torch else "")
    return ", ".join(filter(None, ("perfsuite", *told)))


# -- charts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawn chart."""

    svg: Any
    """Markup; empty where it was not drawn."""
    why_not: str = ""


def _pictures(
    sections: Sequence[Section], draw: Draw | None, told: Callable[[str], str], *, simulated: bool, markup: Any
) -> Mapping[int, Picture]:
    """Pictures by the identity of their chart, at most MOST_CHARTS."""
    pictures: dict[int, Picture] = {}
    drawn = drawn_charts(sections)
    for number, chart in enumerate(chart for section in sections for chart in _charts(section)):
        if draw is None or id(chart) not in drawn:
            why = "" if draw is None or not chart.spec else f"more than {MOST_CHARTS} charts: the table has it"
            pictures[id(chart)] = Picture(svg="", why_not=why)
            continue
        spec = stamped(chart.spec, SIMULATED) if simulated else chart.spec
        pictures[id(chart)] = Picture(svg=markup(draw(deep(spec, told), told(chart.title), f"k{number}-")))
    return pictures


def drawn_charts(sections: Sequence[Section]) -> set[int]:
    """Identities of the charts that are drawn, at most MOST_CHARTS: each section's first, each one's second, ..."""
    by_section = [[chart for chart in _charts(section) if chart.spec] for section in sections]
    rounds = itertools.zip_longest(*by_section)
    return {id(chart) for chart in [one for row in rounds for one in row if one is not None][:MOST_CHARTS]}


def _charts(section: Section) -> Iterator[Chart]:
    for block in section.blocks:
        if isinstance(block, Charts):
            yield from block.charts


def deep(value: Any, told: Callable[[str], str] = str) -> Any:
    """A chart's specification with every text in it put through ``told`` and made :func:`visible`."""
    if isinstance(value, str):
        return visible(told(value))
    if isinstance(value, dict):
        return {name: deep(entry, told) for name, entry in value.items()}
    return [deep(entry, told) for entry in value] if isinstance(value, (list, tuple)) else value


# -- cells -------------------------------------------------------------------------------------------------------


def _anchors(material: Material, sections: Sequence[Section]) -> Mapping[str, str]:
    """Where a case of this name stands in the table of all cases; none for a name that several cases have."""
    there = {row.anchor for section in sections for block in section.blocks for row in getattr(block, "rows", ())}
    by_name: dict[str, list[str]] = {}
    for case in material.cases:
        by_name.setdefault(case.name, []).append(anchor_of(case.case, case.fingerprint))
    return {name: anchors[0] for name, anchors in by_name.items() if len(anchors) == 1 and anchors[0] in there}


def right_columns(grid: Grid) -> list[bool]:
    """Which columns are of numbers and stand to the right."""
    columns = range(len(grid.columns))
    cells = [[row[index] for row in grid.rows if row[index]] for index in columns]
    return [index > 0 and bool(column) and all(map(_is_figure, column)) for index, column in enumerate(cells)]


def _is_figure(cell: str) -> bool:
    """Whether it is a number with what belongs to it, and no sentence that begins with one."""
    return len(cell) <= _LONGEST_FIGURE and _FIGURE.match(cell) is not None
