"""Iteration lines of Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, NeMo and AMD's Primus.

Lines of DeepSpeed among them are read too.  Fields end with ``|``.  FLOPs are counted differently.  Megatron-LM counts
the model (3 x forward).  Megatron-DeepSpeed and GPT-NeoX add the recomputed forward pass.  Primus prints last and mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from perfsuite.base.units import plural
from perfsuite.imports import deepspeed
from perfsuite.imports.row import Format, Imported, Meaning, Source
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
)

_STEP_MS: Meaning = ("step_time_ms", "ms", "lower")
_TOKENS: Meaning = ("tokens_per_s_per_device", "tokens/s", "higher")
_TFLOPS: Meaning = ("tflops_per_device", "TFLOPS", "higher")
_SAMPLES: Meaning = ("samples_per_s", "samples/s", "higher")
_LOSS = (StepFigure(meaning=("loss", "", "lower"), convention="mean since the last report"),)
_LAST, _MEAN = "primus: last iteration", "primus: mean of recent iterations"
_SINCE = "mean since the last report"
_MODEL = "model FLOPs: 3 x forward, without recomputation"
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
    "throughput per gpu (tflop/s/gpu)": _alone_or_last(_TFLOPS, f"megatron-lm: {_MODEL}"),
    "compute per gpu (tflop/s/gpu)": _alone_or_last(_TFLOPS, f"primus: {_MODEL}"),
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
    "samples per second": (StepFigure(meaning=_SAMPLES, convention=f"of all devices; {_SINCE}", form=NO_GROUPS),),
    "samples/sec": (StepFigure(meaning=_SAMPLES, convention=f"gpt-neox: of all devices; {_SINCE}", form=NO_GROUPS),),
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
    **dict.fromkeys(("lm loss", "lm_loss", "lm-loss"), _LOSS),
}
PROGRAM = StepProgram(
    step=re.compile(
        r"(?:\b[A-Za-z/]{1,20}:\s*[^\s|]{1,30}\s*\|\s*|\bepoch (?P<epoch>\d{1,9}), )?"
        r"\biteration\s+(?P<step>\d{1,18})/\s*\d+\s*\|"
        r"(?=(?:(?!\biteration\b).)*?\bglobal_step:\s*(?P<whole>\d{1,18})\s*\||)"  # NeMo's iteration is of an epoch
    ),
    fields=re.compile(r"(?P<name>[A-Za-z][^|:]*):\s*(?P<value>[^|]*?)\s*(?P<end>\||$)"),
    figures=_FIGURES,
    mark=re.compile(r"elapsed time per iteration \(m?s\):|\btrain_step_timing in s:|\blm[ _]loss: +\d"),
    settings={
        "global batch size": "global_batch_size",
        "global_batch_size": "global_batch_size",
        "actual seqlen": "sequence_length",
        "actual seq length": "sequence_length",
    },
)
_BAR = StepProgram(
    step=re.compile(
        r"(?:\b|\^M)Epoch (?P<epoch>\d{1,9}):[^\[]*?\s(?P<step>\d{1,18})(?:/\d+|it) \[(?=[^\]]*\breduced_train_loss=)"
    ),
    fields=re.compile(
        r"(?P<name>[A-Za-z_][\w ]*)=(?P<value>nan(?=\.0)|[^,\]]*(?:,\d[^,\]]*)*)(?:\.0(?=,))?(?P<end>[,\]]|$)"
    ),
    figures=_FIGURES,
    mark=re.compile(r"\btrain_step_timing in s="),
    ignored=frozenset({"global_step", "v_num"}),
)
"""NeMo's progress bar; the bar counts the steps of an epoch exactly, while its global_step has three digits."""
_BRIDGE = re.compile(r"\bStep Time : (?P<time>[\d.]+s) GPU utilization: (?P<rate>[\d.]+ ?(?:MODEL_)?TFLOP/s/GPU)\s*$")
_BRIDGE_FIGURES: Mapping[str, Sequence[StepFigure]] = {
    "time": (StepFigure(meaning=_STEP_MS, convention="megatron-bridge: printed in s", form="@s", scales={"": 1e3}),),
    "rate": (StepFigure(meaning=_TFLOPS, convention=f"megatron-bridge: {_MODEL}", form="@ ?(?:MODEL_)?TFLOP/s/GPU"),),
}
_SKIPPED = re.compile(r"\biteration\s+(\d{1,18})/[^|]*\|.{0,2000}?\bnumber of skipped iterations:\s+(?!0\s*\|)\d+\s*\|")
"""A line whose time has iterations that ended before the optimizer, because a gradient overflowed."""
_NEOX = re.compile(r"\bsamples/sec:.*\biteration\s+\d+/|\biteration\s+\d+/.*\bapprox flops per GPU:")
_PRIMUS = re.compile(r"\biteration\s+\d+/.*(?:tokens/s/GPU|hip mem usage|per iteration \(ms\):\s*[\d.]+/[\d.]+)")


def family(source: Source) -> str:
    """Return the format of the iteration lines of a file; empty without iteration lines.

    >>> from pathlib import Path
    >>> family(Source(path=Path(), text="samples/sec: 51.2 | iteration 10/ 50 | elapsed"))
    'gpt-neox'
    """
    if not PROGRAM.begins(source):
        return "megatron" if _BAR.begins(source) or any_line(source.lines, _BRIDGE) else ""
    if any_line(source.lines, _NEOX):
        return "gpt-neox"
    return "primus" if any_line(source.lines, _PRIMUS) else "megatron"


def _read(source: Source) -> Imported:
    found = found_in(source, PROGRAM)
    found.add(found_in(source, _BAR))
    found.add(figures_of(source, list(_bridge(source)), _BRIDGE_FIGURES))
    found.add(deepspeed.all_figures(source))
    if skipped := [match for line in source.lines for match in _SKIPPED.finditer(line)]:
        found.notes.append(
            f"{plural(len(skipped), 'line')} with skipped iterations, whose times have no optimizer: the first at "
            f"iteration {skipped[0][1]}"
        )
    return imported(source, found)


def _bridge(source: Source) -> Iterator[StepLine]:
    """Yield the lines of Megatron-Bridge without an iteration."""
    reports = ((number, match) for number, line in enumerate(source.lines, start=1) if (match := _BRIDGE.search(line)))
    for report, (number, match) in enumerate(reports, start=1):
        fields = tuple(StepField(name=name, value=match[name], is_closed=True) for name in _BRIDGE_FIGURES)
        yield StepLine(line=number, name=f"report {report}", fields=fields)


MEGATRON, GPT_NEOX, PRIMUS = (
    Format(
        name=name,
        about=about,
        recognises=lambda source, name=name: family(source) == name,  # type: ignore[misc]
        read=_read,
        options=("run",),
    )
    for name, about in (
        ("megatron", "iteration lines of Megatron-LM, Megatron-DeepSpeed and NeMo"),
        ("gpt-neox", "GPT-NeoX iteration lines"),
        ("primus", "iteration lines of AMD's Primus"),
    )
)
