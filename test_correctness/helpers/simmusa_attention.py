"""What tests of the simulated device's attention do on it, each in a process that has nothing else on its devices."""

from __future__ import annotations

from typing import Any

import torch

from test_correctness.helpers.simmusa_steps import device, elapsed_ms, error_of


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
