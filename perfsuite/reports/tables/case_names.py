"""Names of report 003's cases, which say what they are.

``2D_2x4x1_16_1536x16`` is of group 2D, has dp 2, tp 4 and pp 1, a global batch of 16, and 16 layers of 1536 features.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from perfsuite.published.lookup import shipped

GROUPS = ("DP", "MP", "2D", "PP")
"""In the report's order."""
_PREFIXES = ("DP", "MP", "2D", "DP_PP", "MP_PP", "2D_PP")
_NAME = re.compile(
    r"(?P<prefix>(?:DP|MP|2D)(?:_PP)?)_(?P<dp>\d+)x(?P<tp>\d+)x(?P<pp>\d+)_(?P<batch>\d+)_(?P<width>\d+)x(?P<layers>\d+)"
)
_IN_ID = re.compile(rf"(?<=[\[-]){_NAME.pattern}(?=[-\]])")
_UNKNOWN = 99
"""Place of a case that the report does not have: behind those it has."""


@dataclass(frozen=True, kw_only=True)
class CaseName:
    """What a name says."""

    text: str
    prefix: str
    """DP, MP, 2D, DP_PP, MP_PP or 2D_PP."""
    dp: int
    tp: int
    pp: int
    batch: int
    """Global."""
    width: int
    layers: int

    @property
    def group(self) -> str:
        """One of GROUPS: every case with stages is of group PP."""
        return "PP" if self.prefix.endswith("_PP") else self.prefix

    @property
    def place(self) -> str:
        """Sorts as the report does; what it does not have stands behind, few ranks and most dp first."""
        known = _published().get((self.prefix, self.dp, self.tp, self.pp), _UNKNOWN)
        ranks = self.dp * self.tp * self.pp
        return f"{_PREFIXES.index(self.prefix)} {known:02} {ranks:06} {10**6 - self.dp:06}"


def case_name(text: str) -> CaseName | None:
    """What a name says; None for text that is none.

    >>> case_name("DP_PP_8x1x4_512_1536x16").group, case_name("gpt2-xl")
    ('PP', None)
    """
    return _read(_NAME.fullmatch(text))


def name_in(node: str) -> CaseName | None:
    """The name that a node id has as one of its tokens; None where it has none.

    >>> name_in("t.py::test_oneflow[cpu-2D_2x4x1_4_64x4]").dp
    2
    """
    return _read(_IN_ID.search(node))


def _read(match: re.Match[str] | None) -> CaseName | None:
    if match is None:
        return None
    numbers = {name: int(match[name]) for name in ("dp", "tp", "pp", "batch", "width", "layers")}
    return CaseName(text=match[0], prefix=match["prefix"], **numbers)


@functools.cache
def _published() -> Mapping[tuple[str, int, int, int], int]:
    """Place among the report's cases by prefix and degrees."""
    (table,) = (
        table for report in shipped() for table in report.tables if (report.report, table.id) == ("003", "cases")
    )
    names = [name for row in table.rows if row.cells[1] and (name := case_name(str(row.cells[1])))]
    return {(name.prefix, name.dp, name.tp, name.pp): place for place, name in enumerate(names)}
