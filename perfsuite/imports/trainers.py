"""Programs that print a line per step: torchtitan, Latte and DiT, libai, and OneFlow's GPT.

torchtitan: tps (wps until 2025) is per device; MFU uses torchtitan's peak of the device. OneFlow's GPT prints figures
as ``name=value,`` or as a table, and the memory of nvidia-smi once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from perfsuite.imports.row import Format, Imported, Meaning, Source
from perfsuite.imports.steps import (
    LogFigures,
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
    """Yield the memory of each device from nvidia-smi's table."""
    device: int | None = None
    for number, line in enumerate(source.lines, start=1):
        if _MEMORY_COLUMNS in line:
            device = 0
        elif device is not None and len(line) < 100 and (match := re.search(r"\d+ %,.*|.*\d MiB\s*$", line)):
            field = StepField(name="memory", value=match[0].strip(), is_closed=False)
            yield StepLine(line=number, name=f"device {device}", fields=(field,))
            device += 1


TORCHTITAN = Format(
    name="torchtitan",
    about="torchtitan's metric lines",
    recognises=lambda source: _TITAN.begins(source) and any_line(source.lines, _TITAN.mark),
    read=lambda source: read_steps(source, _TITAN),
    options=("run",),
)
LATTE = Format(
    name="latte",
    about="Latte's and DiT's lines with Train Steps/Sec",
    recognises=_LATTE.begins,
    read=lambda source: read_steps(source, _LATTE),
    options=("run",),
)
LIBAI = Format(
    name="libai",
    about="libai's iteration lines",
    recognises=_LIBAI.begins,
    read=lambda source: read_steps(source, _LIBAI),
    options=("run",),
)
ONEFLOW = Format(
    name="oneflow",
    about="the log of OneFlow-Benchmark's GPT",
    recognises=lambda source: _ONEFLOW.begins(source) or any_line(source.lines, _COLUMNS),
    read=_read_oneflow,
    options=("run",),
)
