"""Traits of the code that runs a step: bytes that elementwise kernels move, bytes kept, and overlap.

Bytes are linear in tokens x width and tokens x hidden features. They are counted from the code and never fitted to step
times. Each row names the source of its counts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from perfsuite.base.units import MIB
from perfsuite.models import Model
from perfsuite.models.language import LanguageModel
from perfsuite.projection.counted import (
    COUNTED_OF,
    OPTIMIZER_BYTES,
    OPTIMIZER_KERNELS,
    TENSORS,
    kept_end_bytes,
    kind_of,
)
from perfsuite.projection.counted import counted as block_counts
from perfsuite.record.step import Training


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """How a block is computed and how its messages are sent."""

    name: str
    source: str
    forward_width_bytes: float = 20.0
    """Bytes that elementwise kernels of a block move in the forward pass, per token and width."""
    forward_hidden_bytes: float = 4.0
    """Per token and hidden feature of the MLP."""
    backward_width_bytes: float = 36.0
    backward_hidden_bytes: float = 6.0
    forward_logit_bytes: float = 8.0
    """Per token and word."""
    backward_logit_bytes: float = 8.0
    score_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes (forward, backward) per head and pair of tokens; zeros if scores are never written (flash attention)."""
    causal_skips: bool = True
    """Attention computes only the half that a causal mask leaves."""
    forward_kernels: int = 16
    """Kernels of a block's forward pass other than matrix products."""
    backward_kernels: int = 30
    accumulation_bytes: float = 8.0
    """Bytes moved to accumulate a gradient, per parameter of a block and micro-batch."""
    sharded_bytes: float = 24.0
    """Bytes moved to gather a parameter twice, and to scatter its gradient if every micro-batch does; per parameter of
    a block and micro-batch."""
    scattered_bytes: float = 0.0
    """Bytes moved to scatter a gradient if only the last micro-batch does; per parameter and step. 0: every micro-batch
    scatters."""
    forward_row_bytes: float = 24.0
    """Bytes moved in the forward pass to send tokens to experts and back, per token, expert and width."""
    backward_row_bytes: float = 24.0
    routes_once: bool = False
    """A token is sent to each node of its experts once (DeepEP, HybridEP), not once to each expert."""
    optimizer_bytes: float = 30.0
    """Bytes that the optimizer moves per parameter that a rank updates."""
    optimizer_kernels: int = 0
    """Kernels of the optimizer for a list of parameters, or per parameter without lists."""
    block_tensors: int = 0
    """Parameter tensors of a block for which kernels are started one by one; 0: kernels take lists."""
    end_tensors: int = 0
    """The same outside the blocks."""
    waits_for_routes: bool = False
    """The host waits for the result of the router before it starts a block's experts. It cannot start later work, such
    as gathering the next block, ahead of the device."""
    kept_whole_bytes: float = 8.0
    """Bytes that a block keeps for its backward pass, per token and width, without queries, keys, values and attention
    output. Tensor parallelism splits them only under sequence parallelism."""
    kept_head_bytes: float = 2.0
    """Bytes of a feature of a query, key, value or attention output."""
    kept_hidden_bytes: float = 4.0
    """Per token and hidden feature."""
    kept_score_bytes: float = 0.0
    """Per head and pair of tokens."""
    repeats_keys: bool = False
    """Keys and values are kept for every query head, also if heads share them."""
    kept_row_bytes: float = 4.0
    """Bytes per token, expert and width: rows sent and rows received."""
    kept_end_bytes: float = 0.0
    """Per token and width, behind the last block."""
    logit_bytes: float = 10.0
    """Bytes per token and word at the end of the forward pass."""
    loss_bytes: float = 0.0
    """Additional bytes per token and word during the backward pass of the loss."""
    weight_bytes: float = 4.0
    """Bytes of a stored parameter."""
    compute_bytes: float = 2.0
    """Bytes of a parameter or feature when it is sent and multiplied; equal to ``weight_bytes`` without a copy."""
    gradient_bytes: float = 4.0
    """Bytes of a parameter's gradient when it is accumulated and sent."""
    kept_gradient_bytes: float = 0.0
    """Bytes of a sharded gradient that waits for the optimizer; 0: as it is sent."""
    unit_gradient_bytes: float = 0.0
    """Bytes per parameter of a block for gradients that are joined while those of another block are scattered; 0: as
    those of one block are sent."""
    optimizer_state_bytes: float = 8.0
    updating_bytes: float = 0.0
    """Temporary bytes of the optimizer per updated parameter."""
    keeps_gradients: bool = True
    """Gradients have buffers between steps; otherwise they are allocated while activations are freed."""
    aside_bytes: float = 0.0
    """Bytes per weight of a block for a gradient before it is accumulated."""
    buffer_bytes: float = 0.0
    """Bytes of buckets and of the communication library."""
    selective: tuple[float, float, float] | None = None
    """Selective recomputation that keeps attention: recomputed share of a block's products, bytes kept per token and
    width, and per token and hidden feature. None: it recomputes the written scores of attention."""
    gathers_again: bool = False
    """The backward pass gathers tokens again for weight gradients under sequence parallelism (Megatron)."""
    splits_positions: bool = False
    ring_gradient_bytes: float = 0.0
    """Bytes of a key's or value's gradient sent round a ring; 0: as the key is sent."""
    ring_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes moved to combine partial results of attention, per step of a ring after the first: forward per feature of a
    query, backward per feature of a query, key or value. Zeros if the attention kernels do it."""
    ring_score_bytes: tuple[float, float] = (0.0, 0.0)
    """Like ``score_bytes``, for a step of a ring that writes its scores."""
    tensor_overlap: float = 0.0
    """Share of tensor parallelism's messages that is hidden behind products."""
    data_overlap: float = 1.0
    """Share of data parallelism's messages that is hidden if there is work to hide them."""
    gathers_each: bool = False
    """Parameters with sharded gradients are gathered for each micro-batch, not once per step. FSDP2 frees them after
    each backward pass, except in a pipeline."""
    bucket_bytes: float = 0.0
    """Most bytes of gradients in one message; 0: unknown."""
    bucket_copied_bytes: float = 0.0
    """Bytes moved per parameter whose gradient is copied into a bucket."""
    stops_early: bool = False
    """Recomputing a block stops before its last product, which the backward pass does not need."""
    overlaps_beside_tensor: bool = True
    """Messages of data parallelism are hidden even with tensor parallelism."""
    stage_overlap: float = 0.0
    """Share of messages between stages that is hidden."""
    context: Literal["ring", "all_to_all"] = "ring"
    """Exchange of context parallelism: keys round a ring behind attention, or heads for tokens."""
    stage_messages: Literal["whole", "split"] = "whole"
    """Whether tensor-parallel ranks send a part each."""


WITHOUT_LISTS = ("musa", "cpu")
"""Families whose kernels take single tensors: torch_musa registers no foreach kernel, torch has none for CPUs."""

WITHOUT_GROUPED = ("musa",)
"""Families without a grouped product for experts: torch_musa registers none."""


def on_family(code: Implementation, model: Model, training: Training, family: str) -> Implementation:
    """Return the row of perfsuite's own modules for the devices of a family."""
    if family == "cpu":  # AdamW goes from tensor to tensor there, lists or no lists
        code = dataclasses.replace(code, updating_bytes=0.0)
    if model.experts and family in WITHOUT_GROUPED:
        code = implementation_of(model, training, grouped=False)
    kind = kind_of(model)
    # DeepSpeed's optimizer has one flat tensor.
    if family not in WITHOUT_LISTS or kind is None or training.strategy in _DEEPSPEED:
        return code
    block, ends = TENSORS[kind]
    return dataclasses.replace(code, block_tensors=block, end_tensors=ends)


def implementation_of(model: Model, training: Training, *, grouped: bool = True) -> Implementation:
    """Return the row of perfsuite's own modules for a step, from a dry run of its block if there is one."""
    row = _read_from_code(model, training)
    counts = block_counts(model, training, grouped=grouped)
    if counts is None:
        return row
    forward, backward = _math_width(model) if training.attention == "math" else (0.0, 0.0)
    alike = {name: value for name, value in vars(counts).items() if not name.endswith(("kernels", "weight_bytes"))}
    alike["forward_width_bytes"] += forward * row.kept_head_bytes
    alike["backward_width_bytes"] += backward * row.kept_head_bytes
    return dataclasses.replace(
        row,
        **alike,
        source=f"counted by a dry run of {COUNTED_OF[kind_of(model) or '']}{', compiled' if training.compiled else ''}",
        forward_kernels=round(counts.forward_kernels),
        backward_kernels=round(counts.backward_kernels),
        waits_for_routes=bool(model.experts) and not grouped,  # how many rows each expert has
        accumulation_bytes=row.accumulation_bytes + counts.forward_weight_bytes + counts.backward_weight_bytes,
        optimizer_bytes=OPTIMIZER_BYTES,
        optimizer_kernels=OPTIMIZER_KERNELS,
    )


_MATH_SCORES = {True: (22.5, 12.0), False: (16.0, 24.0)}
"""Bytes per head and pair of tokens of torch's _scaled_dot_product_attention_math, by whether all is in fp32. Forward:
mask, softmax, and a search for rows without tokens. Backward: the softmax."""
_MATH_WIDTH = (12.0, 6.0)
"""Elements per token and width. Forward: scaled queries and keys, four copies. Backward: two scaled, one copied."""


def _math_width(model: Model) -> tuple[float, float]:
    """Return the elements that torch's operators move in addition; shared keys and values are repeated."""
    if not isinstance(model, LanguageModel) or model.key_heads == model.heads:
        return _MATH_WIDTH
    repeated = 2 * (1 + model.key_width / model.width)
    return _MATH_WIDTH[0] + repeated, _MATH_WIDTH[1] + repeated


_DEEPSPEED = ("zero0", "zero1", "zero2", "zero3")
_BUCKET_BYTES = 25.0 * MIB
"""Default size of a bucket of DistributedDataParallel."""


def _read_from_code(model: Model, training: Training) -> Implementation:
    """Return the row of perfsuite's own modules without a dry run: one kernel per operation, fewer if compiled.

    Bytes of elementwise kernels per token, forward and backward, are read from the modules: GPT 20 D + 4 F and 36 D + 6
    F in one 16-bit dtype. Under autocast norms, residuals and rotations run in fp32 with 16-bit copies. A compiler
    joins chains into one pass; without a dry run it moves 0.6 of these bytes.
    """
    plain, compiled = training.dtype in ("fp32", "tf32"), training.compiled
    gated = (kind_of(model) or "").startswith(("llama", "moe"))
    rotations, element = 14.0 * gated, 4.0 if plain else 2.0
    scale = (2.0 if plain else 1.8) * (0.6 if compiled else 1.0)
    gradient = 4.0 if training.gradient_dtype == "fp32" else 2.0
    sent = 2.0 if training.narrow else 4.0
    gathered, scattered = 4 * sent, sent + 4.0  # FSDP2's foreach_all_gather_copy_out, twice, and its foreach_reduce
    # Others than DeepSpeed send gradients in the last micro-batch of a step (``reduce_in_last`` of their strategy).
    deepspeed = training.strategy in _DEEPSPEED
    kept_gradient = 4.0 if training.strategy == "hybrid" and training.narrow else 0.0  # FSDP2 adds them up wide
    weight, state = 4.0, 8.0
    if deepspeed:  # narrow weights, their wide copy and the moments
        weight = sent
        state = 12.0 if training.narrow or training.strategy != "zero0" else 8.0
    return Implementation(
        name="perfsuite" + ("" if plain else ", autocast") + (", compiled" if compiled else ""),
        source="read from the code of perfsuite.models",
        splits_positions=True,
        ring_gradient_bytes=4.0,
        forward_width_bytes=scale * (20.0 + rotations),
        forward_hidden_bytes=scale * (6.0 if gated else 4.0),
        backward_width_bytes=scale * (36.0 + 2 * rotations),
        backward_hidden_bytes=scale * (10.0 if gated else 6.0),
        forward_kernels=8 if compiled else 22,
        backward_kernels=14 if compiled else 40,
        kept_hidden_bytes=8.0 if gated else 4.0,
        kept_whole_bytes=8.0 if plain else 12.0,
        compute_bytes=sent,
        # Read in perfsuite.strategies.context_attention: in fp32; a kernel's narrow parts are made wide first.
        ring_bytes=(40.0, 12.0) if plain else (46.0, 10.0),
        # Its own products, in fp32: scaled, their logarithms of sums, exponentials; again, and their gradients.
        ring_score_bytes=(48.0, 52.0),
        # The backward pass of a block that ends with a sum does not need its addends. DeepSpeed uses torch's older
        # checkpoints. A compiler recomputes only the tensors that the backward pass uses.
        stops_early=(compiled or kind_of(model) in ("gpt", "llama", "llama-grouped")) and not deepspeed,
        sharded_bytes=gathered + scattered if deepspeed else gathered,
        scattered_bytes=0.0 if deepspeed else scattered,
        kept_head_bytes=element,
        # The input of a block and the results of all products: see perfsuite.models.layers.
        selective=(0.0, sent + 2 * element, element * (1 + gated)),
        gradient_bytes=gradient,
        data_overlap=1.0 if training.overlap else 0.0,
        gathers_each=training.strategy in ("fsdp", "hybrid"),
        # The first micro-batch's gradients are kept as they come; both are read and one written for the others.
        accumulation_bytes=3 * gradient * (1 - 1 / training.num_micro_batches),
        bucket_bytes=_BUCKET_BYTES if training.strategy == "ddp" else 0.0,
        bucket_copied_bytes=8.0 if training.strategy == "ddp" else 0.0,
        score_bytes=_MATH_SCORES[plain] if training.attention == "math" else (0.0, 0.0),
        kept_score_bytes=(4.0 if plain else 2.0) if training.attention == "math" else 0.0,
        kept_end_bytes=kept_end_bytes(model, training),
        repeats_keys=training.attention == "math",
        # Logits are made fp32: their logarithms are kept, their gradients come by way of the logarithms'.
        logit_bytes=4.0,
        loss_bytes=8.0,
        updating_bytes=4.0,  # AdamW by foreach: roots of all second moments
        keeps_gradients=training.strategy not in ("single", "fsdp", "hybrid"),  # DDP has them in its buckets
        kept_gradient_bytes=kept_gradient,
        weight_bytes=weight,
        optimizer_state_bytes=state,
        buffer_bytes=training.bucket_bytes,
    )
