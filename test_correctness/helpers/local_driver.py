"""Drivers of forked ranks on this host's CPU, as most tests of ranks need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver
from perfsuite.runtime.transports.local import LocalTransport

ROOT = Path(__file__).parents[2]
WORKER = "perfsuite.runtime.ranks.worker"
FSDP, COMPILER, PIPELINING = "torch.distributed.fsdp", "torch._dynamo", "torch.distributed.pipelining"


@contextmanager
def local_driver(logs: Path, *preload: str) -> Iterator[Driver]:
    """A driver whose ranks are forked after these imports; their logs go into ``logs``. It is closed at the end."""
    transport = LocalTransport(
        start_method="fork", preload=preload or ("torch", "torch.distributed", WORKER), log_directory=logs
    )
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    try:
        yield driver
    finally:
        driver.close()


def driver_fixture(*preload: str, cold: bool = False):
    """Return a fixture ``driver`` of a module: one driver for all of its tests, whose ranks import ``preload`` once.

    ``cold``: its forkservers are new interpreters.
    """

    @pytest.fixture(scope="module")
    def driver(request, tmp_path_factory):
        if cold:
            request.getfixturevalue("cold")
        with local_driver(tmp_path_factory.mktemp("logs"), *preload) as made:
            yield made

    return driver
