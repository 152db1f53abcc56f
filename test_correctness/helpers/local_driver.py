"""A driver of forked ranks on this host's CPU, as most tests of ranks need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver
from perfsuite.runtime.transports.local import LocalTransport

ROOT = Path(__file__).parents[2]


@contextmanager
def local_driver(logs: Path) -> Iterator[Driver]:
    """Closed at the end; logs of the ranks go into the folder ``logs``."""
    transport = LocalTransport(
        start_method="fork",
        preload=("torch", "torch.distributed", "perfsuite.runtime.ranks.worker"),
        log_directory=logs,
    )
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    try:
        yield driver
    finally:
        driver.close()
