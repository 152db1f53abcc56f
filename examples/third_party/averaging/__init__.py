"""Average a tensor over the ranks of a group, in place."""

from __future__ import annotations

import torch
import torch.distributed as dist


def average_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Replace ``tensor`` on every rank by the mean over the ranks."""
    dist.all_reduce(tensor, group=group)
    return tensor.div_(dist.get_world_size(group))


def average_in_buckets_(tensor: torch.Tensor, buckets: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Do the same in ``buckets`` concurrent messages."""
    works = [dist.all_reduce(part, group=group, async_op=True) for part in tensor.chunk(buckets)]
    for work in works:
        work.wait()
    return tensor.div_(dist.get_world_size(group))
