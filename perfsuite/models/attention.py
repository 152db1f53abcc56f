"""Which kernel computes attention: a setting of every model, named without torch."""

from __future__ import annotations

from typing import Literal, get_args

from perfsuite.base.errors import InvalidParameter

AttentionMethod = Literal["auto", "math", "flash"]
"""auto: what torch chooses on the device; math: plain products, the scores of all pairs in memory; flash: the kernel
that keeps no scores."""


def require_attention(attention: str) -> None:
    """Raise InvalidParameter unless ``attention`` is one of the three methods."""
    methods = get_args(AttentionMethod)
    if attention not in methods:
        raise InvalidParameter(f"attention={attention!r} is unknown; choose {', '.join(methods)}")
