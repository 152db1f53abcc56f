"""Shapes of the parameters of language models without torch, in the order of a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perfsuite.models.base import Model
from perfsuite.models.gpt import Gpt
from perfsuite.models.llama import Llama

Shapes = Mapping[str, tuple[int, ...]]
"""By name."""


@dataclass(frozen=True, kw_only=True)
class ParameterShapes:
    """What the stages of a model hold; matrices are (out, in), as torch's are."""

    first: Shapes
    """With the first layer: embeddings."""
    block: Shapes
    """Of every layer."""
    last: Shapes
    """With the last layer: the last norm and what projects; a tied embedding is in ``first`` too."""
    experts: Shapes = field(default_factory=dict)
    """Of the experts of every layer, (E, in, out); not in ``block``, which has their router."""
    tied: str = ""
    """Name of the parameter that ``first`` and ``last`` both have."""

    @property
    def layer(self) -> Shapes:
        """All of a layer."""
        return {**self.block, **self.experts}

    def root(self, *, first: bool, last: bool) -> Shapes:
        """What a stage holds beside its layers, a tied parameter once."""
        return {**(self.first if first else {}), **(self.last if last else {})}


def find_shapes(model: Model) -> ParameterShapes | None:
    """The shapes of ``model``; None for what is no GPT nor LLaMA.

    >>> from perfsuite.models import find
    >>> find_shapes(find("gpt2", {})).block["attention.qkv.weight"]
    (2304, 768)
    """
    for kind in type(model).__mro__:
        if kind in _SHAPES:
            return _SHAPES[kind](model)
    return None


def _gpt(model: Gpt) -> ParameterShapes:
    width = model.width

    def linear(name: str, out: int, into: int) -> Shapes:
        return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    tokens = {"tokens.weight": (model.vocabulary, width)}
    return ParameterShapes(
        first={**tokens, "positions.weight": (model.context, width)},
        block={
            **norm("norm1"),
            **linear("attention.qkv", 3 * width, width),
            **linear("attention.project", width, width),
            **norm("norm2"),
            **linear("mlp.expand", 4 * width, width),
            **linear("mlp.contract", width, 4 * width),
        },
        last={**tokens, **norm("norm")},
        tied="tokens.weight",
    )


def _llama(model: Llama) -> ParameterShapes:
    """With experts a layer has a router, and instead of its MLP as many of them, their matrices (in, out)."""
    width, keys, hidden, experts = model.width, model.key_width, model.hidden, model.experts
    mlp = {"gate": (hidden, width), "expand": (hidden, width), "contract": (width, hidden)}
    dense = {f"mlp.{name}.weight": shape for name, shape in mlp.items()}
    return ParameterShapes(
        first={"tokens.weight": (model.words, width)},
        block={
            "norm1.weight": (width,),
            "attention.query.weight": (width, width),
            "attention.key.weight": (keys, width),
            "attention.value.weight": (keys, width),
            "attention.project.weight": (width, width),
            "norm2.weight": (width,),
            **({"mlp.router.weight": (experts, width)} if experts else dense),
        },
        experts={f"mlp.experts.{name}": (experts, into, out) for name, (out, into) in mlp.items()} if experts else {},
        last={"norm.weight": (width,), "output.weight": (model.words, width)},
    )


_SHAPES: Mapping[type[Model], Callable[[Any], ParameterShapes]] = MappingProxyType({Gpt: _gpt, Llama: _llama})
