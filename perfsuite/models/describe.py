"""Describe a model in text and JSON: parameters, sizes, padded words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model
from perfsuite.models.language import LanguageModel


def counts(model: Model, layout: str) -> dict[str, Any]:
    """Return the parameters, the words padded for a layout and the notes of a model, for JSON.

    >>> from perfsuite.models import find
    >>> counts(find("gpt3-13b"), "dp2-tp8")["padded_words"]
    51200
    """
    return {
        "words": model.vocabulary,
        "padded_words": model.built_for(MeshShape.parse(layout).size("tp") if layout else 1).vocabulary,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "model_notes": list(model.notes),
    }


def describe(model: Model, sizes: Iterable[int]) -> Iterator[str]:
    """Yield one line for the model, one line for words padded at these sizes of tp, then the model's notes.

    >>> from perfsuite.models import find
    >>> for line in describe(find("gpt2-xl"), (1, 5)): print(line)
    gpt2-xl: 1,557,611,200 parameters, 48 layers x 1,600, 25 heads, 50,257 words, 1,024 tokens per sample
    50,257 words are padded to a multiple of 128 x tp: 50,560 at tp5 (1,558,096,000 parameters)
    """
    active = f" ({model.active_parameters:,} active per token)" if model.experts else ""
    keys = model.key_heads if isinstance(model, LanguageModel) else model.heads
    parts = [
        f"{model.name}: {model.parameters:,} parameters{active}",
        f"{model.layers:,} layers x {model.width:,}",
        f"{model.heads} heads" + (f" ({keys} of keys)" if keys != model.heads else ""),
        *([f"{model.experts} experts"] if model.experts else []),
        *([f"{model.vocabulary:,} words"] if model.vocabulary else []),
        f"{model.tokens_per_sample:,} tokens per sample",
    ]
    yield ", ".join(parts)
    built = {tp: model.built_for(tp) for tp in sorted(set(sizes))}
    padded = [
        f"{one.vocabulary:,} at tp{tp} ({one.parameters:,} parameters)"
        for tp, one in built.items()
        if one.vocabulary != model.vocabulary
    ]
    if padded:
        yield f"{model.vocabulary:,} words are padded to a multiple of 128 x tp: {', '.join(padded)}"
    yield from model.notes
