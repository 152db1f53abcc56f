"""What a ring of one rank costs over torch's plain flash attention: forward and backward, in turn, ratio with interval.

    python benchmarks/ring_attention.py [--device cpu] [--threads 1] [--pairs 20] [--lengths 512 2048]

One rank sends nothing: what is left is the ring's own work around the device's kernel.  The aim is 1.25.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from perfsuite.models.layers import AttentionCore
from perfsuite.platforms import device_code
from perfsuite.platforms.accelerator import attention_kernels
from perfsuite.platforms.base import Clock
from perfsuite.statistics.robust import ratio_interval
from perfsuite.strategies.context_attention import RingCore

HEADS, FEATURES = 8, 64
AIM = 1.25


def step(core: torch.nn.Module, inputs: list[torch.Tensor], upstream: torch.Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        for each in inputs:
            each.grad = None
        core(*inputs).backward(upstream)

    return run


def seconds(clock: Clock, run: Callable[[], None]) -> float:
    """Of one run, by the device's clock."""
    clock.wait(clock.stamp())
    start = clock.stamp()
    run()
    end = clock.stamp()
    clock.wait(end)
    return clock.elapsed_s(start, end)


def compare(
    device: torch.device, clock: Clock, *, length: int, key_heads: int, pairs: int
) -> list[tuple[float, float]]:
    """(flash, ring) seconds of each pair, the first of a pair in turn."""
    group = dist.group.WORLD
    assert group is not None
    ring = RingCore(group, zigzag=True, method="flash", kernels=attention_kernels(device.type))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shapes = [(1, length, heads, FEATURES) for heads in (HEADS, key_heads, key_heads, HEADS)]
    *inputs, upstream = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes)
    for each in inputs:
        each.requires_grad_()
    runs = [step(core, inputs, upstream) for core in (AttentionCore("flash"), ring)]
    found = []
    for index in range(-3, pairs):
        order = runs if index % 2 else runs[::-1]
        times = {run: seconds(clock, run) for run in order}
        if index >= 0:
            found.append((times[runs[0]], times[runs[1]]))
    return found


def main() -> None:
    """One line per length and number of key heads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="a family: cpu, cuda, musa")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; several wait for each other on a busy one")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    code = device_code(arguments.device)
    device = code.open(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for length in arguments.lengths:
        for key_heads in (HEADS, HEADS // 4):
            found = compare(device, code.clock, length=length, key_heads=key_heads, pairs=arguments.pairs)
            ratio, low, high = ratio_interval([ring / flash for flash, ring in found])
            flash_ms = statistics.median(flash for flash, _ in found) * 1e3
            middle = statistics.median(ring / flash for flash, ring in found)
            print(
                f"{length:6} tokens, {HEADS} heads, {key_heads} of keys: flash {flash_ms:.2f} ms, ring over flash "
                f"{ratio:.3f} ({low:.3f} to {high:.3f}), median {middle:.3f}: "
                f"{'within' if ratio <= AIM else 'above'} {AIM}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
