"""Megatron-LM and Megatron-DeepSpeed: the lines of iterations.  TFLOPs are of one GPU, samples of all."""

from __future__ import annotations

import re

from perfsuite.imports.row import Format, Imported, Source, Told
from perfsuite.imports.steps import Figure, read_steps

_STEP = re.compile(r"\biteration\s+(\d+)/\s*\d+\s*\|")
_NUMBER = r"([-+\d.,eE]+|nan|inf)"
_TIME = "elapsed time per iteration (ms):"
_FIGURES = (
    Figure(
        pattern=re.compile(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}"),
        metric="step_time_ms",
        unit="ms",
        better="lower",
        convention="megatron: mean since the last report",
    ),
    Figure(
        pattern=re.compile(rf"samples per second:\s*{_NUMBER}"),
        metric="samples_per_s",
        unit="samples/s",
        better="higher",
        convention="megatron: of all devices",
    ),
    Figure(
        pattern=re.compile(rf"(?:TFLOPs|throughput per GPU \(TFLOP/s/GPU\)):\s*{_NUMBER}"),
        metric="tflops_per_device",
        unit="TFLOPS",
        better="higher",
        convention="megatron: its own count of FLOPs, recomputation included where it is on",
    ),
    Figure(pattern=re.compile(rf"lm loss:\s*{_NUMBER}"), metric="loss", unit="", better="lower", convention="megatron"),
)
_SETTINGS = (
    ("global_batch_size", re.compile(r"global batch size:\s*(\d+)")),
    ("sequence_length", re.compile(r"actual seqlen:\s*(\d+)")),
)


def _read(source: Source, told: Told) -> Imported:
    return read_steps(source, told, tool="megatron", step=_STEP, figures=_FIGURES, needed=_TIME, settings=_SETTINGS)


FORMAT = Format(
    name="megatron",
    about="Megatron-LM and Megatron-DeepSpeed iteration lines",
    recognises=lambda source: bool(_STEP.search(source.text)),
    read=_read,
)
