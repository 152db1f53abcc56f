"""Programs that print a line per step: torchtitan, Latte, DiT, libai, OneFlow's GPT, and Megatron's family.

torchtitan: tps (wps until 2025) is per device; MFU uses torchtitan's peak of the device. OneFlow's GPT prints figures
as ``name=value,`` or as a table, and the memory of nvidia-smi once.

The family is Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, NeMo and AMD's Primus. Their fields end with ``|``; lines of
DeepSpeed among them are read too. Megatron-LM counts the FLOPs of the model (3 x forward). Megatron-DeepSpeed and
GPT-NeoX add the recomputed forward pass. Primus prints last and mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from perfsuite.imports import deepspeed
from perfsuite.imports.row import Format, Imported, LogFigures, Meaning, Source
from perfsuite.imports.steps import (
    StepField,
    StepFigure,
    StepLine,
    StepProgram,
    any_line,
    figures_of,
    found_in,
    imported,
    read_steps,
)

_LOSS: Meaning = ("loss", "", "lower")
_STEP_MS: Meaning = ("step_time_ms", "ms", "lower")
_SAMPLES: Meaning = ("samples_per_s", "samples/s", "higher")
_TOKENS: Meaning = ("tokens_per_s_per_device", "tokens/s", "higher")


def _spaced(names: str) -> re.Pattern[str]:
    """Return the pattern of fields separated by two blanks, or by one blank and a field name."""
    value = r"(?P<name>[a-z][\w/]*(?: samples)?):\s*(?P<value>.*?)"
    return re.compile(rf"{value}(?P<end>\s{{2,}}(?=[a-z][\w/]*(?: [a-z]+)?:)|\s+(?=(?:{names}):)|\s*$)")


_TITAN_TOKENS = (StepFigure(meaning=_TOKENS, convention="torchtitan: of one device"),)
_TITAN = StepProgram(
    step=re.compile(
        r"(?:\b(?P<phase>[a-z]+)[ _-])?\bstep:\s*(?P<step>\d+)(?:\s*/\s*\d+(?:\s*=\s*[\d.]+%)?)?\s+(?=loss:)"
    ),
    fields=_spaced("step|loss|grad_norm|memory|tps|wps|tflops|mfu|it/s|im/s"),
    figures={
        "loss": (StepFigure(meaning=_LOSS, convention="torchtitan: mean over the ranks"),),
        "memory": (
            StepFigure(
                meaning=("reserved_memory_gib", "GiB", "lower"),
                convention="torchtitan: peak reserved since the last report",
                form=r"@GiB(?:\(#%\))?",
                beside="memory in percent",
            ),
        ),
        "tps": _TITAN_TOKENS,
        "wps": _TITAN_TOKENS,
        "tflops": (
            StepFigure(
                meaning=("tflops_per_device", "TFLOPS", "higher"),
                convention="torchtitan: 6 (N - embedding) + 12 L h s a token",
            ),
        ),
        "mfu": (
            StepFigure(
                meaning=("mfu_percent", "percent", "higher"),
                convention="torchtitan: its tflops over the peak that it takes for the device",
                form="@%",
            ),
        ),
    },
    mark=re.compile(r"\b(?:tps|wps):\s*\d|\bmfu:"),
)

_SINCE = "mean since the last report"
_LATTE = StepProgram(
    step=re.compile(r"\(step=(?P<step>\d+)(?:/epoch=\d+)?\)\s+(?=Train Loss:)"),
    fields=re.compile(r"(?P<name>[A-Z][\w /-]*):\s*(?P<value>[^,]*?)\s*(?P<end>,|$)"),
    figures={
        "train loss": (StepFigure(meaning=_LOSS, convention=f"latte, dit: {_SINCE}, over the ranks"),),
        "train steps/sec": (
            StepFigure(
                meaning=("steps_per_s", "steps/s", "higher"),
                convention=f"latte, dit: steps of the whole job; {_SINCE}",
                form=r"(?P<number>\d+\.\d\d)",
                is_whole=True,
            ),
        ),
        "samples/sec": (StepFigure(meaning=_SAMPLES, convention=f"of all devices; {_SINCE}"),),
    },
    mark=re.compile(r"\bTrain Steps/Sec:"),
)

_RUN = "libai: mean since the first iteration"
_LIBAI = StepProgram(
    step=re.compile(r"\biteration:\s*(?P<step>\d+)/\d+\s+(?=consumed[_ ]samples:)"),
    fields=_spaced(r"consumed[_ ]samples|\w*loss\w*|time|data_time|total_throughput|tokens_throughput|acc_mlm|lr"),
    figures={
        "total_loss": (StepFigure(meaning=_LOSS, convention="libai: median of 200 iterations"),),
        "time": (
            StepFigure(meaning=_STEP_MS, convention=f"{_RUN}, printed in s", form=r"@\(#\)", scales={"": 1e3}),
            StepFigure(meaning=_SAMPLES, convention=f"of all devices; {_RUN}", form=r"#\(@\)"),
            StepFigure(meaning=_STEP_MS, convention=f"{_RUN}, printed in s", form="@ s/iter", scales={"": 1e3}),
        ),
        "total_throughput": (StepFigure(meaning=_SAMPLES, convention=f"of all devices; {_RUN}", form="@ samples/s"),),
        "tokens_throughput": (
            StepFigure(
                meaning=("tokens_per_s", "tokens/s", "higher"), convention=f"of all devices; {_RUN}", form="@ tokens/s"
            ),
        ),
    },
    mark=re.compile(r"\bdata_time:\s*\d"),
)

_ONEFLOW_SINCE = f"oneflow: {_SINCE}"
_ONEFLOW = StepProgram(
    step=re.compile(r"\bstep=(?P<step>\d+),(?=micro_batches=)"),
    fields=re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>[^,=]*?)(?P<end>,|$)"),
    figures={
        "throughput": (StepFigure(meaning=_SAMPLES, convention=f"of all devices; {_ONEFLOW_SINCE}"),),
        "latency": (StepFigure(meaning=_STEP_MS, convention=f"{_ONEFLOW_SINCE}, printed in s", scales={"": 1e3}),),
        "loss": (
            StepFigure(
                meaning=_LOSS, convention="oneflow: mean since the last report, to which the last printed loss is added"
            ),
        ),
    },
    mark=re.compile(r"\bmicro_batches=\d"),
)
_COLUMNS = re.compile(r"^\|\s*step\s*\|\s*micro_batches\s*\|.*\blatency\s*\|.*\|\s*$")
_CELLS = re.compile(r"^\|(?P<cells>(?:[^|]*\|)+)\s*$")
_MEMORY_COLUMNS = "memory.used [MiB]"
_MEMORY: Mapping[str, Sequence[StepFigure]] = {
    "memory": (
        StepFigure(
            meaning=("memory_used_gib", "GiB", "lower"),
            convention="nvidia-smi: memory of a device that all programs use, printed in MiB",
            form=r"# %, @ MiB",
            scales={"": 1 / 1024},
        ),
    )
}


def _read_oneflow(source: Source) -> Imported:
    found = found_in(source, _ONEFLOW)
    tables = LogFigures()
    found.add(figures_of(source, list(_table(source, tables)), _ONEFLOW.figures, ignored=_ONEFLOW.ignored))
    found.add(tables)
    found.add(figures_of(source, list(_memory(source)), _MEMORY))
    return imported(source, found)


def _table(source: Source, found: LogFigures) -> Iterator[StepLine]:
    """Yield the rows of step tables; refuse rows with other columns than the header."""
    columns: list[str] = []
    for number, line in enumerate(source.lines, start=1):
        if _COLUMNS.match(line):
            columns = [name.strip() for name in line.strip().strip("|").split("|")]
            continue
        if not columns or "|" not in line or not re.search(r"\d", line):
            continue
        match = _CELLS.match(line)
        cells = [cell.strip() for cell in match["cells"].split("|")[:-1]] if match else []
        if len(cells) != len(columns) or not cells[0].isdigit():
            why = f"the row does not have the {len(columns)} columns of the table: it was cut, or mixed with another"
            found.refuse(number, line, why)
            continue
        pairs = zip(columns, cells, strict=True)
        fields = tuple(StepField(name=name, value=cell, is_closed=True) for name, cell in pairs)
        step = int(cells[0])
        yield StepLine(line=number, name=f"step {step}", fields=fields, step=step, text=line)


def _memory(source: Source) -> Iterator[StepLine]:
    device: int | None = None
    for number, line in enumerate(source.lines, start=1):
        if _MEMORY_COLUMNS in line:
            device = 0
        elif device is not None and len(line) < 100 and (match := re.search(r"\d+ %,.*|.*\d MiB\s*$", line)):
            field = StepField(name="memory", value=match[0].strip(), is_closed=False)
            yield StepLine(line=number, name=f"device {device}", fields=(field,))
            device += 1


_of_run = partial(Format, options=("run",))
TORCHTITAN = _of_run(
    name="torchtitan",
    about="torchtitan's metric lines",
    recognises=lambda source: _TITAN.begins(source) and any_line(source.lines, _TITAN.mark),
    read=partial(read_steps, program=_TITAN),
)
LATTE, LIBAI = (
    _of_run(name=name, about=about, recognises=program.begins, read=partial(read_steps, program=program))
    for name, about, program in (
        ("latte", "Latte's and DiT's lines with Train Steps/Sec", _LATTE),
        ("libai", "libai's iteration lines", _LIBAI),
    )
)
ONEFLOW = _of_run(
    name="oneflow",
    about="the log of OneFlow-Benchmark's GPT",
    recognises=lambda source: _ONEFLOW.begins(source) or any_line(source.lines, _COLUMNS),
    read=_read_oneflow,
)


_TFLOPS: Meaning = ("tflops_per_device", "TFLOPS", "higher")
_MEGATRON_LOSS = (StepFigure(meaning=("loss", "", "lower"), convention="mean since the last report"),)
_LAST, _MEAN = "primus: last iteration", "primus: mean of recent iterations"
_MODEL_FLOPS = "model FLOPs: 3 x forward, without recomputation"
_UNITS = {"KFLOPS": 1e-9, "MFLOPS": 1e-6, "GFLOPS": 1e-3, "TFLOPS": 1.0, "PFLOPS": 1e3, "EFLOPS": 1e6}


def _alone_or_last(meaning: Meaning, how: str, *, harmonic: str = "mean") -> tuple[StepFigure, ...]:
    """Return the forms ``5``, ``5/6`` and ``5 (avg 6)``; 6 is Primus' mean."""
    mean = (f"mean_{meaning[0]}", *meaning[1:])
    before = _MEAN.replace("mean", harmonic)
    return (
        StepFigure(meaning=meaning, convention=f"{how}; {_SINCE}"),
        *(
            figure
            for last, average in ((r"@\s*/\s*#", r"#\s*/\s*@"), (r"@ \(avg #\)", r"# \(avg @\)"))
            for figure in (
                StepFigure(meaning=meaning, convention=f"{how}; {_LAST}", form=last),
                StepFigure(meaning=mean, convention=f"{how}; {before}", form=average),
            )
        ),
    )


_FIGURES: Mapping[str, Sequence[StepFigure]] = {
    "elapsed time per iteration (ms)": _alone_or_last(_STEP_MS, "wall time"),
    "elapsed time per iteration (s)": (
        StepFigure(meaning=_STEP_MS, convention=f"printed in s; {_SINCE}", scales={"": 1e3}),
    ),
    "throughput per gpu (tflop/s/gpu)": _alone_or_last(_TFLOPS, f"megatron-lm: {_MODEL_FLOPS}"),
    "compute per gpu (tflop/s/gpu)": _alone_or_last(_TFLOPS, f"primus: {_MODEL_FLOPS}"),
    "tflops": (
        StepFigure(
            meaning=_TFLOPS,
            convention=f"megatron-deepspeed: 3 x forward, 4 x where activations are recomputed; {_SINCE}",
        ),
    ),
    "approx flops per gpu": (
        StepFigure(
            meaning=_TFLOPS,
            convention=f"gpt-neox: 3 x forward, 4 x where activations are recomputed; {_SINCE}",
            form="@(?P<unit>[KMGTPE]FLOPS)",
            scales=_UNITS,
        ),
    ),
    "samples per second": (StepFigure(meaning=_SAMPLES, convention=f"of all devices; {_SINCE}"),),
    "samples/sec": (StepFigure(meaning=_SAMPLES, convention=f"gpt-neox: of all devices; {_SINCE}"),),
    "tokens per gpu (tokens/s/gpu)": _alone_or_last(_TOKENS, "of one device"),
    "tokens/s/gpu inst/harmonic mean": _alone_or_last(_TOKENS, "of one device", harmonic="harmonic mean"),
    **dict.fromkeys(
        (
            "tokens per gpu per second (tgs)",
            "tokens per second per gpu (tok/s/gpu)",
            "tokens-per-second-per-gpu",
            "tokens/sec/gpu",
            "tgs",
        ),
        (StepFigure(meaning=_TOKENS, convention=f"of one device; {_SINCE}"),),
    ),
    "throughput (tokens/s)": (
        StepFigure(meaning=("tokens_per_s", "tokens/s", "higher"), convention=f"of all devices; {_SINCE}"),
    ),
    "train_step_timing in s": (
        StepFigure(meaning=_STEP_MS, convention="nemo: last iteration, printed in s", scales={"": 1e3}),
    ),
    "reduced_train_loss": (StepFigure(meaning=("loss", "", "lower"), convention="nemo: last iteration"),),
    "lm loss": _MEGATRON_LOSS,
    "lm_loss": _MEGATRON_LOSS,
}
PROGRAM = StepProgram(
    step=re.compile(r"(?:\b[A-Za-z/]{1,20}:\s*[^\s|]{1,30}\s*\|\s*)?\biteration\s+(?P<step>\d+)/\s*\d+\s*\|"),
    fields=re.compile(r"(?P<name>[A-Za-z][^|:]*):\s*(?P<value>[^|]*?)\s*(?P<end>\||$)"),
    figures=_FIGURES,
    mark=re.compile(r"elapsed time per iteration \(m?s\):|\btrain_step_timing in s:|\blm[ _]loss: +\d"),
    settings={
        "global batch size": "global_batch_size",
        "actual seqlen": "sequence_length",
        "actual seq length": "sequence_length",
    },
)
_BAR = StepProgram(
    step=re.compile(r"\bEpoch \d+:[^\[]*\|\s*(?P<step>\d+)/\d+ \[(?=[^\]]*\breduced_train_loss=)"),
    fields=re.compile(r"(?P<name>[A-Za-z_][\w ]*)=(?P<value>nan(?=\.0)|[^,\]]*)(?:\.0(?=,))?(?P<end>[,\]]|$)"),
    figures=_FIGURES,
    mark=re.compile(r"\btrain_step_timing in s="),
    ignored=frozenset({"global_step", "v_num"}),
)
"""NeMo's progress bar; the bar counts the steps exactly, while its global_step has three digits."""
_BRIDGE = re.compile(r"\bStep Time : (?P<time>[\d.]+s) GPU utilization: (?P<rate>[\d.]+MODEL_TFLOP/s/GPU)\s*$")
_BRIDGE_FIGURES: Mapping[str, Sequence[StepFigure]] = {
    "time": (StepFigure(meaning=_STEP_MS, convention="megatron-bridge: printed in s", form="@s", scales={"": 1e3}),),
    "rate": (StepFigure(meaning=_TFLOPS, convention=f"megatron-bridge: {_MODEL_FLOPS}", form="@MODEL_TFLOP/s/GPU"),),
}
_NEOX = re.compile(r"\bsamples/sec:.*\biteration\s+\d+/|\biteration\s+\d+/.*\bapprox flops per GPU:")
_PRIMUS = re.compile(r"\biteration\s+\d+/.*(?:tokens/s/GPU|hip mem usage|per iteration \(ms\):\s*[\d.]+/[\d.]+)")


def family(source: Source) -> str:
    """Return the format of the iteration lines of a file; empty without iteration lines.

    >>> from pathlib import Path
    >>> family(Source(path=Path(), text="samples/sec: 51.2 | iteration 10/ 50 | elapsed"))
    'gpt-neox'
    """
    if not PROGRAM.begins(source):
        return "megatron" if _BAR.begins(source) else ""
    if any_line(source.lines, _NEOX):
        return "gpt-neox"
    return "primus" if any_line(source.lines, _PRIMUS) else "megatron"


def _read_megatron(source: Source) -> Imported:
    found = found_in(source, PROGRAM)
    found.add(found_in(source, _BAR))
    found.add(figures_of(source, list(_bridge(source)), _BRIDGE_FIGURES))
    found.add(deepspeed.all_figures(source))
    return imported(source, found)


def _bridge(source: Source) -> Iterator[StepLine]:
    reports = ((number, match) for number, line in enumerate(source.lines, start=1) if (match := _BRIDGE.search(line)))
    for report, (number, match) in enumerate(reports, start=1):
        fields = tuple(StepField(name=name, value=match[name], is_closed=True) for name in _BRIDGE_FIGURES)
        yield StepLine(line=number, name=f"report {report}", fields=fields)


MEGATRON, GPT_NEOX, PRIMUS = (
    _of_run(
        name=name,
        about=about,
        recognises=lambda source, name=name: family(source) == name,  # type: ignore[misc]
        read=_read_megatron,
    )
    for name, about in (
        ("megatron", "iteration lines of Megatron-LM, Megatron-DeepSpeed and NeMo"),
        ("gpt-neox", "GPT-NeoX iteration lines"),
        ("primus", "iteration lines of AMD's Primus"),
    )
)
