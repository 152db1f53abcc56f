"""The tokens of each rank of a sequence, and the lengths and heads that can be spread.

zigzag, torch: two of 2 cp equal chunks, r and 2 cp - 1 - r, so that the queries of all ranks see the same number of
keys (Zhu 2024, ring-flash-attention; torch's context_parallel calls it head-tail).  Others: the r-th of cp chunks.
"""

from __future__ import annotations

from typing import Literal, get_args

from perfsuite.base.errors import InvalidParameter, nearest_multiples

ContextMethod = Literal["zigzag", "ring", "ulysses", "torch", "deepspeed"]
"""zigzag, ring: keys are sent around the ranks; ulysses: ranks share heads instead of tokens during attention; torch:
torch's own experimental ring; deepspeed: DeepSpeed's Ulysses."""

SPREADS_HEADS = ("ulysses", "deepspeed")  # Methods whose ranks share heads during attention

_HALVED = ("zigzag", "torch")  # Methods that give a rank one chunk from the beginning and one from the end


def places(method: ContextMethod, length: int, ranks: int, rank: int) -> tuple[range, ...]:
    """Return the tokens of ``rank`` among ``ranks`` of a sequence of ``length``, in the rank's order.

    >>> places("zigzag", 16, 2, 0), places("ring", 16, 2, 1)
    ((range(0, 4), range(12, 16)), (range(8, 16),))
    """
    chunks = _chunks(method, ranks)
    if length % chunks:
        near = nearest_multiples(length, chunks)
        raise InvalidParameter(
            f"{length} tokens do not divide into {chunks} chunks of context={method!r}; choose {near}"
        )
    size = length // chunks
    held = (rank, chunks - 1 - rank) if method in _HALVED else (rank,)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in held)


def _chunks(method: str, ranks: int) -> int:
    return 2 * ranks if method in _HALVED else ranks


def require_context(method: str, *, length: int, heads: int, key_heads: int, cp: int, tp: int = 1) -> None:
    """Raise InvalidParameter unless sequences and heads of these sizes can be spread over cp; lists the legal choices.
    ``heads`` and ``key_heads`` count the whole model; a tp rank has one in ``tp`` of them.
    """
    if method not in get_args(ContextMethod):
        choices = ", ".join(map(repr, get_args(ContextMethod)))
        raise InvalidParameter(f"context={method!r} is unknown; choose {choices}")
    chunks = _chunks(method, cp)
    if length % chunks:
        part = "two chunks" if method in _HALVED else "one chunk"
        raise InvalidParameter(
            f"sequence_length={length} is not a multiple of {chunks}: context={method!r} gives each of cp={cp} ranks "
            f"{part} of equal size; choose {nearest_multiples(length, chunks)}"
        )
    for name, number in (("heads", heads), ("key heads", key_heads)):
        if method in SPREADS_HEADS and number // tp % cp:
            legal = [size for size in range(1, cp) if heads // tp % size == key_heads // tp % size == 0]
            of_rank = f"{number // tp} {name} of a tp rank ({number} over tp={tp})" if tp > 1 else f"{number} {name}"
            raise InvalidParameter(
                f"cp={cp} does not divide the {of_rank}, which context={method!r} spreads; choose cp "
                f"{', '.join(map(str, legal))}, or context='zigzag' or 'ring'"
            )
