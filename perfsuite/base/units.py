"""The only place where numbers, bytes, seconds and floating-point operations are converted, parsed and printed.

Memory and message sizes are powers of two (``64MiB`` is 64 * 2**20 bytes). Rates are powers of ten (1 GB/s is 1e9 bytes
per second, 1 TFLOPS is 1e12 operations per second), as in nccl-tests and the vendors' data sheets.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from decimal import Decimal

from perfsuite.base.errors import ConfigurationError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_BYTE_UNITS = {"B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``"64MiB"``, ``"1 KiB"``, ``"0.5GiB"`` or ``"512B"``.

    >>> parse_bytes("64MiB")
    67108864

    Raises ConfigurationError for other text, also for decimal units (``MB``), which are ambiguous in this field.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = match and _BYTE_UNITS.get(match[2].upper())
    if not match or not unit:
        raise ConfigurationError(
            f"size {text!r} is not a number followed by B, KiB, MiB, GiB or TiB; write for example '64MiB'"
        )
    value = Decimal(match[1]) * unit  # exact: a float has 53 bits
    if value != int(value):
        raise ConfigurationError(f"size {text!r} is {value} bytes, not a whole number; use a smaller unit")
    return int(value)


def format_bytes(count: int) -> str:
    """Return the shortest exact size that :func:`parse_bytes` can read: ``67108864`` is ``"64MiB"``.

    >>> format_bytes(67108864), format_bytes(1536)
    ('64MiB', '1536B')
    """
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count}B"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``"90"``, ``"90s"``, ``"1.5min"``, ``"2h"`` or ``"250ms"``.

    >>> parse_duration("1.5min")
    90.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and _TIME_UNITS.get(match[2] or "s")
    if not match or not unit:
        raise ConfigurationError(
            f"duration {text!r} is not a number followed by us, ms, s, min or h; write for example '90s'"
        )
    return float(match[1]) * unit


def format_seconds(seconds: float, digits: int = 4) -> str:
    """Return a duration with ``digits`` significant digits and a fitting unit.

    >>> format_seconds(0.0015), format_seconds(12.3456), format_seconds(4e-7)
    ('1.5 ms', '12.35 s', '0.4 us')
    """
    if abs(seconds) >= 1:
        return f"{seconds:.{digits}g} s"
    if abs(seconds) >= 1e-3:
        return f"{_plainly(seconds * 1e3, digits)} ms"
    return f"{_plainly(seconds * 1e6, digits)} us"


def _plainly(value: float, digits: int) -> str:
    """Return a number below 1000 without an exponent: two digits of 120 are 120."""
    return f"{float(f'{value:.{digits}g}'):.4g}"


def clock_time(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours.

    >>> clock_time(42.4), clock_time(200), clock_time(7260)
    ('42 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


_RATES = {"TFLOPS": ("TFLOPS", "GFLOPS", "MFLOPS"), "TOPS": ("TOPS", "GOPS", "MOPS"), "GB/s": ("GB/s", "MB/s", "kB/s")}


def readable_rate(values: Sequence[float], unit: str) -> tuple[str, float]:
    """Return the unit that suits a column of rates, and how many of it make one ``unit``.

    The median is at least 1 of the unit. Sizes in GiB change likewise, by powers of two; other units stay.

    >>> readable_rate([0.694, 0.174], "TFLOPS"), readable_rate([8.475e-05], "GB/s"), readable_rate([3.0], "us")
    (('GFLOPS', 1000.0), ('kB/s', 1000000.0), ('us', 1.0))
    """
    if unit == "GiB":
        name, size = readable_unit([value * GIB for value in values])
        return name, GIB / size
    there = [abs(value) for value in values if value]
    names = _RATES.get(unit, (unit,))
    middle = statistics.median_low(there) if there else 1.0
    step = next((step for step in range(len(names)) if middle * 1e3**step >= 1), len(names) - 1)
    return names[step], 1e3**step


def readable_unit(sizes_bytes: Sequence[float]) -> tuple[str, int]:
    """Return name and bytes of the unit that suits a column of sizes: their median is at least 0.1 of it.

    >>> readable_unit([0.0109 * GIB]), readable_unit([2.0 * KIB, 20.0 * KIB, 44.0 * GIB]), readable_unit([])
    (('MiB', 1048576), ('KiB', 1024), ('GiB', 1073741824))
    """
    there = [size for size in sizes_bytes if size]
    middle = statistics.median_low(there) if there else GIB
    return next((unit for unit in (("GiB", GIB), ("MiB", MIB)) if middle >= 0.1 * unit[1]), ("KiB", KIB))


def seconds_to_us(seconds: float) -> float:
    """Return microseconds."""
    return seconds * 1e6


def gb_per_s(bytes_moved: float, seconds: float) -> float:
    """Return the rate in GB/s (1e9 bytes per second)."""
    return bytes_moved / seconds / 1e9


def tflops(operations: float, seconds: float) -> float:
    """Return floating-point or integer operations per second, in units of 1e12."""
    return operations / seconds / 1e12


def gib(count: float) -> float:
    """Return bytes in GiB."""
    return count / GIB


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "run"), plural(2, "run")
    ('1 run', '2 runs')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def significant(value: float, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits, all whole digits, and an exponent only below 1e-4.

    >>> significant(0.0123456), significant(251.54), significant(1328412.0), significant(2.50), significant(0.0)
    ('0.01235', '251.5', '1328412', '2.5', '0')
    """
    if value == 0 or not math.isfinite(value) or abs(value) < 1e-4:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float, *, signed: bool = False) -> str:
    """Return a share in per cent with three significant digits and at most two decimals.

    >>> percent(0.0312), percent(-0.2, signed=True), percent(0.05, signed=True), percent(0.00012, signed=True)
    ('3.12 %', '-20 %', '+5 %', '+0.01 %')
    """
    return f"{round(100 * share, 2):{'+' if signed else ''}.3g} %"


_POWERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def scaled(value: float, unit: str) -> str:
    """Return a value with three digits and a metric prefix of the unit.

    >>> scaled(8.475e4, "B/s"), scaled(1.741e11, "FLOPS"), scaled(0, "B/s")
    ('84.8 kB/s', '174 GFLOPS', '0 B/s')
    """
    size = abs(value)
    power, letter = next(((power, letter) for power, letter in _POWERS if size >= power * 0.9995), (1.0, ""))
    return f"{significant(value / power, 3)} {letter}{unit}"


def count(value: float) -> str:
    """Return a number with three digits and k, M, ... for powers of ten.

    >>> count(2083.1), count(0.911), count(1.5e6)
    ('2.08k', '0.911', '1.5M')
    """
    return significant(value, 3) if abs(value) < 999.5 else scaled(value, "").replace(" ", "")


def size(count: float) -> str:
    """Return bytes with three digits, in powers of two.

    >>> size(477503), size(1 << 20), size(0)
    ('466 KiB', '1 MiB', '0 B')
    """
    unit = TIB
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= unit * 0.9995:
            return f"{significant(count / unit, 3)} {name}"
        unit //= KIB
    return f"{significant(count, 3)} B"


def change(share: float) -> str:
    """Return a relative change with its sign, or as a factor if it is tenfold or more.

    >>> change(0.0812), change(-0.02), change(29.0)
    ('+8.1 %', '-2.0 %', 'x 30')
    """
    return f"{100 * share:+.1f} %" if share < 9 else f"x {significant(1 + share, 3)}"


def interval(low: float, high: float) -> str:
    """Return the ends of an interval of a relative change in per cent.

    >>> interval(0.062, 0.1)
    '[+6.2, +10.0]'
    """
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]"
