"""Traits of training softwares whose published steps projections were tested on; each row names its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from perfsuite.base.units import GIB
from perfsuite.projection.implementation import Implementation

_COMPOSER = Implementation(
    name="Composer FSDP",
    source="GPT's block in 16 bits as the dry run counts it: parameters come in 16 bits, norms are "
    "low_precision_layernorm; the loss is flash-attn's: it reads the scores, and again to write their gradients; each "
    "of two train_metrics makes them 32 bits and takes their logarithms (14 bytes); FSDP of torch 2.1: two gathers (8 "
    "bytes per parameter), gradients joined (4), cast (6), divided (8) and scattered (12)",
    backward_width_bytes=46.0,
    backward_hidden_bytes=8.0,
    forward_logit_bytes=30.0,
    backward_logit_bytes=4.0,
    logit_bytes=2.0,
    loss_bytes=2.0,
    sharded_bytes=38.0,
    unit_gradient_bytes=10.0,
    stops_early=True,
    buffer_bytes=2.0 * GIB,
)
_COMPOSER_PURE = dataclasses.replace(
    _COMPOSER,
    name="Composer FSDP, mixed_precision PURE",
    source="as Composer FSDP; FSDP of torch 1.13.1 joins (4), pads (4), divides (4) and scatters (6) gradients in 16 "
    "bits and keeps them in 32",
    gradient_bytes=2.0,
    kept_gradient_bytes=4.0,
    sharded_bytes=26.0,
    unit_gradient_bytes=8.0,
    stops_early=False,
)
_ENGINE = Implementation(
    name="Megatron core, TransformerEngine",
    source="a block of fused kernels counted by hand; the weight gradient's product adds to the gradient itself; "
    "ColumnParallelLinear gathers its input again in the backward",
    gathers_again=True,
    accumulation_bytes=0.0,
    weight_bytes=2.0,
    optimizer_state_bytes=12.0,
    logit_bytes=6.0,
    aside_bytes=2.0,
)
_SCORES = Implementation(
    name="Megatron-LM 2022",
    source="arXiv:2205.05198: scores are written; fused scale, mask and softmax, dropout apart; tokens are gathered "
    "again in the backward",
    gathers_again=True,
    score_bytes=(8.0, 12.0),
    kept_score_bytes=5.0,
    causal_skips=False,
    stage_messages="split",
    accumulation_bytes=0.0,
    weight_bytes=2.0,
    optimizer_state_bytes=12.0,
)
_DEEPSPEED = dataclasses.replace(
    _SCORES,
    name="Megatron-DeepSpeed 2022",
    source="as Megatron-LM; gradients added up in a pass",
    accumulation_bytes=8.0,
)
_ONEFLOW = Implementation(
    name="OneFlow libai",
    source="scores are written, softmax and dropout fused; fp16 gradients; its actors send while they compute, but "
    "not beside tensor parallelism (report 003's rows of 2-D meshes)",
    score_bytes=(7.0, 8.0),
    causal_skips=False,
    gradient_bytes=2.0,
    accumulation_bytes=6.0,
    stage_overlap=0.6,
    overlaps_beside_tensor=False,
)

SOFTWARES: Mapping[str, Implementation] = MappingProxyType(
    {
        "llm-foundry": _COMPOSER,
        "nemo": _ENGINE,
        "megatron": _SCORES,
        "bloom": _DEEPSPEED,
        "oneflow": _ONEFLOW,
        "simumax": dataclasses.replace(
            _ENGINE,
            name="Megatron core without overlap",
            data_overlap=0.0,
            context="all_to_all",
            forward_logit_bytes=6.0,
            backward_logit_bytes=6.0,
        ),
    }
)
"""By the beginning of a table's name."""


def software_of(software: str, *, dtype: str, gated: bool, gradients_in_fp32: bool = True) -> Implementation:
    """The traits of a software for one job: gated MLPs move more, fp8 casts what it multiplies.

    ``gradients_in_fp32`` says whether FSDP adds gradients up in 32 bits; Composer's mixed_precision PURE does not.
    """
    code = SOFTWARES[software]
    if software == "llm-foundry":
        # Rows without autocast in their name, mixed_precision PURE, are of 2023-04-04 (commit 9fa3ceb9): torch 1.13.1,
        # limit_all_gathers.  The others are of 2023-10-19 (b2a43a14): torch 2.1.0, whose checkpoints end early.  Both
        # have Composer's BACKWARD_POST, but two gathers may be under way: the host asks for the next block's while the
        # device computes the one behind.
        return code if gradients_in_fp32 else _COMPOSER_PURE
    if software in ("nemo", "simumax"):
        casts = 16.0 if dtype == "fp8" else 0.0
        return dataclasses.replace(
            code,
            forward_hidden_bytes=6.0 if gated else 4.0,
            backward_hidden_bytes=10.0 if gated else 6.0,
            kept_hidden_bytes=6.0 if gated else 4.0,
            forward_width_bytes=code.forward_width_bytes + casts,
            backward_width_bytes=code.backward_width_bytes + casts,
        )
    return code
