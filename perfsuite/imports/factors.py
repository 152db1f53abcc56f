"""Factors busbw / algbw of each collective as in nccl-tests, and the collectives that print given columns."""

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
"""Collectives with a printed operation."""
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
    """Return perfsuite's name of a collective from any tool's spelling; empty if it is unknown.

    >>> collective_named("AllReduce"), collective_named("reduce_scatter_tensor"), collective_named("memcpy")
    ('all_reduce', 'reduce_scatter', '')
    """
    flat = "".join(letter for letter in text.lower() if letter.isalpha())
    for ending in ("perfmpi", "perf", "intotensor", "tensor", "base"):
        flat = flat.removesuffix(ending)
    name = _SPELLINGS.get(flat, flat)
    return name if name in KINDS else ""


def factor(collective: str, ranks: int) -> float:
    """busbw / algbw.

    >>> factor("all_reduce", 8), factor("broadcast", 8)
    (1.75, 1.0)
    """
    return 1.0 if collective in _WHOLE else busbw_factor(collective, 2) * 2 * (ranks - 1) / ranks


def possible(*, operation: bool, root: int | None, columns: frozenset[str] | None, unchecked: bool) -> tuple[str, ...]:
    """Return the collectives that print rows such as these.

    ``operation``: one is printed; ``root``: None without a column; ``columns``: those of redop and root in the table,
    None where unknown; ``unchecked``: out of place was checked, in place was not, as only all_to_all and sendrecv do.
    sendrecv loops over operations as if it reduced, and had neither column before both were in every table.

    >>> possible(operation=True, root=-1, columns=frozenset({"redop", "root"}), unchecked=False)
    ('all_reduce', 'reduce_scatter', 'sendrecv')
    >>> possible(operation=True, root=None, columns=frozenset({"redop"}), unchecked=False)
    ('all_reduce', 'reduce_scatter')
    """
    names = [
        name
        for name in KINDS
        if ((name in _REDUCING) == operation or name == "sendrecv")
        and (root is None or (root >= 0) == (name in _ROOTED))
        and not (unchecked and name not in ("all_to_all", "sendrecv"))
        and not (name == "sendrecv" and columns is not None and len(columns) == 1)
        and not (name in _ROOTED and columns is not None and "root" not in columns)
    ]
    return tuple(names)
