"""Bytes that blocks of perfsuite's own models move and keep, and their kernels, from ``tools/count_blocks.py``.

A test compares every row with a count of the model that it names. fp32 has ``plain``. bf16 and fp16 have ``autocast``
(wide parameters, narrow products) and ``narrow`` (all narrow).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from perfsuite.models import Model
from perfsuite.models.decoder import Decoder
from perfsuite.models.dit import Latte, Stdit
from perfsuite.models.language import Gpt, Llama
from perfsuite.record.step import Training

Way = Literal["plain", "autocast", "narrow"]


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """Counts of one block.

    Units: bytes per token and width, per token and hidden feature, per parameter of the block. A row is a token that is
    sent to one of its experts: bytes per width; hidden features count all its experts.
    """

    forward_width_bytes: float
    forward_hidden_bytes: float
    forward_weight_bytes: float
    """Casts of parameters, once per micro-batch."""
    backward_width_bytes: float
    backward_hidden_bytes: float
    backward_weight_bytes: float
    forward_kernels: float
    """Kernels other than matrix products and attention."""
    backward_kernels: float
    kept_whole_bytes: float
    """Bytes kept for the backward pass that tensor parallelism does not split."""
    kept_hidden_bytes: float
    forward_row_bytes: float = 0.0
    backward_row_bytes: float = 0.0
    kept_row_bytes: float = 0.0


_ROWS: tuple[tuple[str, Way, tuple[float, ...]], ...] = (
    # Forward width, hidden, weights; backward width, hidden, weights; kernels of both; kept whole, hidden.
    ("gpt", "plain", (40, 8, 0, 92, 16, 0, 5, 10, 16, 8)),
    ("gpt", "autocast", (48, 4, 6, 94, 8, 6, 15, 22, 12, 4)),
    ("gpt", "narrow", (20, 4, 0, 46, 8, 0, 5, 10, 8, 4)),
    ("llama", "plain", (152.5, 20, 0, 332.5, 36, 0, 30, 52, 24, 16)),
    ("llama", "autocast", (202.5, 10, 6, 398.5, 18, 6, 46, 70, 26, 8)),
    ("llama", "narrow", (188.5, 10, 0, 350.5, 18, 0, 38, 62, 20, 8)),
    ("llama-grouped", "plain", (137, 20, 0, 307.5, 36, 0, 32, 55, 24, 16)),
    ("llama-grouped", "autocast", (168.5, 10, 6, 358, 18, 6, 48, 73, 26, 8)),
    ("llama-grouped", "narrow", (154.5, 10, 0, 310, 18, 0, 40, 65, 20, 8)),
    ("latte", "plain", (96, 8, 0, 204, 16, 0, 15, 29, 48, 8)),
    ("latte", "autocast", (94, 4, 6, 180, 8, 6, 27, 47, 32, 4)),
    ("latte", "narrow", (48, 4, 0, 102, 8, 0, 15, 29, 24, 4)),
    ("stdit", "plain", (136, 8, 0, 308, 16, 0, 19, 43, 84, 8)),
    ("stdit", "autocast", (148, 4, 6, 300, 8, 6, 41, 70, 50, 4)),
    ("stdit", "narrow", (68, 4, 0, 154, 8, 0, 19, 43, 42, 4)),
    # The same, and of a row: forward, backward, kept.
    ("moe", "plain", (161.5, 20, 0, 326.5, 36, 0, 71, 81, 24, 16, 36, 64, 8)),
    ("moe", "autocast", (190.5, 10, 6, 365.5, 18, 6, 89, 101, 24, 8, 30, 58, 4)),
    ("moe", "narrow", (170.5, 10, 0, 323.5, 18, 0, 81, 93, 20, 8, 18, 32, 4)),
    ("moe-each", "plain", (161.5, 36, 0, 326.5, 44, 7.8, 72, 87, 24, 16, 44, 80, 8)),
    ("moe-each", "autocast", (190.5, 18, 6, 365.5, 22, 9.9, 90, 107, 24, 8, 34, 66, 4)),
    ("moe-each", "narrow", (170.5, 18, 0, 323.5, 22, 3.9, 82, 99, 20, 8, 22, 40, 4)),
)
_COMPILED_ROWS: tuple[tuple[str, Way, tuple[float, ...]], ...] = (
    # As above, by the schedule of torch's compiler, which makes one kernel of many operations, at a width of 768.
    # The statistics of a norm give the decimals.
    ("gpt", "plain", (36, 8, 0, 96.2, 16, 0, 4, 12, 16, 8)),
    ("gpt", "autocast", (26, 4, 6, 74.2, 8, 6, 12, 18, 10, 4)),
    ("gpt", "narrow", (18, 4, 0, 48.2, 8, 0, 4, 12, 8, 4)),
    ("llama", "plain", (52.1, 12, 0, 92.3, 20, 0, 5, 6, 16, 12)),
    ("llama", "autocast", (50.1, 6, 6, 88.3, 10, 6, 14, 17, 10, 6)),
    ("llama", "narrow", (42.1, 6, 0, 62.3, 10, 0, 7, 8, 8, 6)),
    ("llama-grouped", "plain", (54.3, 12, 0, 95.4, 20, 0, 8, 10, 16, 12)),
    ("llama-grouped", "autocast", (43.8, 6, 6, 82.9, 10, 6, 16, 21, 10, 6)),
    ("llama-grouped", "narrow", (35.8, 6, 0, 56.9, 10, 0, 9, 12, 8, 6)),
    ("latte", "plain", (56.1, 8, 0, 130.1, 16, 0, 10, 18, 36.1, 8)),
    ("latte", "autocast", (42.1, 4, 6, 90.1, 8, 6, 20, 23, 20.1, 4)),
    ("latte", "narrow", (28.1, 4, 0, 61.1, 8, 0, 10, 16, 18.1, 4)),
    ("stdit", "plain", (76, 8, 0, 212.2, 16, 0.4, 8, 31, 76.1, 8)),
    ("stdit", "autocast", (60, 4, 6, 138.2, 8, 6.2, 26, 42, 42.1, 4)),
    ("stdit", "narrow", (38, 4, 0, 106.2, 8, 0.2, 9, 31, 38.1, 4)),
)


def _by_kind(rows: tuple[tuple[str, Way, tuple[float, ...]], ...]) -> Mapping[tuple[str, Way], BlockCounts]:
    names = [field.name for field in fields(BlockCounts)]
    return MappingProxyType(
        {(kind, way): BlockCounts(**dict(zip(names, counts, strict=False))) for kind, way, counts in rows}
    )


COUNTED = _by_kind(_ROWS)
"""Counts by kind of block and by way of computing."""
COMPILED = _by_kind(_COMPILED_ROWS)
"""Counts of compiled blocks; blocks with experts are not compiled."""
COUNTED_OF: Mapping[str, str] = MappingProxyType(
    {
        "gpt": "gpt2",
        "llama": "llama2-7b",
        "llama-grouped": "llama2-70b",
        "latte": "latte-l",
        "stdit": "opensora",
        "moe": "mixtral-8x7b",
        "moe-each": "mixtral-8x7b",
    }
)
"""The model whose block was counted. Only its number of query heads per key head and its two experts per token matter.
``moe-each`` starts the products of its experts one by one."""
KEPT_END_BYTES: Mapping[tuple[str, Way], float] = MappingProxyType(
    {
        ("gpt", "plain"): 8.0,
        ("gpt", "autocast"): 6.0,
        ("gpt", "narrow"): 4.0,
        ("llama", "plain"): 12.0,
        ("llama", "autocast"): 10.0,
        ("llama", "narrow"): 10.0,
    }
)
"""Bytes per token and width kept by the last norm and by the input of the head. LayerNorm is one kernel that keeps its
input. The operations of RMSNorm keep their factors as well."""
OPTIMIZER_BYTES, OPTIMIZER_KERNELS = 80.0, 13
"""AdamW by foreach in fp32: bytes per parameter, and kernels per list of parameters."""
TENSORS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"gpt": (12, 4), "llama": (9, 3), "llama-grouped": (9, 3), "latte": (10, 12), "stdit": (19, 15), "moe": (10, 3)}
)
"""Number of parameter tensors (in a block, in the rest of the model), by kind of block."""


def kind_of(model: Model, *, grouped: bool = True) -> str | None:
    """Return the kind of a model's block; None if it was not counted.

    With ``grouped`` the products of a block's experts are one kernel, else one kernel per expert.

    >>> from perfsuite.models import find
    >>> kind_of(find("gpt3-13b")), kind_of(find("llama2-70b")), kind_of(find("moe-tiny"), grouped=False)
    ('gpt', 'llama-grouped', 'moe-each')
    """
    if model.experts:
        return "moe" if grouped else "moe-each"
    if isinstance(model, Gpt):
        return "gpt"
    if isinstance(model, Decoder) and model.layer_norms and not model.gated:
        return "gpt"
    if isinstance(model, Llama | Decoder):
        return "llama" if model.kv_heads == model.heads else "llama-grouped"
    return "latte" if isinstance(model, Latte) else "stdit" if isinstance(model, Stdit) else None


def way_of(training: Training) -> Way:
    """Return the way a step computes: plain, autocast or narrow.

    >>> way_of(Training(model="gpt2", dtype="bf16")), way_of(Training(model="gpt2", dtype="bf16", narrow=True))
    ('autocast', 'narrow')
    """
    if training.dtype in ("fp32", "tf32"):
        return "plain"
    return "narrow" if training.narrow else "autocast"


def kept_end_bytes(model: Model, training: Training) -> float:
    """Return the bytes per token and width kept behind the last block of a language model."""
    gains = isinstance(model, Llama) or (isinstance(model, Decoder) and not model.layer_norms)
    return KEPT_END_BYTES["llama" if gains else "gpt", way_of(training)]


def counted(model: Model, training: Training, *, grouped: bool = True) -> BlockCounts | None:
    """Return the counts of a step's block; None if it was not counted."""
    kind = kind_of(model, grouped=grouped)
    rows = COMPILED if training.compiled else COUNTED
    return None if kind is None else rows.get((kind, way_of(training)))
