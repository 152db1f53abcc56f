"""Write a page: sections, charts, style and script in one HTML file.

Equal material gives equal bytes: the page holds no time, name or path of the machine that writes it.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import visible
from perfsuite.base.writing import write_file
from perfsuite.reports.beside_others import OverTime
from perfsuite.reports.document import Chart, Charts, Grid, Section, Words, grouped
from perfsuite.reports.ids import anchor_of, numbered
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts.look import MEASURED_PX, SHOWN_PX
from perfsuite.reports.page.sections import SECTIONS
from perfsuite.reports.page.sections.history import history_section
from perfsuite.reports.page.sections.verdict import title_of

INSTALL = "pip install 'perfsuite[report]'"
NO_RENDERER = f"This page has tables instead of charts, because vl-convert-python is not installed: {INSTALL}"
_IDS = re.compile(r'(?<= id=")([\w-]+)(?=")|(?<=url\(#)([\w-]+)(?=\))')
_ROLE = re.compile(r' (?:role|aria-roledescription)="[^"]*"')
"""Roles of the parts of a picture; a screen reader gets the picture as one image."""
_BACKGROUND = re.compile(r'<rect width="\d+" height="\d+" fill="white"/>')

Draw = Callable[[Mapping[str, Any], str, str], str]
"""Make SVG of a specification, its name and a prefix for its ids; empty where it cannot be drawn."""


def renderer() -> Draw | None:
    """Return the function that draws charts; None where vl-convert-python is not installed."""
    try:
        import vl_convert
    except ImportError:
        return None

    def draw(spec: Mapping[str, Any], name: str, prefix: str) -> str:
        return named(vl_convert.vegalite_to_svg(deep(dict(spec))), name, prefix)

    return draw


def page_line(path: object) -> str:
    """Return ``path``, and where charts could not be drawn also the command that installs the renderer."""
    return f"{path}{'' if renderer() else f' without charts: {INSTALL}'}"


def named(svg: str, name: str, prefix: str) -> str:
    """Return the picture as one image with a name; ``prefix`` keeps its ids apart from those of other pictures.

    >>> named('<svg class="a"><clipPath id="c0"/><g clip-path="url(#c0)"/></svg>', 'a "b"', "k")
    '<svg role="img" aria-label="a &quot;b&quot;" class="a"><clipPath id="kc0"/><g clip-path="url(#kc0)"/></svg>'
    """
    apart = _IDS.sub(lambda match: prefix + match[0], _BACKGROUND.sub("", svg, count=1))
    whole = _ROLE.sub("", apart).replace(' aria-label="', ' data-tip="')
    whole = whole.replace(f'font-size="{MEASURED_PX}px"', f'font-size="{SHOWN_PX}px"')
    return whole.replace("<svg ", f'<svg role="img" aria-label="{escape(visible(name))}" ', 1)


MOST_CHARTS = 24
SIMULATED = "SIMULATED DEVICES: no time here is a measurement"
_FIGURE = re.compile(r"[-+~]?\d|x \d|\[[-+]?\d|< ?\d")  # The beginning of a cell in a column of numbers.
_HASH = re.compile(r"(?=.*[a-f])[0-9a-f]{7,}")
_LONGEST_FIGURE = 34


def write_page(material: Material, path: Path) -> None:
    """Write the page of a run; raises ConfigurationError where the file cannot be written."""
    write_file(path, render(material))


def write_history(over_time: OverTime, path: Path) -> None:
    """Write the page of a history alone; raises ConfigurationError where the file cannot be written."""
    sessions = over_time.history.sessions
    section = history_section(over_time, MOST_CHARTS)
    verdict = next(block.text for block in section.blocks if isinstance(block, Words))
    title = f"{verdict} - {over_time.history.path.name}"
    newest = max(sessions, key=lambda session: session.time, default=None)
    if newest is not None:
        title += f" - {f'commit {newest.revision.commit[:12]} - ' if newest.revision.commit else ''}{newest.time[:10]}"
    write_file(path, _render(title, [section], {}, simulated=any(session.simulated for session in sessions)))


def write_fleet(title: str, sections: Sequence[Section], path: Path, *, simulated: bool) -> None:
    """Write the page of a fleet; raises ConfigurationError where the file cannot be written."""
    write_file(path, _render(title, sections, {}, simulated=simulated), option="--html")


def render(material: Material) -> str:
    """Return the page as text; raises ConfigurationError where jinja2, a dependency of torch, is not installed."""
    sections = [section for make in SECTIONS if (section := make(material)) is not None]
    hide = numbered(material.hidden_hosts)
    return _render(title_of(material), sections, _anchors(material, sections), hide, simulated=material.simulated)


def _render(
    title: str,
    sections: Sequence[Section],
    anchors: Mapping[str, str],
    hide: Callable[[str], str] = str,
    *,
    simulated: bool,
) -> str:
    """Return the HTML; ``hide`` replaces the names of hosts in every text."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise ConfigurationError(f"the page needs jinja2, which is not installed: {INSTALL}") from None
    draw = renderer()
    style, script = (_shipped(name) for name in ("style.css", "script.js"))
    environment = jinja2.Environment(
        autoescape=True,
        finalize=lambda value: visible(hide(value)) if type(value) is str else value,
        loader=jinja2.FunctionLoader(lambda name: (_shipped(name), name, lambda: True)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(identity=id, kind=lambda block: type(block).__name__)
    environment.globals.update(anchor=anchors.get, right=right_columns)
    pictures = {} if draw is None else _pictures(sections, draw, hide, simulated=simulated)
    text: str = environment.get_template("page.html").render(
        title=title,
        sections=sections,
        pictures={key: Markup(picture) for key, picture in pictures.items()},
        not_drawn=f"The page draws {MOST_CHARTS} charts at most; this table has the figures." if draw else "",
        svg=Markup,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'",
        simulated=SIMULATED if simulated else "",
        missing="" if draw else NO_RENDERER,
    )
    return text


def _shipped(name: str) -> str:
    return (resources.files("perfsuite.reports.page") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression by which a policy allows this style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _pictures(
    sections: Sequence[Section], draw: Draw, hide: Callable[[str], str], *, simulated: bool
) -> Mapping[int, str]:
    pictures: dict[int, str] = {}
    drawn = drawn_charts(sections)
    for number, chart in enumerate(chart for section in sections for chart in _charts(section)):
        if id(chart) in drawn:
            spec = {**chart.spec, "title": {"text": SIMULATED}} if simulated else chart.spec
            pictures[id(chart)] = draw(deep(spec, hide), hide(chart.title), f"k{number}-")
    return pictures


def drawn_charts(sections: Sequence[Section]) -> set[int]:
    """Return the identities of the charts to draw, at most MOST_CHARTS: each section's first, then each second, ..."""
    by_section = [[chart for chart in _charts(section) if chart.spec] for section in sections]
    rounds = itertools.zip_longest(*by_section)
    return {id(chart) for chart in [one for row in rounds for one in row if one is not None][:MOST_CHARTS]}


def _charts(section: Section) -> Iterator[Chart]:
    for block in section.blocks:
        if isinstance(block, Charts):
            yield from block.charts


def deep(value: Any, hide: Callable[[str], str] = str) -> Any:
    """Return a specification whose texts went through ``hide`` and :func:`visible`."""
    if isinstance(value, str):
        return visible(hide(value))
    if isinstance(value, dict):
        return {name: deep(entry, hide) for name, entry in value.items()}
    return [deep(entry, hide) for entry in value] if isinstance(value, (list, tuple)) else value


def _anchors(material: Material, sections: Sequence[Section]) -> Mapping[str, str]:
    """Return the anchor of each case in the table of all cases, without names that several cases have."""
    there = {row.anchor for section in sections for block in section.blocks for row in getattr(block, "rows", ())}
    by_name = grouped((case.name, anchor_of(case.case, case.fingerprint)) for case in material.cases)
    return {name: anchors[0] for name, anchors in by_name.items() if len(anchors) == 1 and anchors[0] in there}


def right_columns(grid: Grid) -> list[bool]:
    """Return for each column whether it holds numbers, which are aligned to the right."""
    columns = range(len(grid.columns))
    cells = [[row[index] for row in grid.rows if row[index]] for index in columns]
    return [index > 0 and bool(column) and all(map(_is_figure, column)) for index, column in enumerate(cells)]


def _is_figure(cell: str) -> bool:
    """Return whether a cell is a number with its unit, and not a sentence that begins with a number."""
    return len(cell) <= _LONGEST_FIGURE and _FIGURE.match(cell) is not None and not _HASH.fullmatch(cell)
