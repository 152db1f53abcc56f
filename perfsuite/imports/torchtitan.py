"""torchtitan: its metric lines.  tps is of one device; MFU counts by torchtitan's own convention."""

from __future__ import annotations

import re

from perfsuite.imports.row import Format, Imported, Source, Told
from perfsuite.imports.steps import Figure, read_steps

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")
_NUMBER = r"([-+\d.,eE]+|nan|inf)"
_FIGURES = (
    Figure(pattern=re.compile(rf"loss:\s*{_NUMBER}"), metric="loss", unit="", better="lower", convention="torchtitan"),
    Figure(
        pattern=re.compile(rf"memory:\s*{_NUMBER}GiB"),
        metric="reserved_memory_gib",
        unit="GiB",
        better="lower",
        convention="torchtitan: peak reserved since the last report",
    ),
    Figure(
        pattern=re.compile(rf"tps:\s*{_NUMBER}"),
        metric="tokens_per_s_per_device",
        unit="tokens/s",
        better="higher",
        convention="torchtitan: of one device",
    ),
    Figure(
        pattern=re.compile(rf"tflops:\s*{_NUMBER}"),
        metric="tflops_per_device",
        unit="TFLOPS",
        better="higher",
        convention="torchtitan: 6 (N - embedding) + 12 L h s a token",
    ),
    Figure(
        pattern=re.compile(rf"mfu:\s*{_NUMBER}%"),
        metric="mfu_percent",
        unit="percent",
        better="higher",
        convention="torchtitan: its tflops over the peak that it takes for the device",
    ),
)


def _read(source: Source, told: Told) -> Imported:
    bare = Source(path=source.path, text=_COLOURS.sub("", source.text))
    return read_steps(bare, told, tool="torchtitan", step=_STEP, figures=_FIGURES, needed="tps:")


FORMAT = Format(
    name="torchtitan",
    about="torchtitan's metric lines",
    recognises=lambda source: bool(_STEP.search(_COLOURS.sub("", source.text))) and "tps:" in source.text,
    read=_read,
)
