"""Scaling: how much more is done per second on more ranks.  Formulas over two results, so no metric of one case.

The base is the smallest number of ranks that was measured, and every figure names it: a speed-up over 8 ranks is not
one over 1.  Source: Amdahl 1967 (strong scaling: the same work on more ranks), Gustafson 1988 (weak scaling: work that
grows with the ranks).
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["weak", "strong", "mixed"]

SUPERLINEAR_SLACK = 0.05
"""A speed-up this far above linear is let pass: parts of a split problem fit into caches that the whole does not."""
_SAME = 1e-9


def speed_up(work: float, time_s: float, base_work: float, base_time_s: float) -> float:
    """Throughput over the base's throughput; work in samples or tokens per step, the same for both.

    With equal work it is T_base / T, with work that grows by n it is n x T_base / T.

    >>> round(speed_up(8, 1 / 1.52, 1, 1 / 3.05), 2)
    3.99
    """
    return (work / time_s) / (base_work / base_time_s)


def efficiency(speed_up: float, ranks: int, base_ranks: int) -> float:
    """Speed-up over the factor of ranks; 1 is linear.

    >>> round(efficiency(1.84, 16, 8), 3)
    0.92
    """
    return speed_up / (ranks / base_ranks)


def kind_of(work: float, ranks: int, base_work: float, base_ranks: int) -> Kind:
    """Whether the work stayed the same (strong), grew with the ranks (weak), or neither (mixed).

    >>> kind_of(64, 2, 32, 1), kind_of(32, 2, 32, 1), kind_of(48, 2, 32, 1)
    ('weak', 'strong', 'mixed')
    """
    if abs(work - base_work) <= _SAME * base_work:
        return "strong"
    grown = base_work * ranks / base_ranks
    return "weak" if abs(work - grown) <= _SAME * grown else "mixed"
