"""What workloads of one kernel ask before they build: are these dimensions, and has torch the kernel on this device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, first_line

if TYPE_CHECKING:
    import torch


def require_dimensions(**dimensions: int) -> None:
    """Raise InvalidParameter, which names it, for what is no dimension of a tensor."""
    for name, value in dimensions.items():
        if type(value) is not int or value < 1:
            raise InvalidParameter(f"{name}={value!r} is not a matrix dimension; choose a whole number from 1 on")


def require_kernel(what: str, device: torch.device, call: Callable[[], object]) -> None:
    """Raise UnsupportedCase, with torch's reason, unless ``call`` succeeds.

    Running out of memory stays what it is, and so does an error after which the device answers no more: what a kernel
    does wrong is no lack of one, and its process is of no use to the next case.
    """
    import torch

    try:
        call()
        if not _answers(device):
            call()  # a fault is told by whatever comes after it
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError, TypeError, AttributeError, ValueError) as error:
        if not _answers(device):
            raise
        raise UnsupportedCase(
            f"torch {torch.__version__} has no {what} on {device.type}: {first_line(error)}"
        ) from None


def _answers(device: torch.device) -> bool:
    """Whether the device is still there for this process, as it is not after a fault of a kernel."""
    import torch

    try:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
    except RuntimeError:
        return False
    return True
