"""What is trained: torch-free configurations by name, and the torch modules that they build.

>>> find("llama2-7b").parameters
6738415616
>>> find("llama2-7b", {"layers": 2, "sequence_length": 1024}).tokens_per_sample
1024
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from perfsuite.base.errors import InvalidParameter, PerfsuiteError, did_you_mean
from perfsuite.models import dit, gpt, llama, moe
from perfsuite.models.base import Model, SampleTensor

__all__ = ["MODELS", "Model", "SampleTensor", "find", "stated"]

MODELS: Mapping[str, Model] = MappingProxyType(
    {model.name: model for model in (*gpt.MODELS, *llama.MODELS, *moe.MODELS, *dit.MODELS)}
)
"""Every model by name, in its published or small size."""


def find(name: str, overrides: Mapping[str, Any] | None = None) -> Model:
    """The configuration of this name with some of its fields replaced.

    Raises InvalidParameter for a name or field that there is not, and for sizes that do not fit each other.
    """
    if name not in MODELS:
        raise InvalidParameter(f"model {name!r} is unknown; {did_you_mean(name, sorted(MODELS))}")
    if not overrides:
        return MODELS[name]
    known = [field.name for field in dataclasses.fields(MODELS[name]) if field.name != "name"]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise InvalidParameter(f"model {name} has no field {', '.join(unknown)}; it has {', '.join(known)}")
    return dataclasses.replace(MODELS[name], **overrides)


def stated(parameters: Mapping[str, Any], tp: int = 1) -> dict[str, Any]:
    """What a case's ``model`` and ``overrides`` set up, under the names that reports have for it.

    Empty for a model of somebody else's, or of an older perfsuite.  Length and vocabulary are those of language models:
    what a token of a video is differs from report to report.

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
