"""Decoders of published model families, for projections only: sizes, parameters and operations.

Sources: the configurations that the makers publish, and the modules that read them in Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.language import GroupedModel, Split

_LARGEST: Mapping[str, int] = {"layers": 4096, "heads": 1 << 16, "kv_heads": 1 << 16, "experts": 1 << 14}
"""Largest sizes; 2^24 for all others.  No model exceeds them, and a projection of a larger one would take hours."""
_FROM_ONE = ("layers", "width", "heads", "kv_heads", "hidden", "words", "sequence_length")


@dataclass(frozen=True, kw_only=True)
class Decoder(GroupedModel):
    """A decoder with one kind of attention and one kind of MLP; a size of 0 means that the model has no such part.

    >>> MODELS[-1].name, MODELS[-1].parameters, MODELS[-1].active_parameters
    ('deepseek-v3', 671026419200, 37552297472)
    """

    context: int = 0  # Number of learned positions.
    head_width: int = 0  # Features of a head's queries and keys (E); 0: D / H.
    gated: bool = True  # Whether an MLP has three matrices (SwiGLU) or two.
    tied: bool = False  # Whether the output projection is the embedding.
    layer_norms: bool = False  # Whether norms have a bias (LayerNorm) or not (RMSNorm).
    block_norms: int = 2  # Norms of a block that are as wide as a token.
    head_norms: bool = False  # Whether queries and keys have a norm as wide as a head.
    input_biases: bool = False  # Whether queries, keys and values have biases.
    output_bias: bool = False  # Whether attention's output has a bias.
    mlp_biases: bool = False  # Whether the matrices of an MLP have biases.
    query_rank: int = 0  # Latent attention: features that queries are computed from; 0: from the token.
    key_rank: int = 0  # Latent attention: features that keys and values are computed from.
    rope_width: int = 0  # Latent attention: features of a key that all heads share.
    value_width: int = 0  # Latent attention: features of a head's values.
    experts: int = 0  # Routed experts of a block (N).
    top_k: int = 0  # Routed experts that compute a token (k).
    expert_hidden: int = 0  # Features between the matrices of an expert.
    shared_hidden: int = 0  # Features of the shared experts, which compute every token.
    dense_layers: int = 0  # Layers without experts, before all others.
    router_biases: bool = False  # Whether a router has a bias for each expert.
    window: int = 0  # Tokens that a token attends to in layers with a sliding window.
    window_layers: int = 0  # Layers with a sliding window.
    notes: tuple[str, ...] = ()  # Remarks on the file that the sizes come from.

    parallelize: ClassVar[Mapping[str, Split]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), field.name
            if field.type == "int" or (field.type == "bool" and type(value) is not bool):
                least, most = int(name in _FROM_ONE), 1 if field.type == "bool" else _LARGEST.get(name, 1 << 24)
                if type(value) is not int or not least <= value <= most:
                    raise InvalidParameter(
                        f"{name}={value!r} of model {self.name} is not valid; choose a whole number from {least} "
                        f"to {most}"
                    )
        self._require_kv_heads()
        if not self.head_width and self.width % self.heads:
            raise InvalidParameter(
                f"heads={self.heads} does not divide width={self.width} of model {self.name}; choose a divisor, or "
                "set head_width"
            )
        if self.key_rank and not (0 < self.rope_width < self.head_width and self.value_width):
            raise InvalidParameter(
                f"latent attention of model {self.name} needs value_width, and a rope_width below head_width; it has "
                f"value_width={self.value_width}, rope_width={self.rope_width}, head_width={self.head_width}"
            )
        if self.experts and not (1 <= self.top_k <= self.experts and self.expert_hidden):
            raise InvalidParameter(
                f"experts={self.experts} of model {self.name} need expert_hidden and a top_k from 1 to {self.experts}; "
                f"it has top_k={self.top_k}, expert_hidden={self.expert_hidden}"
            )
        if self.experts and self.dense_layers >= self.layers:
            raise InvalidParameter(
                f"dense_layers={self.dense_layers} of model {self.name} leaves no layer with experts; choose fewer "
                f"than layers={self.layers}"
            )
        if self.context and self.sequence_length > self.context:
            raise InvalidParameter(
                f"sequence_length={self.sequence_length} of model {self.name} exceeds its {self.context} learned "
                f"positions; choose 1 to {self.context}"
            )

    @property
    def features(self) -> int:
        """Features of a head's queries and keys (E)."""
        return self.head_width or self.width // self.heads

    @property
    def key_width(self) -> int:
        """Features of all keys of a token."""
        return self.features * self.kv_heads

    @property
    def split_widths(self) -> Mapping[str, int]:
        """Features between the matrices of MLPs and experts."""
        if not self.experts:
            return {"hidden": self.hidden}
        sizes = {"expert_hidden": self.expert_hidden, "shared_hidden": self.shared_hidden}
        return {name: size for name, size in {**sizes, "hidden": self.hidden * (self.dense_layers > 0)}.items() if size}

    @property
    def _attention(self) -> int:
        """Numbers in the matrices of a block's attention."""
        width, heads, features = self.width, self.heads, self.features
        if not self.key_rank:
            return width * features * (2 * heads + 2 * self.kv_heads)
        queries = (width + heads * features) * self.query_rank or width * heads * features
        keys = width * (self.key_rank + self.rope_width)
        made = self.key_rank * heads * (features - self.rope_width + self.value_width)
        return queries + keys + made + heads * self.value_width * width

    @property
    def vectors(self) -> int:
        """Numbers in a block's norms and biases."""
        norms = self.block_norms * self.width * (1 + self.layer_norms)
        heads = 2 * self.features * self.head_norms + self.query_rank + self.key_rank
        attention = self.input_biases * self.features * (self.heads + 2 * self.kv_heads) + self.output_bias * self.width
        return norms + heads + attention + self.mlp_biases * (self.hidden * (1 + self.gated) + self.width)

    def _mlp(self, hidden: int) -> int:
        return (2 + self.gated) * self.width * hidden

    @property
    def _sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def _met_by_a_token(self) -> int:
        """Numbers in the matrices of all blocks that compute one token."""
        sparse, routed = self._sparse_layers, self._mlp(self.top_k * self.expert_hidden + self.shared_hidden)
        mlps = (self.layers - sparse) * self._mlp(self.hidden) + sparse * (routed + self.width * self.experts)
        return self.layers * self._attention + mlps

    @property
    def active_parameters(self) -> int:
        """Parameters without the experts that do not compute a token."""
        ends = (self.words * (1 if self.tied else 2) + self.context + 1 + self.layer_norms) * self.width
        routers = self._sparse_layers * self.experts * self.router_biases
        return self._met_by_a_token + self.layers * self.vectors + routers + ends

    @property
    def parameters(self) -> int:
        """Parameters with all experts."""
        return self.active_parameters + self._sparse_layers * self._mlp(
            (self.experts - self.top_k) * self.expert_hidden
        )

    @property
    def pair_share(self) -> float:
        """Share of the pairs of tokens that attention computes: in a window of W of S tokens, W (2 S - W) of S^2."""
        tokens = self.sequence_length
        window = min(self.window, tokens)
        left_out = 1 - window * (2 * tokens - window) / tokens**2
        return 1 - left_out * min(self.window_layers, self.layers) / self.layers

    @property
    def block_flops(self) -> float:
        """2 S per number that computes a token, and 2 S^2 H for each feature of keys and values, without windows."""
        tokens = self.sequence_length
        features = self.features + (self.value_width if self.key_rank else self.features)
        pairs = self.layers * self.pair_share * tokens**2
        return 2.0 * tokens * self._met_by_a_token + 2.0 * pairs * self.heads * features

    def twin(self, shape: MeshShape | None = None) -> Decoder:
        """Raise InvalidParameter: the suite has no module of a decoder to train."""
        raise InvalidParameter(f"model {self.name} is for projections only: the suite has no module of it")


MODELS = (
    Decoder(
        name="qwen2.5-32b", layers=64, width=5120, heads=40, kv_heads=8, hidden=27648, words=152064, input_biases=True
    ),
    Decoder(
        name="qwen3-30b-a3b", layers=48, width=2048, heads=32, kv_heads=4, head_width=128, head_norms=True,
        hidden=768, words=151936, experts=128, top_k=8, expert_hidden=768,
    ),
    Decoder(
        name="deepseek-v3", layers=61, width=7168, heads=128, kv_heads=128, head_width=192, hidden=18432,
        words=129280, query_rank=1536, key_rank=512, rope_width=64, value_width=128, experts=256, top_k=8,
        expert_hidden=2048, shared_hidden=2048, dense_layers=3, router_biases=True,
    ),
)  # fmt: skip
"""DeepSeek-V3 is without its module that predicts one more token."""
