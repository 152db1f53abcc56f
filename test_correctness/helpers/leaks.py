"""Step functions that change the state of their process, as programs do, and one that records what it finds."""

from __future__ import annotations

import gc
import os
import threading

from perfsuite.base.errors import UnsupportedCase


def plain(rank):
    """Record what a case finds in its process."""
    import torch

    found = {
        "pid": os.getpid(),
        "bits": torch.finfo(torch.get_default_dtype()).bits,
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "collects": gc.get_threshold()[0],
        "variables": len(os.environ),
        "cores": len(os.sched_getaffinity(0)),
        "anomaly": torch.is_anomaly_enabled(),
        "threads of Python": threading.active_count(),
        "seed": torch.initial_seed() % 1000,
    }
    for name, value in found.items():
        rank.record(name, float(value))
    a = torch.ones(16, 16)
    return lambda: a @ a


def as_training_scripts_do(rank, more):
    """Set defaults; ``more``: those too that only another process is without."""
    import torch

    torch.manual_seed(42)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = True
    if more:
        torch.set_float32_matmul_precision("medium")
        gc.set_threshold(100_000, 50, 50)
    a = torch.randn(16, 16)
    return lambda: a @ a


def large(rank):
    bytearray(300 << 20)
    return lambda: None


def changes(rank, how):
    import torch

    if how == "environment":
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    elif how == "anomaly":
        torch.autograd.set_detect_anomaly(True)
    else:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    return lambda: None


def changes_and_skips(rank):
    """Change the environment and find that the case cannot run."""
    os.environ["PERFSUITE_TEST_LEAK"] = "1"
    raise UnsupportedCase("not here")
