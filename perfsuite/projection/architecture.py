"""A model in plain numbers, as far as they determine the time and memory of its step.

Tokens S, width D, H heads of E features, K key heads, hidden F, vocabulary V. Parameters and operations equal those of
:mod:`perfsuite.models` for every model that perfsuite builds (a test compares them). The back-test also describes
published models that perfsuite does not build.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any

from perfsuite.models import Model
from perfsuite.models.decoder import Decoder
from perfsuite.models.dit import Dit, Stdit
from perfsuite.models.language import Gpt, Llama


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a model."""

    name: str
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    gated: bool
    """An MLP has three matrices (SwiGLU) instead of two."""
    vocabulary: int
    """0 for a model without an output over words."""
    tokens: int
    tied: bool = False
    """The output projection shares the weights of the embedding."""
    positions: int = 0
    """Number of learned positions."""
    biases: bool = False
    head_width: int = 0
    """Features of a head's queries and keys; 0: D / H."""
    value_width: int = 0
    """Features of a head's values; 0: the same as of its keys."""
    query_rank: int = 0
    """Latent attention: width of the latent vector of the queries; 0: queries come from the token."""
    key_rank: int = 0
    """Latent attention: width of the latent vector of keys and values."""
    rope_width: int = 0
    """Latent attention: features of the key that all heads share."""
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    dense_layers: int = 0
    """Number of first layers without experts."""
    router_biases: bool = False
    vectors: int = 0
    """Parameters of a block's norms and biases; 0: two norms, and with ``biases`` those of all matrices."""
    capacity_factor: float | None = None
    token_groups: tuple[tuple[float, int, int], ...] = ()
    """Attention by parts: (attentions of a block, query tokens, key tokens) of one group; empty: causal, all tokens."""
    pair_share: float = 1.0
    """Share of the pairs of tokens that sliding windows leave, on average over the layers."""
    more_parameters: int = 0
    """Parameters outside blocks and embeddings."""
    more_block_parameters: int = 0
    """Parameters of a block's matrices that are applied once per sample, not per token."""
    more_projections: int = 0
    """Parameters of a block's further matrices of width x width, applied to every token."""
    more_flops: float = 0.0
    """Operations of a sample's forward pass outside the blocks' token products and attention."""

    @classmethod
    def of(cls, model: Model) -> Architecture:
        """Return the architecture of a model that perfsuite builds."""
        alike = {field.name: getattr(model, field.name) for field in fields(cls) if hasattr(model, field.name)}
        alike["tokens"] = model.tokens_per_sample
        if isinstance(model, Gpt):
            alike |= {"hidden": 4 * model.width, "gated": False, "tied": True}
            return cls(**alike, positions=model.context, biases=True)
        if isinstance(model, Llama):
            return cls(**alike, gated=True, expert_hidden=model.hidden if model.experts else 0)
        if isinstance(model, Decoder):
            return cls(**alike, positions=model.context, biases=model.layer_norms)
        assert isinstance(model, Dit), f"{model.name} is of a kind that projections do not know"
        return _of_dit(model, alike)

    @property
    def features(self) -> int:
        """Return the features of a head's queries and keys (E)."""
        return self.head_width or self.width // self.heads

    @property
    def value_features(self) -> int:
        """Return the features of a head's values."""
        return self.value_width or self.features

    @property
    def matrices(self) -> int:
        """Return the number of matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of the attention's matrices; the last one is split by rows."""
        heads, width = self.heads, self.width
        if not self.key_rank:
            joined = (heads + 2 * self.key_heads) * self.features
            return ((joined, width), (width, heads * self.value_features))
        up = heads * (self.features - self.rope_width + self.value_features)
        rank, queries = self.query_rank, heads * self.features
        return (
            *(((rank, width), (queries, rank)) if rank else ((queries, width),)),
            (self.key_rank + self.rope_width, width),
            (up, self.key_rank),
            (width, heads * self.value_features),
        )

    @property
    def attention_weights(self) -> int:
        """Return the number of weights of a block's attention."""
        return sum(outputs * inputs for outputs, inputs in self.projections) + self.more_projections

    @property
    def expert_layers(self) -> int:
        """Return the number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def mlp_weights(self, *, experts: bool, active: bool = False) -> int:
        """Return the weights of a block's MLP: all experts and their router, or the ``active`` ones of a token."""
        if not experts:
            return self.matrices * self.width * self.hidden
        count = self.top_k if active else self.experts
        routed = count * self.matrices * self.width * self.expert_hidden
        return routed + self.matrices * self.width * self.shared_hidden + self.width * self.experts

    @property
    def block_extras(self) -> int:
        """Return the number of parameters of a block's norms and biases."""
        if self.vectors:
            return self.vectors
        gains = 2 * self.width
        if self.biases:
            gains += 2 * self.width + sum(outputs for outputs, _ in self.projections) + self.hidden + self.width
        return gains + self.query_rank + self.key_rank

    def block_parameters(self, *, experts: bool = False) -> int:
        """Return the number of parameters of one block."""
        matrices = self.attention_weights + self.mlp_weights(experts=experts) + self.more_block_parameters
        matrices += self.experts * (experts and self.router_biases)
        return matrices + (0 if self.more_block_parameters else self.block_extras)

    @property
    def embedding_parameters(self) -> int:
        """Return the number of parameters of the embeddings."""
        return (self.vocabulary + self.positions) * self.width

    @property
    def head_parameters(self) -> int:
        """Return the number of parameters of the last norm and of an untied output projection."""
        return (0 if self.tied else self.vocabulary * self.width) + (2 if self.biases else 1) * self.width

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        blocks = (self.layers - self.expert_layers) * self.block_parameters()
        blocks += self.expert_layers * self.block_parameters(experts=True)
        ends = self.embedding_parameters + self.head_parameters if self.vocabulary else 0
        return blocks + ends + self.more_parameters

    @property
    def scores(self) -> float:
        """Return the operations of one sample's attention in one block's forward pass, without a causal mask."""
        per_pair = 2.0 * self.heads * (self.features + self.value_features)
        if not self.token_groups:
            return per_pair * self.pair_share * self.tokens**2
        return sum(count * per_pair * queries * keys for count, queries, keys in self.token_groups)

    @property
    def forward_flops(self) -> float:
        """Return the operations of one sample's forward pass, as the model's own ``forward_flops``."""
        dense = self.attention_weights + self.mlp_weights(experts=False)
        expert = self.attention_weights + self.mlp_weights(experts=True, active=True) if self.experts else 0
        weights = (self.layers - self.expert_layers) * dense + self.expert_layers * expert
        products = 2.0 * self.tokens * (weights + self.vocabulary * self.width)
        return products + self.layers * self.scores + self.more_flops


def _of_dit(model: Dit, alike: dict[str, Any]) -> Architecture:
    """Return a DiT: 4 D^2 for each attention and an MLP of 4 D per block; per-sample matrices are counted once."""
    width, layers, both = model.width, model.layers, isinstance(model, Stdit)
    each = 1.0 if both else 0.5  # a block attends within frames and over them, or does one of the two
    groups = [(each * model.frames, model.patches, model.patches), (each * model.patches, model.frames, model.frames)]
    if isinstance(model, Stdit):
        groups.append((1.0, model.tokens_per_sample, model.caption_length))
    shell = Architecture(
        **alike,
        key_heads=model.heads,
        hidden=4 * width,
        gated=False,
        token_groups=tuple(groups),
        more_projections=6 * width**2 * both,
    )
    block = shell.attention_weights + shell.mlp_weights(experts=False)
    once = (model.parameters - layers * block) // layers
    return dataclasses.replace(
        shell,
        more_block_parameters=once,
        more_parameters=model.parameters - layers * (block + once),
        more_flops=model.forward_flops - shell.forward_flops,
    )
