"""The clock of a rank's device, for builds that look at times by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfsuite.platforms.base import Clock
from perfsuite.platforms.clocks import EventClock, PerfCounterClock

if TYPE_CHECKING:
    import torch


def clock_of(device: torch.device) -> Clock:
    """Events in the device's current stream, or the host's clock on a CPU."""
    if device.type == "cpu":
        return PerfCounterClock()
    import torch

    return EventClock(torch.get_device_module(device), device.type)
