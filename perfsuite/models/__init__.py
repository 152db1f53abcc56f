"""Training models: torch-free configurations by name, and the torch modules built from them.

>>> find("llama2-7b").parameters
6738415616
>>> find("llama2-7b", {"layers": 2, "sequence_length": 1024}).tokens_per_sample
1024
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import InvalidParameter, PerfsuiteError, did_you_mean
from perfsuite.base.mesh import MeshShape
from perfsuite.models import decoder, dit, language, moe
from perfsuite.models.base import Model as Model
from perfsuite.models.language import LanguageModel

MODELS: Mapping[str, Model] = {
    model.name: model for model in (*language.GPTS, *language.LLAMAS, *moe.MODELS, *dit.MODELS)
}
"""Models that the suite trains, by name, in their published or small sizes."""
PROJECTED: Mapping[str, Model] = {model.name: model for model in decoder.MODELS}
"""Models for projections only, by name: the suite has no torch module of them."""


def find(name: str, overrides: Mapping[str, Any] | None = None) -> Model:
    """Return the configuration of this name with fields replaced; InvalidParameter for unknown or conflicting ones."""
    if name in MODELS or name in PROJECTED:
        return _replaced(MODELS.get(name) or PROJECTED[name], overrides)
    if _is_file(name):
        raise InvalidParameter(
            f"model {name} is a file; only perfsuite project and advise read files, so give a model's name"
        )
    raise InvalidParameter(f"model {name!r} is unknown; {did_you_mean(name, sorted({*MODELS, *PROJECTED}))}")


def find_trained(name: str, overrides: Mapping[str, Any] | None = None) -> Model:
    """Return a configuration as :func:`find` does; InvalidParameter also for a model without a module in the suite."""
    if name in PROJECTED:
        raise InvalidParameter(
            f"model {name} is for perfsuite project and advise only: the suite has no module of it; choose one of "
            f"{', '.join(sorted(MODELS))}"
        )
    return find(name, overrides)


def find_projected(name: str, overrides: Mapping[str, Any] | None = None) -> Model:
    """Return a configuration by name, or of a ``config.json`` or its folder; ConfigurationError for other files."""
    if name in MODELS or name in PROJECTED or not _is_file(name):
        return find(name, overrides)
    from perfsuite.models.huggingface import read_config  # most projections read no file

    return _replaced(read_config(Path(name)), overrides)


@functools.lru_cache(maxsize=16)
def trained_like(model: Model) -> tuple[str, dict[str, Any]] | None:
    """Return the suite's model and the fewest overrides that give it the sizes of ``model``; None if no model fits.

    >>> trained_like(dataclasses.replace(PROJECTED["qwen2.5-32b"], input_biases=False, layers=80, width=8192, heads=64))
    ('llama2-70b', {'hidden': 27648, 'words': 152064})
    """
    count = (model.parameters, model.active_parameters, model.forward_flops)
    found: list[tuple[str, dict[str, Any]]] = []
    for name, other in MODELS.items():
        names = {field.name for field in dataclasses.fields(other)} - {"name"}
        sizes = {field: getattr(model, field) for field in sorted(names) if hasattr(model, field)}
        overrides = {field: size for field, size in sizes.items() if size != getattr(other, field)}
        with contextlib.suppress(InvalidParameter):
            same = dataclasses.replace(other, **overrides)
            if (same.parameters, same.active_parameters, same.forward_flops) == count:
                found.append((name, overrides))
    return min(found, key=lambda pair: len(pair[1]), default=None)


def _is_file(name: str) -> bool:
    """Return whether a name means a file or folder, existing or not."""
    return "/" in name or name.endswith(".json") or os.path.exists(name)


def _replaced(model: Model, overrides: Mapping[str, Any] | None) -> Model:
    if not overrides:
        return model
    names = [field.name for field in dataclasses.fields(model) if field.name not in ("name", "notes")]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise InvalidParameter(f"model {model.name} has no field {', '.join(unknown)}; choose from {', '.join(names)}")
    return dataclasses.replace(model, **overrides)


def stated(parameters: Mapping[str, Any], tp: int = 1) -> dict[str, Any]:
    """Return the sizes that a case's ``model`` and ``overrides`` set, under the names that reports use.

    Empty for an unknown model.  Only language models have a sequence length and a vocabulary here: reports define the
    tokens of a video in different ways.

    >>> stated({"model": "gpt-1536x16"}, tp=8)["vocabulary"], stated({"model": "opensora"}).get("sequence_length")
    (51200, None)
    """
    name, overrides = parameters.get("model"), parameters.get("overrides")
    try:
        model = find(str(name), overrides if isinstance(overrides, Mapping) else None).padded(tp)
    except (PerfsuiteError, TypeError):
        return {}
    facts = {"hidden_size": model.width, "num_heads": model.heads, "num_layers": model.layers}
    if model.vocabulary:
        facts.update(sequence_length=model.tokens_per_sample, vocabulary=model.vocabulary)
    return facts


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
