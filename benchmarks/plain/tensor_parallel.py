"""A plain training loop of a small LLaMA under tensor and sequence parallelism; it knows nothing of perfsuite.

    torchrun --nproc-per-node=2 benchmarks/plain/tensor_parallel.py --steps 30

Prints what the slowest rank's time is over the steps, once for each turn (turns.py).
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from turns import leave, measure, turns

LAYERS, WIDTH, HEADS, KEY_HEADS, HIDDEN, WORDS, TOKENS, BATCH = 2, 128, 4, 2, 344, 512, 64, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        features = WIDTH // HEADS
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * features, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * features, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cosines, sines):
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)) for part in (self.query, self.key, self.value))
        q, k = rotated(q, cosines, sines), rotated(k, cosines, sines)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(HEADS // KEY_HEADS, dim=1) for part in (k, v))
        return self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def rotated(x, cosines, sines):
    one, two = x.float().chunk(2, dim=-1)
    return torch.cat((one * cosines - two * sines, two * cosines + one * sines), dim=-1).type_as(x)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expand = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.contract = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.contract(F.silu(self.gate(x)) * self.expand(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x, cosines, sines):
        x = x + self.attention(self.norm1(x), cosines, sines)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        turns = 10000.0 ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        angles = torch.arange(TOKENS)[:, None] * turns
        self.cosines, self.sines = angles.cos()[:, None], angles.sin()[:, None]

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        return self.output(self.norm(x))


def spread(model, mesh):
    whole, tokens = Replicate(), Shard(1)
    ends = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "norm": SequenceParallel(use_local_output=True),
        "output": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    layer = {
        "norm1": SequenceParallel(use_local_output=True),
        "norm2": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.project": RowwiseParallel(output_layouts=tokens),
        "mlp.gate": ColwiseParallel(),
        "mlp.expand": ColwiseParallel(),
        "mlp.contract": RowwiseParallel(output_layouts=tokens),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, dict(layer))


def add_up(model):
    """Sum the ranks' gradients; of what is not split in one message, as those who care do: each has 512 bytes."""
    parts = [parameter for parameter in model.parameters() if parameter.grad.placements != parameter.placements]
    for part in parts:
        if not part.placements[0].is_replicate():
            part.grad = part.grad.redistribute(placements=part.placements)
    parts = [part for part in parts if part.placements[0].is_replicate()]
    flat = torch.cat([part.grad.to_local().flatten() for part in parts])
    dist.all_reduce(flat)
    for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.grad = DTensor.from_local(total.view(part.shape), part.device_mesh, part.placements, run_check=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Llama()
    spread(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(0, WORDS, (BATCH, TOKENS + 1))

    def step():
        with loss_parallel():
            logits = model(batch[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        add_up(model)
        optimizer.step()
        optimizer.zero_grad()

    def seconds():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    for turn in turns():
        measure(turn, seconds, steps)
    leave()


if __name__ == "__main__":
    main()
