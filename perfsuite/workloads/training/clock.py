"""The clock of a rank's device, for builds that look at times by themselves; imported on ranks only."""

from __future__ import annotations

import torch

from perfsuite.platforms.base import Clock
from perfsuite.platforms.clocks import EventClock, PerfCounterClock


def clock_of(device: torch.device) -> Clock:
    """Events in the device's current stream, or the host's clock on a CPU."""
    if device.type == "cpu":
        return PerfCounterClock()
    return EventClock(torch.get_device_module(device), device.type)
