"""A run with the row of its platform: the input of reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfsuite.record.run import RunRecord

if TYPE_CHECKING:
    from perfsuite.platforms import DeviceModel


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run of a journal, of a baseline file or of a session, and the row of its platform."""

    run: RunRecord
    device: DeviceModel | None = None
    """None for an unknown platform."""
    times_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Median seconds of all runs of a case by node id, the newest last; empty if there is one run."""
