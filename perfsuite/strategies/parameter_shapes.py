"""Shapes of the parameters of language models, without torch, in the order of a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perfsuite.models.base import Model
from perfsuite.models.gpt import Gpt
from perfsuite.models.llama import Llama

Shapes = Mapping[str, tuple[int, ...]]  # Shape by name


@dataclass(frozen=True, kw_only=True)
class ParameterShapes:
    """Shapes of a model by stage; matrices are (out, in), as in torch."""

    first: Shapes  # Embeddings, on the stage of the first layer
    block: Shapes
    last: Shapes
    """Last norm and output projection, on the stage of the last layer; a tied embedding is in ``first`` too."""
    experts: Shapes = field(default_factory=dict)  # Experts of every layer, (E, in, out); ``block`` has their router
    tied: str = ""  # Name of the parameter that ``first`` and ``last`` both have

    @property
    def layer(self) -> Shapes:
        """All parameters of a layer."""
        return {**self.block, **self.experts}

    def root(self, *, first: bool, last: bool) -> Shapes:
        """Return the parameters of a stage outside its layers, a tied parameter once."""
        return {**(self.first if first else {}), **(self.last if last else {})}


def find_shapes(model: Model) -> ParameterShapes | None:
    """Return the shapes of ``model``; None if it is neither a GPT nor a LLaMA.

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
    """Return the shapes of a LLaMA; experts replace the MLP, with matrices (in, out)."""
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
