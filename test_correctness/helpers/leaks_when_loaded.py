"""A module that sets a default when a rank loads it, as scripts of one file do."""

from __future__ import annotations

import os

from test_correctness.helpers import leaks

if "RANK" in os.environ:
    import torch

    torch.set_default_dtype(torch.float64)


def plain(rank):
    """The same as of the other module."""
    return leaks.plain(rank)
