"""Numbers as people read them: three digits, the unit that fits."""

from __future__ import annotations

from perfsuite.base.units import KIB, TIB
from perfsuite.metrics.spec import significant

_POWERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def scaled(value: float, unit: str) -> str:
    """Three digits with the power of ten in front of the unit.

    >>> scaled(8.475e4, "B/s"), scaled(1.741e11, "FLOPS"), scaled(0, "B/s")
    ('84.8 kB/s', '174 GFLOPS', '0 B/s')
    """
    size = abs(value)
    power, letter = next(((power, letter) for power, letter in _POWERS if size >= power * 0.9995), (1.0, ""))
    return f"{significant(value / power, 3)} {letter}{unit}"


def count(value: float) -> str:
    """A number of things to three digits, thousands as k.

    >>> count(2083.1), count(0.911), count(1.5e6)
    ('2.08k', '0.911', '1.5M')
    """
    return significant(value, 3) if abs(value) < 999.5 else scaled(value, "").replace(" ", "")


def duration(seconds: float) -> str:
    """Three digits of a time.

    >>> duration(0.0242), duration(3.2e-6), duration(75.0)
    ('24.2 ms', '3.2 us', '75 s')
    """
    return scaled(seconds, "s")


def size(count: float) -> str:
    """Bytes to three digits in powers of two.

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
    """A relative change with its sign; beyond a doubling in times.

    >>> change(0.0812), change(-0.02), change(29.0)
    ('+8.1 %', '-2.0 %', 'x 30')
    """
    return f"{100 * share:+.1f} %" if share < 9 else f"x {significant(1 + share, 3)}"


def interval(low: float, high: float) -> str:
    """The ends of an interval of a relative change.

    >>> interval(0.062, 0.1)
    '[+6.2, +10.0]'
    """
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]"
