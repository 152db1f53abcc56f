"""Which layers each stage of a pipeline gets: embedding and head count as the work that they are.  No torch."""

from __future__ import annotations

import functools

from perfsuite.base.errors import InvalidParameter
from perfsuite.models.base import Model
from perfsuite.models.language import LanguageModel
from perfsuite.schedules import Split, balance, split_costs

_KEPT = 64
"""Splits that are kept: the closed form of each rank asks for the same one."""


def split_layers(model: Model, num_stages: int) -> Split:
    """The layers of each stage, so that the most expensive stage is as cheap as can be.

    The cost of a block and of the head is its operations; looking up an embedding has none.  GPT-2's head, 50257 words
    wide, costs as much as four and a half of its blocks:

    >>> from perfsuite.models import find
    >>> [len(layers) for layers in split_layers(find("gpt2"), 4)]
    [3, 4, 4, 1]

    Raises InvalidParameter for a model that has no stages and for more stages than layers.
    """
    costs, head = _costs(model)
    return _balance(tuple(costs), num_stages, head)


@functools.lru_cache(maxsize=_KEPT)
def _balance(costs: tuple[float, ...], num_stages: int, head: float) -> Split:
    return balance(costs, num_stages, head=head)


def stage_costs(model: Model, split: Split) -> tuple[float, ...]:
    """Operations of one sample's forward in each stage."""
    costs, head = _costs(model)
    return split_costs(costs, split, head=head)


def _costs(model: Model) -> tuple[list[float], float]:
    """(operations of each block, operations of the head)."""
    if not isinstance(model, LanguageModel):
        raise InvalidParameter(
            f"model {model.name} cannot be split into stages: its blocks need more than what the block before gives; "
            "choose a GPT or a LLaMA"
        )
    return [model.block_flops / model.layers] * model.layers, model.forward_flops - model.block_flops
