"""What tests of the simulated device do on it, each in a process that has nothing else on its devices."""

from __future__ import annotations

import dataclasses
import gc
import os
from typing import Any

import torch
from torch import nn

from simmusa.costs import Costs

MIB = 1 << 20
PRICES = Costs(
    launch_ns=1_000,
    flops_per_s={"fp32": 1e12, "tf32": 2e12, "bf16": 4e12},
    bytes_per_s=1e12,
    host_bytes_per_s=1e10,
    memory_bytes=64 << 20,
)


def device(costs: Costs = PRICES) -> Any:
    """torch.musa at these prices, TF32 off."""
    from simmusa.device_module import install
    from simmusa.native import native

    module = install()
    native().set_costs(costs.as_dict())
    torch.backends.mudnn.allow_tf32 = False
    module.synchronize()
    return module


def memory_as_installed() -> int:
    """Bytes of a device, in a process that has set no costs."""
    from simmusa.device_module import install

    return install().mem_get_info()[1]


def error_of(step) -> str:
    """The first line of what ``step`` raises; empty when it raises nothing."""
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def elapsed_ms(musa, run) -> float:
    start, end = (musa.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def public_names() -> dict[str, list[str]]:
    musa = device()

    def names(thing):
        return sorted(name for name in vars(thing) if not name.startswith("_"))

    mine = {"torch.musa": names(musa), "device properties": names(musa.get_device_properties(0))}
    mine["torch.musa.Event"] = [name for name in names(musa.Event) if name != "timed"]
    mine["torch.musa.Stream"] = names(musa.Stream)
    mine["torch.backends.mudnn"] = names(type(torch.backends.mudnn))
    return mine


def times_of_products() -> dict[str, float]:
    """Milliseconds of products of 100 x 100 x 100: 2 us in fp32, and less than a launch in bf16."""
    musa = device()
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.ones(100, 100, device="musa", dtype=dtype)
        out = torch.empty_like(a)
        musa.synchronize()
        found[name] = elapsed_ms(musa, lambda a=a, out=out: [torch.mm(a, a, out=out) for _ in range(10)])
    torch.backends.mudnn.allow_tf32 = True
    a = torch.ones(100, 100, device="musa")
    musa.synchronize()
    found["tf32"] = elapsed_ms(musa, lambda: torch.mm(a, a))
    return found


def times_of_traffic() -> dict[str, float]:
    musa = device()
    a, b, out = (torch.ones(50_000, device="musa") for _ in range(3))
    host = torch.ones(50_000)
    musa.synchronize()
    return {
        "copy": elapsed_ms(musa, lambda: out.copy_(a)),
        "triad": elapsed_ms(musa, lambda: torch.add(a, b, alpha=3, out=out)),
        "to_device": elapsed_ms(musa, lambda: a.copy_(host)),
        "view": elapsed_ms(musa, a.view(100, 500)[3:].t),
        "in_place": elapsed_ms(musa, lambda: a.add_(b)),
        "of_lists": elapsed_ms(musa, lambda: torch._foreach_mul_([a, b], 2.0)),
        "filled": elapsed_ms(musa, lambda: a.fill_(1.0)),
    }


def choice_of_attention() -> dict[str, Any]:
    """What torch's choice among attention kernels takes, behind a product that the device has not finished."""
    musa = device()
    a, query = torch.ones(200, 200, device="musa"), torch.ones(1, 4, 50, 10, device="musa")
    musa.synchronize()
    alone_ms = elapsed_ms(musa, lambda: torch._fused_sdp_choice(query, query, query))
    end = musa.Event()
    a @ a
    end.record()
    torch._fused_sdp_choice(query, query, query)
    return {"ms": alone_ms, "waited": end.query()}


def flash_attention(recorded: dict[str, str]) -> dict[str, Any]:
    """The flash kernel: signatures that are not as recorded, milliseconds, and what tells it from plain products."""
    from perfsuite.platforms.accelerator import AttentionBlock, attention_kernels
    from perfsuite.strategies.context_attention import Products, block_backward, block_forward

    musa = device()
    wanted = {name: torch._C.parse_schema(f"{name}{signature}") for name, signature in recorded.items()}
    found: dict[str, Any] = {"other": []}
    for name in ("_scaled_dot_product_attention_flash_musa", "_scaled_dot_product_attention_flash_musa_backward"):
        made = getattr(torch.ops.aten, name).default._schema
        found["other"] += [str(made)] * (str(made) != str(wanted[f"aten::{name}"]))

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, 50, 10, generator=torch.Generator().manual_seed(heads)).to("musa")

    block = AttentionBlock(query=tensor(4), key=tensor(2), value=tensor(2), causal=True)
    kernel = attention_kernels("musa")["flash"]
    whole = kernel.forward(block)
    musa.synchronize()
    found["forward"] = elapsed_ms(musa, lambda: kernel.forward(block))
    gradient = torch.ones_like(whole.out)
    musa.synchronize()
    found["backward"] = elapsed_ms(musa, lambda: kernel.backward(gradient, block, whole))
    plain = block_forward(Products(), block)
    pairs = [(whole.out, plain.out), (whole.log_sum, plain.log_sum)]
    gradients = [block_backward(one, gradient, block, whole) for one in (kernel, Products())]
    found["heads"] = [[each.shape[1] for each in made] for made in gradients]
    pairs += zip(*gradients, strict=True)
    found["error"] = max(float((a - b).abs().max()) for a, b in pairs)
    with_scale = torch.ops.aten._scaled_dot_product_attention_flash_musa
    found["scale"] = error_of(lambda: with_scale(block.query, block.key, block.value, scale=0.5))
    return found


def unfinished_events() -> dict[str, Any]:
    musa = device()
    a = torch.ones(200, 200, device="musa")
    start, end = (musa.Event(enable_timing=True) for _ in range(2))
    start.record()
    a @ a
    end.record()
    found: dict[str, Any] = {"ready": end.query(), "early": error_of(lambda: start.elapsed_time(end))}
    polls = 0
    while not end.query():
        polls += 1
    found["polls"] = polls
    found["untimed"] = error_of(lambda: musa.Event().elapsed_time(end))
    return found


def timer_that_forgets_to_wait() -> str:
    """The suite's timer over a clock whose ``wait`` does nothing."""
    from perfsuite.platforms.accelerator import EventClock

    class Forgetful(EventClock):
        def wait(self, stamp):
            pass

    musa = device()
    a = torch.ones(100, 100, device="musa")
    clock = Forgetful(musa, "musa.Event")
    start = clock.stamp()
    a @ a
    end = clock.stamp()
    clock.wait(end)
    return error_of(lambda: clock.elapsed_s(start, end))


def copies_to_the_host() -> dict[str, Any]:
    musa = device()
    x = torch.arange(4.0, device="musa")
    pinned, pageable = torch.zeros(4).pin_memory(), torch.zeros(4)
    pinned.copy_(x, non_blocking=True)
    early = pinned.isnan().all().item()
    musa.synchronize()
    late = pinned.tolist()
    pageable.copy_(x, non_blocking=True)
    return {"early": early, "late": late, "pageable": pageable.tolist(), "item": x[3].item()}


def two_streams() -> dict[str, str]:
    musa = device()
    side = musa.Stream()
    x, y = torch.zeros(1000, device="musa"), torch.zeros(1000, device="musa")
    with musa.stream(side):
        found = {"read": error_of(x.sum)}
        side.wait_stream(musa.default_stream())
        found["ordered read"] = error_of(x.sum)
    found["write after read"] = error_of(lambda: x.fill_(1))
    found["other half"] = error_of(lambda: y[:500].fill_(1))
    with musa.stream(side):
        found["half of another stream"] = error_of(lambda: y[400:600].fill_(2))
        found["the half that nobody wrote"] = error_of(lambda: y[500:].fill_(2))
    musa.current_stream().wait_event(side.record_event())
    found["ordered write"] = error_of(lambda: x.fill_(1))
    with musa.stream(side):
        musa.synchronize()
        found["after the host waited"] = error_of(x.sum)
    return found


def times_of_two_streams() -> dict[str, float]:
    """Two streams run at once: together they take as long as one."""
    musa = device(Costs(flops_per_s={"fp32": 1e12}))
    side = musa.Stream()
    a = torch.ones(100, 100, device="musa")
    musa.synchronize()

    def both():
        side.wait_stream(musa.current_stream())
        a @ a
        with musa.stream(side):
            a @ a
        musa.current_stream().wait_stream(side)

    return {"both": elapsed_ms(musa, both), "one": elapsed_ms(musa, lambda: a @ a)}


def memory() -> dict[str, Any]:
    musa = device()
    gc.collect()
    before = musa.memory_allocated()
    musa.reset_peak_memory_stats()
    x = torch.empty(1000, device="musa")
    y = x + 1
    found: dict[str, Any] = {"two": musa.memory_allocated() - before}
    del x
    found["one"] = musa.memory_allocated() - before
    del y
    found |= {"none": musa.memory_allocated() - before, "peak": musa.max_memory_allocated() - before}
    free, total = musa.mem_get_info()
    found["info"] = (total - free - musa.memory_reserved(), total)
    found["beyond"] = error_of(lambda: torch.empty(1 << 25, device="musa"))
    found["after"] = musa.memory_allocated() - before
    return found


def segments() -> dict[str, Any]:
    """What is reserved, in MiB: the caching allocator keeps segments, and a piece that lives keeps a whole one."""
    musa = device(dataclasses.replace(PRICES, memory_bytes=100 * MIB, context_bytes=20 * MIB))
    gc.collect()
    musa.empty_cache()

    def buffer(mib: float) -> torch.Tensor:
        return torch.empty(round(mib * MIB), dtype=torch.uint8, device="musa")

    def reserved() -> float:
        return musa.memory_reserved() / MIB

    found: dict[str, Any] = {"before": reserved(), "free": musa.mem_get_info()[0] / MIB}
    small = buffer(0.5)
    found["small"] = reserved()
    large = [buffer(8) for _ in range(3)]
    found["large"] = reserved()
    del large[0], large[1]
    found["freed"] = reserved()
    musa.empty_cache()
    found["emptied"] = reserved()
    # 80 MiB beside the context, 22 of them reserved: 58 are free, and 12 within the segment of the one that is left.
    before = musa.memory_stats()["num_alloc_retries"]
    found["fits"] = error_of(lambda: buffer(58))
    found["fragmented"] = error_of(lambda: buffer(60))
    found["retries"] = musa.memory_stats()["num_alloc_retries"] - before
    del small, large
    found["all"] = error_of(lambda: buffer(78))
    return found


def refused(version: str) -> dict[str, str]:
    """What operators of the CPU do on a device whose torch_musa lacks them, and those that it has."""
    device()
    from simmusa.native import native
    from simmusa.registered import registered

    offered = registered(version)
    native().set_registered(offered.version, offered.operators, offered.dtypes, offered.architectures)
    bytes_of_8 = torch.ones(32, 32, dtype=torch.int8, device="musa")
    x = torch.ones(32, 32, device="musa")
    narrow = bytes_of_8.to(torch.float8_e4m3fn)
    scale = torch.ones((), device="musa")
    return {
        "missing": error_of(lambda: torch._int_mm(bytes_of_8, bytes_of_8)),
        "dtype": error_of(lambda: bytes_of_8.clamp(0, 1)),
        "architecture": error_of(lambda: torch._scaled_mm(narrow, narrow.t(), scale, scale)),
        "later": error_of(lambda: torch.special.i1(x)),
        "there": error_of(lambda: (x @ x).clamp(0, 1).softmax(0)),
    }


def faults() -> dict[str, str]:
    """A device after a kernel that reads beyond its memory, and one after an index that is no row."""
    musa = device(dataclasses.replace(PRICES, faults={"aten::mm": 2}))
    x, other = torch.ones(8, 8, device="musa:0"), torch.ones(8, 8, device="musa:1")
    found = {"first": error_of(lambda: x @ x), "second": error_of(lambda: x @ x)}
    found |= {"launch": error_of(lambda: x + 1), "wait": error_of(musa.synchronize)}
    found["allocation"] = error_of(lambda: torch.empty(8, device="musa:0"))
    found["other device"] = error_of(lambda: other + 1)
    table, wrong = torch.ones(4, 2, device="musa:1"), torch.tensor([4], device="musa:1")
    found["index"] = error_of(lambda: torch.nn.functional.embedding(wrong, table))
    found["after the index"] = error_of(lambda: other + 1)
    return found


def what_the_real_one_refuses() -> dict[str, str]:
    device()
    x, other, host = torch.ones(4, device="musa:0"), torch.ones(4, device="musa:1"), torch.ones(4)
    found = {
        "two devices": error_of(lambda: x + other),
        "host and device": error_of(lambda: x + host),
        "scalar": error_of(lambda: x + torch.tensor(1.0)),
        "accelerator": error_of(torch.accelerator.synchronize),
        "ordinal": error_of(lambda: torch.ones(1, device="musa:9")),
    }
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, error_of(lambda: torch.ones(1, device="musa")).encode())
        os._exit(0)
    os.close(write)
    found["fork"] = os.read(read, 1000).decode()
    os.wait()
    return found


def jittered(seed: int, slow: dict[str, float]) -> list[float]:
    """Milliseconds of five products with 1 % of jitter."""
    musa = device(Costs(flops_per_s={"fp32": 1e9}, jitter=0.01, seed=seed, slow=slow))
    a = torch.ones(100, 100, device="musa")
    musa.synchronize()
    return [elapsed_ms(musa, lambda: torch.mm(a, a)) for _ in range(5)]


def same_numbers_as_the_cpu() -> dict[str, float]:
    """Largest difference from the CPU of a layer of everything: convolution, attention, normalisation, optimizer."""
    device(Costs())

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.norm = nn.Conv2d(3, 8, 4, stride=4), nn.LayerNorm(8)
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 1)

        def forward(self, x):
            x = self.norm(self.patch(x).flatten(2).transpose(1, 2))
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.out(x).square().mean()

    def train(where):
        torch.manual_seed(0)
        model, x = Small().to(where), torch.randn(2, 3, 16, 16).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)  # gradients of nought stay so
        for _ in range(3):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: each.detach().cpu() for name, each in model.named_parameters()}

    there, here = train("musa"), train("cpu")
    return {name: float((there[name] - here[name]).abs().max()) for name in here}
