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


_PROGRESS = re.compile(r"SamplesPerSec=|\bStep \d+/\d+, Loss: ")
"""Lines of steps; each node prints the figures at the end, and no steps follow between two nodes."""


def _read(source: Source) -> Imported:
    refused: list[Refused] = []
    notes: list[str] = []
    rows = [*_ends(source, refused, notes), *_timers(source)]
    epochs = sum(row.metric == "tokens_per_s_per_device" for row in rows)
    if not epochs:
        raise source.fault(1, "no line 'Tokens/p/s: ': no epoch ended", "give the log of a run that ended")
    return source.imported(rows, refused=refused, notes=[plural(epochs, "epoch"), *notes])


def _reports(source: Source, refused: list[Refused]) -> Iterator[tuple[int, str, dict[str, tuple[int, str]]]]:
    """Yield the figures at the end of epochs by name, after the number of steps before them and their stage."""
    reports: dict[str, dict[str, tuple[int, str]]] = {}  # Of each rank or host in the prefix of lines.
    steps, stage = 0, ""
    for line in source.labelled:
        if begin := _STAGE.match(line.text):
            stage, steps = begin["stage"].lower(), steps + 1
        steps += _PROGRESS.search(line.text) is not None
        match = _PRINTED.search(line.text)
        if match is None:
            continue
        if match["value"].startswith("-"):
            why = "below 0: this node prints no step time; use the log of the node that does"
            refused.append(Refused(line=line.number, text=line.text.strip(), why=why))
            continue
        report = reports.setdefault(line.label, {})
        if not report or match["name"] in report:
            report = reports[line.label] = {}
            yield steps, stage, report
        report[match["name"]] = (line.number, match["value"])


def _ends(source: Source, refused: list[Refused], notes: list[str]) -> Iterator[ImportedRow]:
    """Yield the figures at the end of epochs; nodes that end the same epoch count once."""
    is_finetuning = any("avg_iter_time(s):" in line for line in source.lines)
    reports = list(_reports(source, refused))
    nodes, epoch, last = 0, 0, -1
    is_unknown = len(reports) > 1 and not any(steps for steps, *_ in reports)
    for steps, stage, report in reports:
        if steps == last and not is_unknown:
            nodes += 1
            continue
        epoch, last = epoch + 1, steps
        peak = report.get("Theory TFLOPS", (0, ""))[1]
        figures = {name: source.number(number, text, name) for name, (number, text) in report.items()}
        tokens = figures.get("Tokens/p/s", 0.0)
        for name, (number, text) in report.items():
            if name == "Theory TFLOPS":
                continue
            if name == "System tokens per second" and is_finetuning:
                why = "the tokens of a step, not of a second"
                refused.append(Refused(line=number, text=f"{name}: {text}", why=why))
                continue
            meaning, scale, how = _FIGURES[name]
            count = "2 or 6 operations per parameter and token over a peak that the log does not state"
            if peak and tokens:
                operations = figures[name] * float(peak.replace(",", "")) * 1e3 / tokens
                count = f"{operations:.4g}e9 operations a token over the stated peak"
            noun = "report" if is_unknown else "epoch"
            yield source.row(
                number,
                stage or f"{noun} {epoch}",
                meaning,
                scale * figures[name],
                printed=text,
                convention=how.format(count),
                settings={noun: str(epoch), **({"stated_peak_tflops": peak} if peak else {})},
            )
    if nodes:
        notes.append(f"{plural(nodes, 'report')} of other nodes for the same epochs left out")
    if is_unknown:
        notes.append("the log has no lines of steps: its reports may be of epochs, nodes or runs")


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
