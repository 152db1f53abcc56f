"""Build the torch module of a configuration; imports torch."""

from __future__ import annotations

from perfsuite.models.base import AttentionMethod, Checkpointing, Model
from perfsuite.models.dit import Latte, Stdit
from perfsuite.models.dit_module import LatteModule, StditModule
from perfsuite.models.language import Gpt, Llama
from perfsuite.models.language_module import GptModule, LanguageModule, LlamaModule
from perfsuite.models.layers import TrainingModule
from perfsuite.models.moe import Moe
from perfsuite.models.moe_module import MoeModule


def build(model: Model, checkpointing: Checkpointing = "none", attention: AttentionMethod = "auto") -> TrainingModule:
    """Return the whole model with its loss, on torch's default device, with torch's initial values."""
    if isinstance(model, Latte):
        return LatteModule(model, checkpointing, attention)
    if isinstance(model, Stdit):
        return StditModule(model, checkpointing, attention)
    return build_layers(model, checkpointing, attention, None)


def build_layers(
    model: Model, checkpointing: Checkpointing, attention: AttentionMethod, layers: range | None
) -> LanguageModule:
    """Return the stage of a language model with these layers; ``layers=None``: the whole model with its loss."""
    if isinstance(model, Gpt):
        return GptModule(model, checkpointing, attention, layers)
    if isinstance(model, Moe):
        return MoeModule(model, checkpointing, attention, layers)
    assert isinstance(model, Llama), f"the suite has no module for {type(model).__name__}"
    return LlamaModule(model, checkpointing, attention, layers)
