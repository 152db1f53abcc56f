"""busbw over algbw of each collective as nccl-tests counts it, and what the ratio tells of a log that names none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from perfsuite.base.collectives import busbw_factor

KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "broadcast", "reduce", "sendrecv",
)  # fmt: skip
_WHOLE = frozenset({"broadcast", "reduce", "sendrecv"})
"""Their factor is 1, of a single rank as well.  Source: nccl-tests, doc/PERFORMANCE.md."""
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
"""Collectives that a log prints an operation for."""
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "reducescatter": "reduce_scatter",
        "alltoall": "all_to_all",
        "alltoallsingle": "all_to_all",
    }
)


def collective_named(text: str) -> str:
    """perfsuite's name of a collective in any tool's spelling; empty for none.

    >>> collective_named("AllReduce"), collective_named("reduce_scatter_tensor"), collective_named("memcpy")
    ('all_reduce', 'reduce_scatter', '')
    """
    flat = "".join(letter for letter in text.lower() if letter.isalpha())
    for ending in ("perf", "intotensor", "tensor", "base"):
        flat = flat.removesuffix(ending)
    name = _SPELLINGS.get(flat, flat)
    return name if name in KINDS else ""


def factor(collective: str, ranks: int) -> float:
    """busbw / algbw.

    >>> factor("all_reduce", 8), factor("broadcast", 8)
    (1.75, 1.0)
    """
    return 1.0 if collective in _WHOLE else busbw_factor(collective, ranks)


def fitting(ratio: float, ranks: int, *, reduces: bool, root: int | None) -> tuple[str, ...]:
    """The collectives whose factor is ``ratio``, by whether an operation is printed and which root (None: no column).

    >>> fitting(1.75, 8, reduces=True, root=-1), fitting(0.875, 8, reduces=False, root=None)
    (('all_reduce',), ('all_gather', 'all_to_all', 'gather', 'scatter'))
    """
    names = (name for name in KINDS if abs(factor(name, ranks) - ratio) < 0.01)
    return tuple(
        name for name in names if (name in _REDUCING) == reduces and (root is None or (root >= 0) == (name in _ROOTED))
    )
