"""Names of report 003's cases, which contain their settings.

``2D_2x4x1_16_1536x16`` is of group 2D, has dp 2, tp 4 and pp 1, a global batch of 16, and 16 layers of 1536 features.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.published.lookup import chosen

GROUPS = ("DP", "MP", "2D", "PP")  # In the report's order.
_PREFIXES = ("DP", "MP", "2D", "DP_PP", "MP_PP", "2D_PP")
_NAME = re.compile(
    r"(?P<prefix>(?:DP|MP|2D)(?:_PP)?)_(?P<dp>\d+)x(?P<tp>\d+)x(?P<pp>\d+)_(?P<batch>\d+)_(?P<width>\d+)x(?P<layers>\d+)"
)
_IN_ID = re.compile(rf"(?<=[\[-]){_NAME.pattern}(?=[-\]])")
_LOG = (
    "perf_test_logs/pretrain_gpt_{nodes}n{devices_per_node}d_dp{dp}_mp{tp}_pp{pp}_mbz{micro_batch_size}"
    "_gbz{global_batch_size}_s{sequence_length}_l{num_layers}_h{hidden_size}_nh{num_heads}.log"
)
"""As report 003 calls its logs."""
_UNKNOWN = 99  # Place of a case that is not in the report.


@dataclass(frozen=True, kw_only=True)
class CaseName:
    """The settings in a name."""

    text: str
    prefix: str  # DP, MP, 2D, DP_PP, MP_PP or 2D_PP.
    dp: int
    tp: int
    pp: int
    batch: int  # Global.
    width: int
    layers: int

    @property
    def group(self) -> str:
        """One of GROUPS: every case with stages is of group PP."""
        return "PP" if self.prefix.endswith("_PP") else self.prefix

    @property
    def place(self) -> str:
        """Sort key in the report's order; other cases are last, few ranks and large dp first."""
        place = _published().get((self.prefix, self.dp, self.tp, self.pp), _UNKNOWN)
        ranks = self.dp * self.tp * self.pp
        return f"{_PREFIXES.index(self.prefix)} {place:02} {ranks:06} {10**6 - self.dp:06}"


def case_name(text: str) -> CaseName | None:
    """Return the settings in a name; None for other text.

    >>> case_name("DP_PP_8x1x4_512_1536x16").group, case_name("gpt2-xl")
    ('PP', None)
    """
    return _read(_NAME.fullmatch(text))


def name_in(node: str) -> CaseName | None:
    """Return the name in a node id; None without one.

    >>> name_in("t.py::test_oneflow[cpu-2D_2x4x1_4_64x4]").dp
    2
    """
    return _read(_IN_ID.search(node))


def log_name(settings: Mapping[str, Any]) -> str | None:
    """Return the name of OneFlow's log of a case with these settings; None where one that it takes is unknown.

    >>> log_name(
    ...     {"nodes": 1, "devices_per_node": 8, "dp": 2, "tp": 4, "pp": 1, "micro_batch_size": 8, "num_layers": 16}
    ...     | {"global_batch_size": 16, "sequence_length": 2048, "hidden_size": 1536, "num_heads": 16}
    ... )
    'perf_test_logs/pretrain_gpt_1n8d_dp2_mp4_pp1_mbz8_gbz16_s2048_l16_h1536_nh16.log'
    """
    try:
        return _LOG.format_map(settings)
    except KeyError:
        return None


def published_log(case: str) -> str | None:
    """Return the name that report 003 prints for the log of one of its cases; None for another case.

    >>> published_log("DP_1x1x1_2_1536x16")
    'perf_test_logs/pretrain_gpt_1n1d_dp1_mp1_pp1_mbz2_gbz2_s2048_l16_h1536_nh16.log'
    """
    return _published_logs().get(case)


@functools.cache
def _published_logs() -> Mapping[str, str]:
    ((_, table),) = chosen(["003/logs"])
    return {str(row.cells[1]): str(row.cells[2]) for row in table.rows if row.cells[2]}


def _read(match: re.Match[str] | None) -> CaseName | None:
    if match is None:
        return None
    numbers = {name: int(match[name]) for name in ("dp", "tp", "pp", "batch", "width", "layers")}
    return CaseName(text=match[0], prefix=match["prefix"], **numbers)


@functools.cache
def _published() -> Mapping[tuple[str, int, int, int], int]:
    ((_, table),) = chosen(["003/cases"])
    names = [name for row in table.rows if row.cells[1] and (name := case_name(str(row.cells[1])))]
    return {(name.prefix, name.dp, name.tp, name.pp): place for place, name in enumerate(names)}
