"""Context parallelism: attention of tokens spread over real ranks is attention of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.mesh import MeshShape
from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workload import Budget
from test_correctness.helpers.context_ranks import SpreadAttention

ROOT = Path(__file__).parent.parent
ONCE = Budget(smoke=True, timeout_s=120.0)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    transport = LocalTransport(
        start_method="fork",
        preload=("torch", "perfsuite.runtime.ranks.worker"),
        log_directory=tmp_path_factory.mktemp("logs"),
    )
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    yield driver
    driver.close()


def errors(driver, cp, **case):
    job = Job(workload=SpreadAttention(**case), world_size=cp, shape=MeshShape.of(cp=cp), budget=ONCE)
    return {record.name: record.value for record in driver.run(job).records}


WAYS = [("zigzag", "math"), ("zigzag", "flash"), ("ring", "math"), ("ring", "flash"), ("ulysses", "auto")]


@pytest.mark.parametrize("cp", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "attention"), WAYS)
def test_spread_attention_is_attention(driver, method, attention, cp):
    found = errors(driver, cp, method=method, attention=attention)
    assert {"out", "d_query", "d_key", "d_value"} == set(found)
    assert max(found.values()) <= 1e-5
