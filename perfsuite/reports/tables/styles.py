"""The styles by name: the tables of the five published reports as data.  A new table is one entry of its style."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from perfsuite.reports.tables.methods import METHODS
from perfsuite.reports.tables.oneflow import ONEFLOW
from perfsuite.reports.tables.spec import Style
from perfsuite.reports.tables.training import FLAGPERF, LATTE, OPENSORA

STYLES: Mapping[str, Style] = MappingProxyType(
    {style.name: style for style in (OPENSORA, LATTE, FLAGPERF, ONEFLOW, METHODS)}
)
"""In the order of the reports."""
