"""Check the options of ``perfsuite project`` and ``advise`` before anything is computed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.projection.scaling import LLAMA3_MTBF_DEVICE_H, worlds_between

MOST_DEVICES = 1_000_000
LEAST, MOST = 0.001, 1_000_000.0
"""Range of the GB/s of a network and of the seconds of a checkpoint; products of larger numbers would overflow."""
MOST_HOURS = 1e9
_COUNTS: Mapping[str, int] = MappingProxyType(
    {
        "world": MOST_DEVICES,
        "global_batch": 1_000_000_000,
        "micro_batch": 1_000_000,
        "stages_per_rank": 1_000,
        "sequence_length": 100_000_000,
        "top": 1_000_000,
    }
)
"""Options that are counts, with their largest values."""
_OF_CURVE = ("weak", "strong", "mtbf")


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for a count, rate or time out of range, or an option without the one that it needs."""
    values = vars(options)
    for name, most in _COUNTS.items():
        value = values.get(name)
        if value is not None and not 1 <= value <= most:
            raise ConfigurationError(
                f"{_spelled(name)}={value} is not a valid count; give a whole number from 1 to {most:,}"
            )
    for name, unit in (("network", "GB/s"), ("checkpoint_s", "seconds")):
        value = values.get(name)
        if value is not None and not LEAST <= value <= MOST:
            raise ConfigurationError(
                f"{_spelled(name)}={value:g} is not valid; give {unit} from {LEAST:g} to {MOST:,.0f}"
            )
    for name in _OF_CURVE:
        if values.get(name) and not values["curve"]:
            raise ConfigurationError(f"{_spelled(name)} needs a curve; add --curve, for example --curve 8..1024")
    if values.get("checkpoint_s") is not None and not values["mtbf"]:
        raise ConfigurationError("--checkpoint-s needs a goodput; add --mtbf, for example --mtbf llama3")


def read_curve(text: str) -> list[int]:
    """Return the numbers of devices of the range ``A..B``.  Raises ConfigurationError if it is not a range."""
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or len(last) > len(str(MOST_DEVICES)):
        raise ConfigurationError(
            f"--curve={text} is not a range of devices; give two numbers from 1 to {MOST_DEVICES:,}, such as 8..1024"
        )
    return worlds_between(int(first), int(last))


def read_mtbf(text: str | None) -> float | None:
    """Return the device-hours between failures; None without --mtbf.  Raises ConfigurationError if out of range."""
    if text is None:
        return None
    if text == "llama3":
        return LLAMA3_MTBF_DEVICE_H
    try:
        hours = float(text)
    except ValueError:
        raise ConfigurationError(f"--mtbf={text} is not a number of hours; {did_you_mean(text, ['llama3'])}") from None
    if not 1 <= hours <= MOST_HOURS:
        raise ConfigurationError(
            f"--mtbf={text} is not a time between failures; give device-hours from 1 to {MOST_HOURS:,.0f}, or llama3"
        )
    return hours


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
