"""FlagPerf's run_pretraining.py of language models: the lines at the end of each epoch, stage or training.

Under DeepSpeed, tokens are its samples per second of all devices x sequence length x local batch. A local batch above 1
is therefore counted twice. Tokens/p/s of llama2_7b divides by the devices of a node and multiplies by the nodes. MFU is
2 or 6 operations per parameter and token over the peak in the configuration, which only some programs print.
llama2_7b_finetune prints the tokens of a step as tokens per second. Source: FlagPerf training/benchmarks, 1193d60.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from perfsuite.base.units import plural
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Refused, Source

_TWICE = "under DeepSpeed a local batch above 1 is counted twice"
_FIGURES: dict[str, tuple[Meaning, float, str]] = {
    "System tokens per second": (("tokens_per_s", "tokens/s", "higher"), 1.0, f"flagperf: of all devices; {_TWICE}"),
    "Tokens/p/s": (
        ("tokens_per_s_per_device", "tokens/s", "higher"),
        1.0,
        f"flagperf: of one device where there is one node; {_TWICE}",
    ),
    "Tokens/TFLOPS": (("tokens_per_tflop", "tokens/TFLOP", "higher"), 1.0, f"flagperf: over the stated peak; {_TWICE}"),
    "MFU": (("mfu_percent", "percent", "higher"), 100.0, f"flagperf: {{}}; {_TWICE}"),
}
_PRINTED = re.compile(
    r"(?<![\w/])(?P<name>System tokens per second|Tokens/p/s|Theory TFLOPS|Tokens/TFLOPS|MFU): \s*(?P<value>\S*)\s*$"
)
"""The end of a line, after any prefix of launchers and containers."""
_STAGE = re.compile(r"^\s*(?P<stage>(?:Pretrain|Finetune) stage)\s*$")  # Of llava1.5.
_TIMER = re.compile(r"global_step=(\d+),\s*RunningAvgSamplesPerSec=(\S+?),\s*CurrSamplesPerSec=(\S+?),(?!\d)")


def _read(source: Source) -> Imported:
    refused: list[Refused] = []
    rows = [*_ends(source, refused), *_timers(source)]
    if not any(row.metric == "tokens_per_s_per_device" for row in rows):
        raise source.fault(1, "no line 'Tokens/p/s: ': no epoch ended", "give the log of a run that ended")
    epochs = sum(row.metric == "tokens_per_s_per_device" for row in rows)
    return source.imported(rows, refused=refused, notes=[plural(epochs, "epoch")])


def _ends(source: Source, refused: list[Refused]) -> Iterator[ImportedRow]:
    """Yield the figures at the end of epochs; a peak applies to the figures after it."""
    epoch, peak, stage, tokens = 1, "", "", 0.0
    seen: set[str] = set()
    is_finetuning = any("avg_iter_time(s):" in line for line in source.lines)
    for number, line in enumerate(source.lines, start=1):
        if begin := _STAGE.match(line):
            stage = begin["stage"].lower()
        match = _PRINTED.search(line)
        if match is None:
            continue
        name, text = match["name"], match["value"]
        if name in seen:  # the next epoch
            epoch, peak, seen = epoch + 1, "", set()
        seen.add(name)
        value = source.number(number, text, name)
        if name == "Theory TFLOPS":
            peak = text
            continue
        if name == "System tokens per second" and is_finetuning:
            refused.append(Refused(line=number, text=line.strip(), why="the tokens of a step, not of a second"))
            continue
        tokens = value if name == "Tokens/p/s" else tokens
        meaning, scale, how = _FIGURES[name]
        count = "2 or 6 operations per parameter and token over a peak that the log does not state"
        if peak and tokens:
            operations = value * float(peak.replace(",", "")) * 1e3 / tokens
            count = f"{operations:.4g}e9 operations a token over the stated peak"
        how = how.format(count)
        settings = {"epoch": str(epoch), **({"stated_peak_tflops": peak} if peak else {})}
        yield source.row(
            number, stage or f"epoch {epoch}", meaning, scale * value, printed=text, convention=how, settings=settings
        )


def _timers(source: Source) -> Iterator[ImportedRow]:
    """Yield the last running average of DeepSpeed's timer, from which the tokens are computed."""
    for number, line in enumerate(source.lines, start=1):
        if hit := _TIMER.search(line):
            yield source.row(
                number,
                f"step {hit[1]}",
                ("samples_per_s", "samples/s", "higher"),
                source.number(number, hit[2], "RunningAvgSamplesPerSec"),
                printed=hit[2],
                convention="deepspeed: of all devices, mean since the second step",
                settings={"step": hit[1]},
            )


FORMAT = Format(
    name="flagperf-pretraining",
    about="lines that FlagPerf's run_pretraining.py of language models prints (Tokens/p/s, MFU)",
    recognises=lambda source: any(line.partition("Tokens/p/s: ")[1] for line in source.lines),
    read=_read,
)
