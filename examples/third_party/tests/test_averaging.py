"""Plain tests of the results of averaging, without perfsuite."""

import pytest
import torch
import torch.distributed as dist
from averaging import average_


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_mean_of_one_is_itself(alone):
    tensor = torch.arange(4.0)
    assert torch.equal(average_(tensor.clone()), tensor)
