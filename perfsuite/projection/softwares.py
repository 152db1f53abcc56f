"""Traits of the softwares whose published steps the back-test predicts; what each row rests on is its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from perfsuite.projection.published_rows import PublishedStep
from perfsuite.projection.traffic import Implementation
from perfsuite.units import GIB

_COMPOSER = Implementation(
    name="Composer FSDP",
    source="a bf16 block counted by hand (36 and 60 bytes per token and width, of which the table's ratio is taken); "
    "FSDP of torch 2.0: two gathers, gradients joined, cast, divided and scattered: 40 bytes per parameter",
    sharded_bytes=40.0,
    buffer_bytes=2.0 * GIB,
)
_ENGINE = Implementation(
    name="Megatron core, TransformerEngine",
    source="a block of fused kernels counted by hand; the weight gradient's product adds to the gradient itself",
    accumulation_bytes=0.0,
    weight_bytes=2.0,
    optimizer_state_bytes=12.0,
    logit_bytes=6.0,
    aside_bytes=2.0,
)
_SCORES = Implementation(
    name="Megatron-LM 2022",
    source="arXiv:2205.05198: scores are written; fused scale, mask and softmax, dropout apart",
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


def software_of(software: str, row: PublishedStep) -> Implementation:
    """The traits of a software for one row: gated MLPs move more, fp8 casts what it multiplies."""
    code = SOFTWARES[software]
    if software == "llm-foundry":
        if not row.gradients_in_fp32:
            # Rows without autocast are the older ones (inferred): Composer's FSDPConfig says BACKWARD_POST, so that
            # the second gather begins after the gradients of the block behind; torch's own loss.
            return dataclasses.replace(code, gradient_bytes=2.0, prefetches_backward=False)
        # loss_fn of ComposerMPTCausalLM is fused_crossentropy: reads the scores, reads them again, writes gradients.
        # Under autocast norms and residuals are in fp32 beside 16-bit copies: 64 and 108 bytes per token and width.
        # Its checkpoints are not reentrant, and end early since torch 2.1 (inferred: these rows are the newer ones).
        return dataclasses.replace(
            code,
            gradient_bytes=4.0,
            forward_logit_bytes=2.0,
            backward_logit_bytes=4.0,
            forward_width_bytes=48.0,
            backward_width_bytes=84.0,
            stops_early=True,
        )
    if software in ("nemo", "simumax"):
        casts = 16.0 if row.dtype == "fp8" else 0.0
        gated = row.architecture.gated
        return dataclasses.replace(
            code,
            forward_hidden_bytes=6.0 if gated else 4.0,
            backward_hidden_bytes=10.0 if gated else 6.0,
            kept_hidden_bytes=6.0 if gated else 4.0,
            forward_width_bytes=code.forward_width_bytes + casts,
            backward_width_bytes=code.backward_width_bytes + casts,
        )
    return code
