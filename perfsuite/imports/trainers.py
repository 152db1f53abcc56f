"""Programs that print a line per step: torchtitan, Latte, libai, OneFlow's GPT, nanotron, MaxText, nanoGPT, InternEvo.

Composer prints a block per step, the Trainer of Hugging Face a line per training.

torchtitan: tps (wps until 2025) is per device; MFU uses torchtitan's peak of the device. OneFlow's GPT prints figures
as ``name=value,`` or as a table, and the memory of nvidia-smi once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from perfsuite.base.units import plural
from perfsuite.imports.row import Format, Imported, LogFigures, Meaning, Source
from perfsuite.imports.steps import (
    NO_GROUPS,
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
_TFLOPS: Meaning = ("tflops_per_device", "TFLOPS", "higher")
_STEPS: Meaning = ("steps_per_s", "steps/s", "higher")
_ALL_TOKENS: Meaning = ("tokens_per_s", "tokens/s", "higher")
_MFU: Meaning = ("mfu_percent", "percent", "higher")
_RESERVED: Meaning = ("reserved_memory_gib", "GiB", "lower")


def _spaced(names: str) -> re.Pattern[str]:
    """Return the pattern of fields separated by two blanks, or by one blank and a field name."""
    value = r"(?P<name>[a-z][\w/]*(?: samples)?):\s*(?P<value>.*?)"
    return re.compile(rf"{value}(?P<end>\s{{2,}}(?=[a-z][\w/]*(?: [a-z]+)?:)|\s+(?=(?:{names}):)|\s*$)")


def _fixed(meaning: Meaning, how: str, decimals: int, factor: float = 1.0) -> tuple[StepFigure, ...]:
    """Return a figure that is always printed with as many decimals, so that a cut one is noticed."""
    form = rf"(?P<number>-?\d+\.\d{{{decimals}}}|nan|inf)"
    return (StepFigure(meaning=meaning, convention=how, form=form, is_whole=True, scales={"": factor}),)


_TITAN_TOKENS = (
    # It prints whole numbers: 12.345 is 12 thousand with another separator.
    StepFigure(meaning=_TOKENS, convention="torchtitan: of one device", form=r"(?!\d{1,3}(?:\.\d{3})+$)@"),
)
_TITAN = StepProgram(
    step=re.compile(
        r"(?:\b(?P<phase>[a-z]+)[ _-])?\bstep:\s*(?P<step>\d{1,18})(?:\s*/\s*\d+(?:\s*=\s*[\d.]+%)?)?\s+(?=loss:)"
    ),
    fields=_spaced("step|loss|grad_norm|memory|tps|wps|tflops|mfu|it/s|im/s"),
    figures={
        "loss": (StepFigure(meaning=_LOSS, convention="torchtitan: mean over the ranks"),),
        "memory": (
            StepFigure(
                meaning=_RESERVED,
                convention="torchtitan: peak reserved since the last report",
                form=r"@GiB(?:\(#%\))?",
                beside="memory in percent",
            ),
        ),
        "tps": _TITAN_TOKENS,
        "wps": _TITAN_TOKENS,
        "tflops": (StepFigure(meaning=_TFLOPS, convention="torchtitan: 6 (N - embedding) + 12 L h s a token"),),
        "mfu": (
            StepFigure(meaning=_MFU, convention="torchtitan: over the peak that it takes for the device", form="@%"),
        ),
    },
    mark=re.compile(r"\b(?:tps|wps):\s*\d|\bmfu:"),
)

_SINCE = "mean since the last report"
_LATTE = StepProgram(
    step=re.compile(r"\(step=(?P<step>\d{1,18})(?:/epoch=\d+)?\)\s+(?=Train Loss:)"),
    fields=re.compile(r"(?P<name>[A-Z][\w /-]*):\s*(?P<value>[^:]*?)\s*(?P<end>,(?!\d)|$)"),
    figures={
        "train loss": (StepFigure(meaning=_LOSS, convention=f"latte, dit: {_SINCE}, over the ranks"),),
        "train steps/sec": _fixed(_STEPS, f"latte, dit: steps of the whole job; {_SINCE}", 2),
        "samples/sec": (StepFigure(meaning=_SAMPLES, convention=f"of all devices; {_SINCE}"),),
    },
    mark=re.compile(r"\bTrain Steps/Sec:"),
)

_RUN = "libai: mean since the first iteration"
_LIBAI = StepProgram(
    step=re.compile(r"\biteration:\s*(?P<step>\d{1,18})/\d+\s+(?=consumed[_ ]samples:)"),
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
            StepFigure(meaning=_ALL_TOKENS, convention=f"of all devices; {_RUN}", form="@ tokens/s"),
        ),
    },
    mark=re.compile(r"\bdata_time:\s*\d"),
)

_ONEFLOW_SINCE = f"oneflow: {_SINCE}"
_ONEFLOW = StepProgram(
    step=re.compile(r"\bstep=(?P<step>\d{1,18}),(?=micro_batches=)"),
    fields=re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>[^=]*?)(?P<end>,(?!\d)|$)"),
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
        if len(cells) != len(columns) or not re.fullmatch(r"[0-9]{1,18}", cells[0]):
            why = f"the row does not have the {len(columns)} columns of the table: it was cut, or mixed with another"
            found.refuse(number, line, why)
            continue
        pairs = zip(columns, cells, strict=True)
        fields = tuple(StepField(name=name, value=cell, is_closed=True) for name, cell in pairs)
        step = int(cells[0])
        yield StepLine(line=number, name=f"step {step}", fields=fields, step=step, text=line)


def _memory(source: Source) -> Iterator[StepLine]:
    """Yield the memory of each device from nvidia-smi's table."""
    device: int | None = None
    for number, line in enumerate(source.lines, start=1):
        if _MEMORY_COLUMNS in line:
            device = 0
        elif device is not None and len(line) < 100 and (match := re.search(r"\d+ %,.*|.*\d MiB\s*$", line)):
            field = StepField(name="memory", value=match[0].strip(), is_closed=False)
            yield StepLine(line=number, name=f"device {device}", fields=(field,))
            device += 1


_ROUNDED = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _short(meaning: Meaning, how: str, per: float = 1.0) -> tuple[StepFigure, ...]:
    """Return a figure of nanotron, printed with three digits and a suffix: ``1.78K``."""
    scales = {unit: factor / per for unit, factor in _ROUNDED.items()}
    how = f"nanotron: {how}; three digits"
    return (StepFigure(meaning=meaning, convention=how, form="@(?P<unit>[KMGT]?)", scales=scales),)


_NANOTRON = StepProgram(
    step=re.compile(r"\biteration:\s*(?P<step>\d{1,18})\s*/\s*\d+\s*\|(?=\s*consumed_tokens:)"),
    fields=re.compile(r"(?P<name>[a-z]\w*):\s*(?P<value>[^|]*?)\s*(?P<end>\||$)"),
    figures={
        "lm_loss": _short(_LOSS, "mean over the data-parallel ranks"),
        "elapsed_time_per_iteration_ms": _short(_STEP_MS, "last iteration"),
        "time_per_iteration_ms": _short(_STEP_MS, "last iteration"),
        "tokens_per_sec": _short(_ALL_TOKENS, "of all devices"),
        "tokens_per_sec_per_gpu": _short(_TOKENS, "of one device"),
        "model_tflops_per_gpu": _short(_TFLOPS, "model FLOPs, without recomputation"),
        "hardware_tflops_per_gpu": _short(("hardware_tflops_per_device", "TFLOPS", "higher"), "with recomputation"),
        "cuda_max_memory_reserved": _short(_RESERVED, "peak reserved, printed in bytes", 2.0**30),
    },
    mark=re.compile(r"\btokens_per_sec_per_gpu:"),
)

_MAXTEXT = StepProgram(
    step=re.compile(r"\bcompleted step: (?P<step>\d{1,18}), (?=seconds:)"),
    fields=re.compile(r"(?P<name>[A-Za-z][\w/ ]*): (?P<value>[^:]*?)\s*(?P<end>,(?!\d)|$)"),
    figures={
        "seconds": _fixed(_STEP_MS, "maxtext: printed in s", 3, 1e3),
        **dict.fromkeys(("tflop/s/device", "tflop/s"), _fixed(_TFLOPS, "maxtext: model FLOPs of one device", 3)),
        "tokens/s/device": _fixed(_TOKENS, "maxtext: of one device", 3),
        "loss": _fixed(_LOSS, "maxtext: mean over the batch", 3),
    },
    mark=re.compile(r"\bTFLOP/s(?:/device)?: \d"),
    ignored=frozenset({"completed step"}),
)
_NANOGPT = StepProgram(
    step=re.compile(r"\biter (?P<step>\d{1,18}): (?=loss \S+, time )"),
    fields=re.compile(r"\b(?P<name>loss|time|mfu) (?P<value>(?!-100\.00%).*?)(?P<end>,(?!\d)|$)"),
    figures={
        "loss": (StepFigure(meaning=_LOSS, convention="nanogpt: of the last micro-batch of rank 0"),),
        "time": (StepFigure(meaning=_STEP_MS, convention="nanogpt: one iteration with all micro-batches", form="@ms"),),
        "mfu": (StepFigure(meaning=_MFU, convention="nanogpt: of 312 TFLOPS (A100), running mean", form="@%"),),
    },
    mark=re.compile(r"\bloss \S+, time \d"),
)
_NANOCHAT_MFU = "nanochat: of 989 TFLOPS (H100), or over the peak that it takes for the device (2026)"
_NANOCHAT = StepProgram(
    step=re.compile(r"\bstep (?P<step>\d{1,18})(?:/\d+)? \(\d+(?:\.\d+)?%\) \|(?=\s*loss:)"),
    fields=re.compile(r"(?P<name>[a-z][\w/ ]*):\s*(?P<value>[^|]*?)\s*(?P<end>\||$)"),
    figures={
        "loss": (StepFigure(meaning=_LOSS, convention="nanochat: running mean"),),
        "dt": (StepFigure(meaning=_STEP_MS, convention="nanochat: one step", form="@ms"),),
        "tok/sec": (StepFigure(meaning=_ALL_TOKENS, convention="nanochat: of all devices"),),
        "mfu": tuple(StepFigure(meaning=_MFU, convention=_NANOCHAT_MFU, form=form) for form in ("@", "@%")),
        "bf16_mfu": (StepFigure(meaning=_MFU, convention="nanochat: over the bf16 peak that it takes for the device"),),
    },
    mark=re.compile(r"\btok/sec: \d"),
)
_INTERNEVO = StepProgram(
    step=re.compile(r"\btflops=(?=[^\s,=]+[ ,]step=(?P<step>\d{1,18})[ ,])"),
    fields=re.compile(
        r"(?P<name>[a-z_]\w*(?: \(tokens/gpu/second\))?)=(?P<value>[^=]*?)(?P<end>[\s,]\s*(?=[a-z_][\w ()/]*=)|\s*$)"
    ),
    figures={
        "tflops": (StepFigure(meaning=_TFLOPS, convention="internevo: of one device, by Megatron's formula"),),
        "loss": (StepFigure(meaning=_LOSS, convention="internevo: of the step"),),
        "tgs (tokens/gpu/second)": (StepFigure(meaning=_TOKENS, convention="internevo: of one device, this step"),),
    },
    mark=re.compile(r"\btgs \(tokens/gpu/second\)="),
)

_COMPOSER_STEP = re.compile(r"^\s*\[(?:epoch=\d+(?:/\d+)?\]?\[?)?batch=(?P<step>\d{1,18})(?:/\d+)?\]:\s*$")
_COMPOSER_LINE = re.compile(r"^\s+Train (?P<name>[\w/]+): (?P<value>\S+)\s*$")
_WINDOW = "composer: mean of the last batches"
_COMPOSER: Mapping[str, Sequence[StepFigure]] = {
    **dict.fromkeys(
        ("loss/train/total", "loss/train/languagecrossentropy"), _fixed(_LOSS, "composer: mean over the batch", 4)
    ),
    "throughput/samples_per_sec": _fixed(_SAMPLES, f"{_WINDOW}, of all devices", 4),
    "throughput/tokens_per_sec": _fixed(_ALL_TOKENS, f"{_WINDOW}, of all devices", 4),
    "throughput/device/tokens_per_sec": _fixed(_TOKENS, f"{_WINDOW}, of one device", 4),
    "throughput/device/flops_per_sec": _fixed(_TFLOPS, f"{_WINDOW}, model FLOPs, printed in FLOPS", 4, 1e-12),
    "throughput/device/mfu": _fixed(_MFU, f"{_WINDOW}, printed as a fraction", 4, 100.0),
}
_TRAINER = re.compile(
    r"\b(?P<name>(?:train|effective)_\w+)['\"]?\s*[:=]\s*(?P<value>[^\s,}]+(?:,\d[^\s,}]*)*)(?P<end>[,}]?)"
)
_TRAINER_STEP = re.compile(r"['\"]loss['\"]:|Running training")
_RANKS_APART = 0.005  # Largest relative difference between the ranks of one training.
_WHOLE_RUN = "transformers: whole training, of all devices"
_OF_ONE = "transformers: whole training, of one device; padding may count"
_TRAINER_FIGURES: Mapping[str, Sequence[StepFigure]] = {
    "train_samples_per_second": (StepFigure(meaning=_SAMPLES, convention=_WHOLE_RUN, form=NO_GROUPS),),
    "train_steps_per_second": (StepFigure(meaning=_STEPS, convention=_WHOLE_RUN, form=NO_GROUPS),),
    "train_tokens_per_second": (StepFigure(meaning=_TOKENS, convention=_OF_ONE),),
    "train_loss": (StepFigure(meaning=_LOSS, convention="transformers: mean of the whole training"),),
}


def _read_lines(
    source: Source,
    lines: Callable[[Source, LogFigures], Iterator[StepLine]],
    figures: Mapping[str, Sequence[StepFigure]],
) -> Imported:
    """Return the figures of the lines, with the refusals and notes that ``lines`` adds to its second argument."""
    more = LogFigures()
    found = figures_of(source, list(lines(source, more)), figures)
    found.add(more)
    return imported(source, found)


def _blocks(source: Source, found: LogFigures) -> Iterator[StepLine]:
    """Yield the blocks of Composer's console: the line of a batch, and the figures below it."""
    begin, step, fields = 0, 0, list[StepField]()
    for number, line in enumerate([*source.lines, "end"], start=1):
        if match := _COMPOSER_LINE.match(line):
            fields.append(StepField(name=match["name"].lower(), value=match["value"], is_closed=False, line=number))
        elif line.strip() and not line[:1].isspace():
            if begin and fields:
                yield StepLine(line=begin, name=f"batch {step}", fields=tuple(fields), step=step)
            elif fields:
                why = "the line of its batch is not above: it was cut, or another line was printed below it"
                found.refuse(fields[0].line, f"{plural(len(fields), 'figure')} from here on", why)
            match = _COMPOSER_STEP.match(line)
            begin, step, fields = (number, int(match["step"]), []) if match else (0, 0, [])


def _trainings(source: Source, found: LogFigures) -> Iterator[StepLine]:
    """Yield the summaries of the Trainer; another value of a figure begins the next training.

    A figure ends in a comma or brace, or its line is as long as the next or the previous one, or the file is JSON.
    Ranks print about the same value, without a line of a step in between.
    """
    lines, steps = ["", *source.lines, ""], 0
    matches: list[tuple[int, int, re.Match[str]]] = []
    for number, line in enumerate(source.lines, start=1):
        steps += _TRAINER_STEP.search(line) is not None
        matches += [(number, steps, match) for match in _TRAINER.finditer(line)]
    names = [match["name"] for *_, match in matches]
    seen: dict[str, tuple[str, int]] = {}
    training = 1
    for (number, step, match), before, after in zip(matches, ["", *names], [*names[1:], ""], strict=False):
        name, value = match["name"], match["value"]
        earlier, earlier_step = seen.get(name, ("", 0))
        is_of_step = name == "train_tokens_per_second" and before != "train_steps_per_second"
        if is_of_step or earlier == value or (earlier_step == step and _is_near(earlier, value)):
            continue
        if earlier and name in _TRAINER_FIGURES:
            seen, training = {}, training + 1
        seen[name] = (value, step)
        if name == "train_samples_per_second" and after != "train_steps_per_second":
            why = "without train_steps_per_second it may be that figure, as transformers before 4.7 prints"
            found.refuse(number, match[0], why)
            continue
        aligned = len(lines[number]) in (len(lines[number - 1]), len(lines[number + 1]))
        field = StepField(name=name, value=value, is_closed=bool(match["end"]) or aligned or bool(source.json))
        yield StepLine(line=number, name=f"training {training}", fields=(field,))
    found.notes.append("losses and rates of single steps are not imported")


def _is_near(one: str, other: str) -> bool:
    try:
        return abs(float(one) - float(other)) <= _RANKS_APART * abs(float(other))
    except ValueError:
        return False


def _steps(name: str, about: str, program: StepProgram, *, marked: bool = False) -> Format:
    """Return the format of a program; ``marked``: its begin of a step is not rare enough to recognise it."""
    return Format(
        name=name,
        about=about,
        recognises=lambda source: program.begins(source) and (not marked or any_line(source.lines, program.mark)),
        read=lambda source: read_steps(source, program),
        options=("run",),
    )


TRAINERS = (
    _steps("torchtitan", "torchtitan's metric lines", _TITAN, marked=True),
    _steps("latte", "Latte's and DiT's lines with Train Steps/Sec", _LATTE),
    _steps("libai", "libai's iteration lines", _LIBAI),
    Format(
        name="oneflow",
        about="the log of OneFlow-Benchmark's GPT",
        recognises=lambda source: _ONEFLOW.begins(source) or any_line(source.lines, _COLUMNS),
        read=_read_oneflow,
        options=("run",),
    ),
    _steps("nanotron", "nanotron's iteration lines", _NANOTRON),
    _steps("maxtext", "MaxText's lines 'completed step'", _MAXTEXT),
    _steps("nanogpt", "nanoGPT's lines 'iter N: loss'", _NANOGPT),
    _steps("nanochat", "nanochat's lines with dt and tok/sec", _NANOCHAT),
    _steps("internevo", "InternEvo's training lines", _INTERNEVO),
    Format(
        name="composer",
        about="the console of Composer and llm-foundry",
        recognises=lambda source: any_line(source.lines, _COMPOSER_STEP) and any_line(source.lines, _COMPOSER_LINE),
        read=lambda source: _read_lines(source, _blocks, _COMPOSER),
        options=("run",),
    ),
    Format(
        name="transformers",
        about="summaries of the Trainer of Hugging Face, text or JSON",
        recognises=lambda source: "train_samples_per_second" in source.text,
        read=lambda source: _read_lines(source, _trainings, _TRAINER_FIGURES),
    ),
)
