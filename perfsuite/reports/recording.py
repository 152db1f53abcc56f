"""What reports are made from: a run and what is published of its device."""

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
    """None for a platform that nobody knows here."""
    times_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Median seconds of each run by node id, the newest last, where there are more than the newest."""
