"""A product on every device for minutes: the share of its rate that remains when all devices are warm.

It is the last case of the acceptance run.  Other runs leave it out unless -k soak or its node id selects it.
"""

from __future__ import annotations

import pytest

from perfsuite import acceptance, dtypes, sizes, world_sizes
from perfsuite.workloads.matmul import Soak

pytestmark = [world_sizes(2, extended=[2], full=[2, 4, 8], more=True), acceptance(), pytest.mark.soak]


@sizes(full=["8192x8192x8192"], small=["256x256x256"], param="shape")
@dtypes("bf16")
def test_soak(perf, ranks, shape, dtype):
    m, k, n = shape
    perf(Soak(m=m, k=k, n=n, dtype=dtype, seconds=300.0 if m >= 8192 else 3.0), on=ranks)
