"""What builds that are never timed add to a case's measurement."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

from perfsuite.record.result import Measurement, Record


@dataclass(kw_only=True)
class UntimedBuilds:
    """What the builds of a case gave that are never timed: memory, FLOPs, losses, traffic, ..."""

    settled: tuple[Record, ...]
    done: list[Measurement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def added_to(self, timed: Measurement) -> Measurement:
        """The timed measurement with it."""
        records = {record.name: record for record in timed.records}
        for record in itertools.chain(() if timed.smoke else self.settled, *(build.records for build in self.done)):
            records.setdefault(record.name, record)
        return dataclasses.replace(
            timed,
            records=tuple(records.values()),
            traffic=tuple(entry for build in self.done for entry in build.traffic),
            components=tuple(component for build in self.done for component in build.components),
            failed_builds=self.failed,
        )
