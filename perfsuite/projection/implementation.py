"""Traits of the code that runs a step: what its elementwise kernels move, what it keeps, what overlaps.

Bytes are linear in tokens x width and tokens x hidden features, so they are counted from the code and never fitted
to step times.  Every row names the source of its counts.
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
from perfsuite.record.result import Training


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """How a block is computed and its messages are sent."""

    name: str
    source: str
    """How the counts were made."""
    forward_width_bytes: float = 20.0
    """Bytes that elementwise kernels of a block move in its forward, per token and width."""
    forward_hidden_bytes: float = 4.0
    """Per token and hidden feature of the MLP."""
    backward_width_bytes: float = 36.0
    backward_hidden_bytes: float = 6.0
    forward_logit_bytes: float = 8.0
    """Per token and word."""
    backward_logit_bytes: float = 8.0
    score_bytes: tuple[float, float] = (0.0, 0.0)
    """Forward and backward, per head and pair of tokens; zeros where scores are never written (flash)."""
    causal_skips: bool = True
    """Whether attention computes only the half that a causal mask leaves."""
    forward_kernels: int = 16
    """Kernels of a block's forward that are no matrix product."""
    backward_kernels: int = 30
    accumulation_bytes: float = 8.0
    """Per parameter of a block and micro-batch, that adding its gradient up moves."""
    sharded_bytes: float = 24.0
    """Per parameter of a block and micro-batch, that gathering it twice moves in memory, and scattering its gradient
    where every micro-batch does."""
    scattered_bytes: float = 0.0
    """Per parameter and step, that scattering its gradient moves in memory where the last micro-batch alone does it; 0:
    every micro-batch does."""
    forward_row_bytes: float = 24.0
    """Per token and expert of it and width, that finding the experts and coming back moves in the forward."""
    backward_row_bytes: float = 24.0
    optimizer_bytes: float = 30.0
    """Bytes that the optimizer moves per parameter that a rank updates."""
    optimizer_kernels: int = 0
    """That it starts for a list of parameters' tensors, or for each where kernels take no lists."""
    block_tensors: int = 0
    """Tensors of a block's parameters that kernels are started for one by one; 0: they take lists."""
    end_tensors: int = 0
    """The same of the rest of the model."""
    waits_for_routes: bool = False
    """Whether the host waits for what a router chose before it starts a block's experts: what it would start ahead of
    the device, such as gathering the next block, begins no sooner."""
    kept_whole_bytes: float = 8.0
    """Bytes that a block keeps for its backward beside queries, keys, values and attention's output, per token and
    width; tensor parallelism splits them under sequence parallelism only."""
    kept_head_bytes: float = 2.0
    """Of a feature of a query, key, value or attention's output."""
    kept_hidden_bytes: float = 4.0
    """Per token and hidden feature."""
    kept_score_bytes: float = 0.0
    """Per head and pair of tokens."""
    repeats_keys: bool = False
    """Keys and values are kept for every head of queries, also where heads share them."""
    kept_row_bytes: float = 4.0
    """Per token and expert of it and width: rows that were sent, and that came back."""
    kept_end_bytes: float = 0.0
    """Per token and width, behind the last block."""
    logit_bytes: float = 10.0
    """Per token and word, at the end of the forward."""
    loss_bytes: float = 0.0
    """Per token and word besides, while the backward of the loss runs."""
    weight_bytes: float = 4.0
    """Of a parameter as it is kept."""
    compute_bytes: float = 2.0
    """Of a parameter or a feature as it is sent and multiplied; equal to ``weight_bytes`` without a copy."""
    gradient_bytes: float = 4.0
    """Of a parameter's gradient as it is added up and sent."""
    kept_gradient_bytes: float = 0.0
    """Of a sharded gradient as it waits for the optimizer; 0: as it is sent."""
    unit_gradient_bytes: float = 0.0
    """Per parameter of a block, of gradients that are being joined, and of another block's that are being scattered; 0:
    as one block's are sent."""
    optimizer_state_bytes: float = 8.0
    updating_bytes: float = 0.0
    """Per parameter that a rank updates, that the optimizer makes for itself and gives back."""
    keeps_gradients: bool = True
    """Whether gradients have buffers of their own between steps; otherwise they come as activations go."""
    aside_bytes: float = 0.0
    """Of the weights of a block, for a gradient that is not yet added up."""
    buffer_bytes: float = 0.0
    """Of buckets and of the communication library."""
    gathers_again: bool = False
    """Whether the backward gathers tokens again for the gradients of weights under sequence parallelism (Megatron)."""
    splits_positions: bool = False
    """Whether tensor parallelism splits the embedding of positions."""
    ring_gradient_bytes: float = 0.0
    """Of a gradient of a key or value on its way round a ring; 0: as the key is sent."""
    ring_bytes: tuple[float, float] = (0.0, 0.0)
    """Forward, per feature of a query and step of a ring after the first, and backward, per feature of a query, key or
    value and step: what adding up the parts of attention moves in memory; zeros where its kernels do so."""
    ring_score_bytes: tuple[float, float] = (0.0, 0.0)
    """As ``score_bytes``, of a step of a ring where scores are written."""
    tensor_overlap: float = 0.0
    """Share of tensor parallelism's messages that hides behind products."""
    data_overlap: float = 1.0
    """Share of the messages of data parallelism that hides where there is work to hide behind."""
    gathers_each: bool = False
    """Whether parameters whose gradients are sharded are gathered for each micro-batch, not once a step: FSDP2 frees
    them after each backward, except in a pipeline."""
    bucket_bytes: float = 0.0
    """Most gradients that travel together; 0: how they are sent is not known."""
    bucket_copied_bytes: float = 0.0
    """Per parameter whose gradient is copied into a bucket."""
    stops_early: bool = False
    """Whether recomputing a block ends with what its backward needs, which its last product is not part of."""
    overlaps_beside_tensor: bool = True
    """Whether messages of data parallelism hide where there is tensor parallelism."""
    stage_overlap: float = 0.0
    """Share of messages between stages that hides."""
    context: Literal["ring", "all_to_all"] = "ring"
    """How context parallelism exchanges: keys round a ring behind attention, or heads for tokens."""
    stage_messages: Literal["whole", "split"] = "whole"
    """Whether tensor-parallel ranks send a part each."""


def counted(*, gated: bool, autocast: bool, compiled: bool) -> Implementation:
    """perfsuite's own modules: one kernel for every operation, fewer when compiled.

    Bytes of a block's elementwise kernels per token, forward and backward, read from the modules: GPT 20 D + 4 F and
    36 D + 6 F in one 16-bit dtype; under autocast norms, residuals and rotations run in fp32 beside 16-bit copies;
    a compiler joins each chain into one pass, which is taken for 0.6 of it where no dry run counted.
    """
    rotations = 14.0 if gated else 0.0
    forward, backward = (20.0 + rotations, 6.0 if gated else 4.0), (36.0 + 2 * rotations, 10.0 if gated else 6.0)
    scale = (1.8 if autocast else 1.0) * (0.6 if compiled else 1.0)
    return Implementation(
        name="perfsuite" + (", autocast" if autocast else "") + (", compiled" if compiled else ""),
        source="read from the code of perfsuite.models",
        splits_positions=True,
        ring_gradient_bytes=4.0,
        forward_width_bytes=scale * forward[0],
        forward_hidden_bytes=scale * forward[1],
        backward_width_bytes=scale * backward[0],
        backward_hidden_bytes=scale * backward[1],
        forward_kernels=8 if compiled else 22,
        backward_kernels=14 if compiled else 40,
        kept_hidden_bytes=8.0 if gated else 4.0,
        kept_whole_bytes=12.0 if autocast else 8.0,
    )


WITHOUT_LISTS = ("musa", "cpu")
"""Families whose kernels take one tensor: torch_musa registers no foreach kernel, and torch has none for cores."""

WITHOUT_GROUPED = ("musa",)
"""Families without a product of rows sorted by expert with a matrix of each: torch_musa registers none."""


def on_family(code: Implementation, model: Model, training: Training, family: str) -> Implementation:
    """The row of perfsuite's own modules as devices of a family run them."""
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
    """The row of perfsuite's own modules for a step: counted by a dry run where there is one of the block."""
    row = _read_from_code(model, training)
    counts = block_counts(model, training, grouped=grouped)
    if counts is None:
        return row
    forward, backward = _math_width(model) if training.attention == "math" else (0.0, 0.0)
    return dataclasses.replace(
        row,
        source=f"counted by a dry run of {COUNTED_OF[kind_of(model) or '']}{', compiled' if training.compiled else ''}",
        forward_width_bytes=counts.forward_width_bytes + forward * row.kept_head_bytes,
        forward_hidden_bytes=counts.forward_hidden_bytes,
        backward_width_bytes=counts.backward_width_bytes + backward * row.kept_head_bytes,
        backward_hidden_bytes=counts.backward_hidden_bytes,
        forward_kernels=round(counts.forward_kernels),
        backward_kernels=round(counts.backward_kernels),
        kept_whole_bytes=counts.kept_whole_bytes,
        kept_hidden_bytes=counts.kept_hidden_bytes,
        forward_row_bytes=counts.forward_row_bytes,
        backward_row_bytes=counts.backward_row_bytes,
        kept_row_bytes=counts.kept_row_bytes,
        waits_for_routes=bool(model.experts) and not grouped,  # how many rows each expert has
        accumulation_bytes=row.accumulation_bytes + counts.forward_weight_bytes + counts.backward_weight_bytes,
        optimizer_bytes=OPTIMIZER_BYTES,
        optimizer_kernels=OPTIMIZER_KERNELS,
    )


_MATH_SCORES = {True: (22.5, 12.0), False: (16.0, 24.0)}
"""By whether all is in fp32: what torch's _scaled_dot_product_attention_math moves per head and pair of tokens: the
mask, a softmax, a search for rows without any token; in the backward the softmax alone."""
_MATH_WIDTH = (12.0, 6.0)
"""Elements per token and width: queries and keys scaled, four copies; in the backward two scaled, one copied."""


def _math_width(model: Model) -> tuple[float, float]:
    """Elements that torch's own operators move besides; where heads share keys, those and values are repeated."""
    if not isinstance(model, LanguageModel) or model.key_heads == model.heads:
        return _MATH_WIDTH
    repeated = 2 * (1 + model.key_width / model.width)
    return _MATH_WIDTH[0] + repeated, _MATH_WIDTH[1] + repeated


_DEEPSPEED = ("zero0", "zero1", "zero2", "zero3")
_BUCKET_BYTES = 25.0 * MIB
"""That DistributedDataParallel fills unless told otherwise."""


def _read_from_code(model: Model, training: Training) -> Implementation:
    plain = training.dtype in ("fp32", "tf32")
    own = counted(
        gated=(kind_of(model) or "").startswith(("llama", "moe")),
        autocast=not plain,
        compiled=training.compiled,
    )
    double = 2.0 if plain else 1.0
    gradient = 4.0 if training.gradient_dtype == "fp32" else 2.0
    gathered, scattered = _sharded_bytes(training)
    # Others than DeepSpeed send gradients in the last micro-batch of a step (perfsuite.strategies.fsdp.reduce_in_last).
    deepspeed = training.strategy in _DEEPSPEED
    once = not deepspeed
    kept_gradient = 4.0 if training.strategy == "hybrid" and training.narrow else 0.0  # FSDP2 adds them up wide
    weight, state = 4.0, 8.0
    if deepspeed:  # weights in the narrow dtype, and a wide copy of them beside the moments
        weight = 2.0 if training.narrow else 4.0
        state = 12.0 if training.narrow or training.strategy != "zero0" else 8.0
    return dataclasses.replace(
        own,
        forward_width_bytes=double * own.forward_width_bytes,
        forward_hidden_bytes=double * own.forward_hidden_bytes,
        backward_width_bytes=double * own.backward_width_bytes,
        backward_hidden_bytes=double * own.backward_hidden_bytes,
        compute_bytes=2.0 if training.narrow else 4.0,
        # Read in perfsuite.strategies.context.ring: in fp32; a kernel's narrow parts are made wide first.
        ring_bytes=(40.0, 12.0) if plain else (46.0, 10.0),
        # Its own products, in fp32: scaled, their logarithms of sums, exponentials; again, and their gradients.
        ring_score_bytes=(48.0, 52.0),
        # Blocks that end with a sum need nothing of what they add; DeepSpeed asks for torch's older checkpoints.
        # What a compiler computes again is what the backward uses.
        stops_early=(training.compiled or kind_of(model) in ("gpt", "llama", "llama-grouped")) and not deepspeed,
        sharded_bytes=gathered if once else gathered + scattered,
        scattered_bytes=scattered if once else 0.0,
        kept_head_bytes=4.0 if plain else 2.0,
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


def _sharded_bytes(training: Training) -> tuple[float, float]:
    """(two gathers, a scatter) of FSDP2: out of the gathered buffer into each parameter, gradients into one in fp32.

    Source: torch.distributed.fsdp's foreach_all_gather_copy_out and foreach_reduce.
    """
    element = 2.0 if training.narrow else 4.0
    return 2 * (element + element), element + 4.0
