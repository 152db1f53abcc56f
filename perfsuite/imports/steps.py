"""Trainers' logs: a line per step with figures by name, of which every rank may print its own.

Megatron-LM and Megatron-DeepSpeed: TFLOPs are of one GPU, samples of all.  torchtitan: tps is of one device; MFU counts
by torchtitan's own convention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from perfsuite.base.units import plural
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Source

Figure = tuple[str, Meaning, str]
"""What stands before the number, with @ in its place; meaning; convention."""

_NUMBER = r"([-+\d.,eE]+|nan|inf)"


def _read_steps(
    source: Source,
    step: re.Pattern[str],
    figures: Sequence[Figure],
    needed: str,
    settings: Sequence[tuple[str, str]] = (),
) -> Imported:
    """All steps of a log; of ranks that print the same step the first counts.

    ``step`` finds a step's line, group 1 its number.  A line without ``needed`` was cut.  Raises ImportFailed.
    """
    patterns = [(re.compile(text.replace("@", rf"\s*{_NUMBER}")), meaning, how) for text, meaning, how in figures]
    rows: list[ImportedRow] = []
    again = 0
    seen: set[str] = set()
    for number, line in enumerate(source.lines, start=1):
        match = step.search(line)
        if match is None:
            continue
        if needed not in line:
            raise source.fault(number, f"the line of step {match[1]} ends before {needed!r}: it was cut", "remove it")
        if match[1] in seen:
            again += 1
            continue
        seen.add(match[1])
        context = {name: hit[1] for name, pattern in settings if (hit := re.search(pattern, line))}
        context = {"step": match[1], **context}
        for number_at, meaning, convention in patterns:
            if hit := number_at.search(line):
                value, name = source.number(number, hit[1], meaning[0]), f"step {match[1]}"
                how = {"printed": hit[1], "convention": convention}
                rows.append(source.row(number, name, meaning, value, **how, settings=context))
    if not rows:
        raise source.fault(1, "no line of a step", "give the log of a run that reached its first report")
    notes = [plural(len(seen), "step"), "the first steps of a run are warm-up"]
    notes += [f"{plural(again, 'line')} of other ranks for the same steps left out"] if again else []
    return source.imported(rows, notes=notes)


_MEGATRON_STEP = re.compile(r"\biteration\s+(\d+)/\s*\d+\s*\|")
_MEGATRON: tuple[Figure, ...] = (
    (r"elapsed time per iteration \(ms\):@", ("step_time_ms", "ms", "lower"), "megatron: mean since the last report"),
    (r"samples per second:@", ("samples_per_s", "samples/s", "higher"), "megatron: of all devices"),
    (r"(?:TFLOPs|throughput per GPU \(TFLOP/s/GPU\)):@", ("tflops_per_device", "TFLOPS", "higher"),
     "megatron: its own count of FLOPs, recomputation included where it is on"),
    (r"lm loss:@", ("loss", "", "lower"), "megatron"),
)  # fmt: skip
_MEGATRON_SETTINGS = (
    ("global_batch_size", r"global batch size:\s*(\d+)"),
    ("sequence_length", r"actual seqlen:\s*(\d+)"),
)

MEGATRON = Format(
    name="megatron",
    about="Megatron-LM and Megatron-DeepSpeed iteration lines",
    recognises=lambda source: bool(_MEGATRON_STEP.search(source.text)),
    read=lambda source: _read_steps(
        source, _MEGATRON_STEP, _MEGATRON, "elapsed time per iteration (ms):", _MEGATRON_SETTINGS
    ),
)

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TITAN_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")
_TITAN: tuple[Figure, ...] = (
    (r"loss:@", ("loss", "", "lower"), "torchtitan"),
    (r"memory:@GiB", ("reserved_memory_gib", "GiB", "lower"), "torchtitan: peak reserved since the last report"),
    (r"tps:@", ("tokens_per_s_per_device", "tokens/s", "higher"), "torchtitan: of one device"),
    (r"tflops:@", ("tflops_per_device", "TFLOPS", "higher"), "torchtitan: 6 (N - embedding) + 12 L h s a token"),
    (r"mfu:@%", ("mfu_percent", "percent", "higher"),
     "torchtitan: its tflops over the peak that it takes for the device"),
)  # fmt: skip

TORCHTITAN = Format(
    name="torchtitan",
    about="torchtitan's metric lines",
    recognises=lambda source: bool(_TITAN_STEP.search(_COLOURS.sub("", source.text))) and "tps:" in source.text,
    read=lambda source: _read_steps(replace(source, text=_COLOURS.sub("", source.text)), _TITAN_STEP, _TITAN, "tps:"),
)
