"""Counts what the code of a model moves, keeps and starts, under fake tensors: no device.

    python -m tools.count_blocks

prints the rows of ``perfsuite/projection/counted.py``, which a test holds equal to what is counted here.

A model of 1 and of 2 blocks runs one forward and backward; what the second adds is a block's.  A tensor's shape says
what it grows with: tokens x width, tokens x hidden features, tokens x words, pairs of tokens, rows (tokens on their way
to an expert) x width, or parameters alone.  A kernel reads its arguments and writes its results once, what it changes
in place included.  Views are free, and products and attention are no traffic: their kernels have costs of their own.
What a router makes of probabilities are kernels; a few numbers for a token are no traffic beside its width.  Models
with experts are small and real: grouped products under fake tensors are for bf16 alone.  So are compiled ones, whose
kernels are those that the compiler would write (``count_compiled.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfsuite.base.errors import InvalidParameter
from perfsuite.models import Model, find, moe_module
from perfsuite.models.build import build
from perfsuite.models.dit import Dit
from perfsuite.models.language import Gpt, LanguageModel, Llama
from perfsuite.models.moe import Moe
from perfsuite.models.moe_module import MoeMlp
from perfsuite.projection.counted import COMPILED, COUNTED, COUNTED_OF, KEPT_END_BYTES, BlockCounts

if TYPE_CHECKING:  # the compiler takes 2 s to import, and few rows are compiled
    from tools.count_compiled import Kernels

Kind = Literal["width", "hidden", "words", "pairs", "rows", "choices", "weights"]
_BATCH, _TOKENS, _WIDTH, _HEADS, _WORDS = 2, 61, 6144, 16, 250
_HIDDEN = 5000
_EXPERTS, _TOP_K = 8, 2
_EXPERT_HIDDEN = 3200
_REAL_WIDTH, _REAL_DIT_WIDTH = 768, 760
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "device", "detach", "alias")
_NARROW = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """By which a tensor's shape tells what it grows with."""

    tokens: int
    """Of a sample."""
    words: int
    hidden: tuple[int, ...]
    """Whole, and of a tensor-parallel part."""
    rows: int = 0
    """Of all experts; 0: a dense model, and nothing below is asked for."""
    width: int = 0
    experts: int = 0
    keys: int = 0
    """Features of all keys."""

    @property
    def all_tokens(self) -> int:
        """Of all samples."""
        return _BATCH * self.tokens


@dataclass(kw_only=True)
class Pass:
    """What one pass over a model moved."""

    moved: Counter[Kind] = field(default_factory=Counter)
    """Bytes by what they grow with."""
    kernels: int = 0
    """That are no product and no attention."""
    products: int = 0
    """Products and attentions."""

    def less(self, other: Pass, times: int) -> Pass:
        """What this has more than ``other``, of one of so many blocks more."""
        moved = Counter({kind: (self.moved[kind] - other.moved[kind]) / times for kind in self.moved})
        return Pass(
            moved=moved,
            kernels=(self.kernels - other.kernels) // times,
            products=(self.products - other.products) // times,
        )


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a block computes."""

    autocast: bool = False
    """In bf16 where torch says so, with parameters in fp32."""
    narrow: bool = False
    """All in bf16."""
    grouped: bool = True
    """The products of experts are one, or one for each expert."""
    compiled: bool = False
    """By torch.compile, whose graphs need real tensors here."""


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's is untyped
    """Adds up what every kernel moves into ``now``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.sizes = sizes
        self.now = Pass()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _FREE:
            return out
        if is_product(name):
            self.now.products += 1
            return out
        self.now.kernels += 1
        read = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        written = {id(leaf): leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
                written |= {id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        for tensor in (*read.values(), *written.values()):
            kind, numbers = kind_of(tensor.shape, self.sizes), tensor.numel()
            if self.sizes.rows and kind in ("width", "rows"):
                last = tensor.shape[-1]
                if numbers in (last * (self.sizes.rows + 1), last * (self.sizes.all_tokens + 1)):
                    numbers -= last  # the row that is empty
            self.now.moved[kind] += numbers * tensor.element_size()
        return out

    def add(self, kernels: Kernels) -> None:
        """What a compiled graph ran."""
        products = sum(map(is_product, kernels.called))
        self.now.products += products
        self.now.kernels += kernels.fused + len(kernels.called) - products
        for shape, moved in kernels.moved:
            self.now.moved[kind_of(shape, self.sizes)] += moved


def is_product(name: str) -> bool:
    """Whether an operator's kernel is a matrix product or attention."""
    return name in _PRODUCTS or name.startswith("_scaled_dot_product")


def kind_of(shape: torch.Size, sizes: Sizes) -> Kind:
    """What a tensor of this shape grows with."""
    count, last = math.prod(shape), shape[-1] if shape else 0
    if sizes.rows and (kind := _kind_beside_experts(shape, sizes)):
        return kind
    if count % sizes.tokens:
        return "weights"
    if len(shape) >= 2 and shape[-1] == shape[-2] == sizes.tokens:
        return "pairs"
    return "words" if last == sizes.words else "hidden" if last in sizes.hidden else "width"


def _kind_beside_experts(shape: torch.Size, sizes: Sizes) -> Kind | None:
    """Of rows, all or those of one expert, and of what a router makes; None where a dense model has it too.

    Rows and tokens may have one more, which is empty.
    """
    last, lead = (shape[-1] if shape else 0), math.prod(shape[:-1])
    if lead not in (sizes.experts, sizes.keys) and lead <= sizes.rows + 1 and len(shape) > 1:  # no matrix
        if last == sizes.width:
            return "width" if lead in (sizes.all_tokens, sizes.all_tokens + 1) else "rows"
        if last in sizes.hidden:
            return "hidden"
    few = len(shape) == 1 or last <= sizes.experts
    return "choices" if few and math.prod(shape) % sizes.tokens == 0 else None


def probe(model: Model, layers: int, *, real: bool = False) -> Model:
    """A small sibling with so many blocks, whose tensors tell by their shapes what they grow with.

    ``real``: small enough to run with real tensors.
    """
    if isinstance(model, Gpt):
        sizes: dict[str, Any] = {"words": _WORDS, "words_multiple": 1, "context": _TOKENS, "sequence_length": 0}
    elif isinstance(model, Llama):
        share = max(2, _HEADS * model.kv_heads // model.heads)
        sizes = {"words": _WORDS, "hidden": _HIDDEN, "kv_heads": share, "sequence_length": _TOKENS}
        if isinstance(model, Moe):
            sizes |= {"width": _REAL_WIDTH, "hidden": _EXPERT_HIDDEN, "experts": _EXPERTS, "top_k": _TOP_K}
            sizes |= {"capacity_factor": None, "group_tokens": 0, "skew": None}
    elif isinstance(model, Dit):
        return dataclasses.replace(model, layers=2 * layers, width=_REAL_DIT_WIDTH if real else 6140, heads=5)
    else:
        raise InvalidParameter(
            f"model {model.name} is of a kind that a dry run does not know; give a gpt, llama or dit"
        )
    width = _REAL_WIDTH if real else _WIDTH
    return dataclasses.replace(model, **{"layers": layers, "width": width, "heads": _HEADS, **sizes})


def count_block(model: Model, way: Way) -> BlockCounts:
    """What one block of ``model`` moves and keeps."""
    with nullcontext() if way.grouped else _each_expert():
        return _count_block(model, way)


@contextmanager
def _each_expert() -> Iterator[None]:
    before = moe_module._grouped_product
    moe_module._grouped_product = lambda device, dtype: None  # type: ignore[assignment] # it is cached
    try:
        yield
    finally:
        moe_module._grouped_product = before


def _count_block(model: Model, way: Way) -> BlockCounts:
    small, larger = (probe(model, layers, real=way.compiled) for layers in (1, 2))
    one, two = (_run(each, way) for each in (small, larger))
    blocks = small.layers
    forward, backward = two[0].less(one[0], blocks), two[1].less(one[1], blocks)
    kept = {kind: (two[2][kind] - one[2][kind]) / blocks for kind in two[2]}
    tokens = _BATCH * small.tokens_per_sample
    chosen = small.top_k if isinstance(small, Moe) else 1
    per_width, per_hidden, per_row = (
        tokens * small.width,
        tokens * chosen * _hidden(small),
        tokens * chosen * small.width,
    )
    weights = (larger.parameters - small.parameters) / blocks
    whole = kept.get("width", 0.0)
    if isinstance(small, LanguageModel):
        halves = [_run(each, way, parts=2)[2] for each in (small, larger)]
        split = 2 * (whole - (halves[1]["width"] - halves[0]["width"]) / blocks)
    else:
        split = 0.0
    return BlockCounts(
        forward_width_bytes=forward.moved["width"] / per_width,
        forward_hidden_bytes=forward.moved["hidden"] / per_hidden,
        forward_weight_bytes=forward.moved["weights"] / weights,
        forward_row_bytes=forward.moved["rows"] / per_row,
        backward_width_bytes=backward.moved["width"] / per_width,
        backward_hidden_bytes=backward.moved["hidden"] / per_hidden,
        backward_weight_bytes=backward.moved["weights"] / weights,
        backward_row_bytes=backward.moved["rows"] / per_row,
        forward_kernels=forward.kernels,
        backward_kernels=backward.kernels,
        kept_whole_bytes=(whole - split) / per_width,
        kept_hidden_bytes=kept.get("hidden", 0.0) / per_hidden,
        kept_row_bytes=kept.get("rows", 0.0) / per_row,
    )


def count_end(model: Model, way: Way) -> float:
    """Bytes per token and width that a language model keeps behind its last block."""
    one, two = (probe(model, layers) for layers in (1, 2))
    kept = [_run(each, way)[2]["width"] for each in (one, two)]
    return (2 * kept[0] - kept[1]) / (_BATCH * one.tokens_per_sample * one.width)


def _hidden(model: Model) -> int:
    return model.hidden if isinstance(model, Llama) else 4 * model.width


def _beside_experts(model: Model) -> dict[str, int]:
    if not isinstance(model, Moe):
        return {}
    rows = _BATCH * model.tokens_per_sample * model.top_k
    return {"rows": rows, "width": model.width, "experts": model.experts, "keys": model.key_width}


def _run(model: Model, way: Way, *, parts: int = 1) -> tuple[Pass, Pass, Counter[Kind]]:
    """(forward, backward, bytes kept between them) of the whole model, or of one of so many tensor-parallel parts."""
    hidden = _hidden(model)
    sizes = Sizes(
        tokens=model.tokens_per_sample,
        words=model.vocabulary or -1,
        hidden=(hidden, hidden // parts),
        **_beside_experts(model),
    )
    counter: Any = _Count(sizes)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with (
        nullcontext() if isinstance(model, Moe) or way.compiled else FakeTensorMode(),
        _default_dtype(_NARROW if way.narrow else torch.float32),
    ):
        module = build(model)
        if isinstance(model, Moe):  # so that the router chooses among all
            torch.manual_seed(0)
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter)
        if parts > 1:
            _split(module, model, parts)
        if way.compiled:
            from tools.count_compiled import compiler

            torch.compiler.reset()
            for block in module.blocks.children():
                block.compile(backend=compiler(counter.add))
        batch = {
            part.name: torch.randint(0, part.below, (_BATCH, *part.shape))
            if part.below
            else torch.randn(_BATCH, *part.shape)
            for part in model.parts
        }
        own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        # Nothing is compiled while a mode watches what is started; what is between blocks is the same in any model.
        with (
            nullcontext() if way.compiled else counter,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            with torch.autocast("cpu", _NARROW, enabled=way.autocast):
                loss = module(**batch)
            forward, counter.now = counter.now, Pass()
            loss.backward()
    bytes_kept: Counter[Kind] = Counter()
    for storage, tensor in kept.items():
        if storage not in own:
            bytes_kept[kind_of(tensor.shape, counter.sizes)] += tensor.untyped_storage().nbytes()
    return forward, counter.now, bytes_kept


def _split(module: torch.nn.Module, model: Model, parts: int) -> None:
    """Leave every block's matrices the part of one tensor-parallel rank, by the model's own plan."""
    assert isinstance(model, LanguageModel)
    for name, part in list(module.named_modules()):
        way = next((way for pattern, way in model.parallelize.items() if fnmatch(name, pattern)), None)
        if isinstance(part, MoeMlp):
            part.experts.keep(part=0, parts=1, slice_=0, slices=parts)
        if not isinstance(part, torch.nn.Linear) or way not in ("column", "row"):
            continue
        out, into = part.out_features, part.in_features
        out, into = (out // parts, into) if way == "column" else (out, into // parts)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.nn.Linear(into, out, bias=part.bias is not None))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def count_optimizer() -> tuple[float, int]:
    """(bytes per parameter, kernels) that AdamW moves and starts for a list of parameters, in fp32, by foreach.

    With real tensors: its step count is read on the host.
    """
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    counter = _Count(Sizes(tokens=1000, words=-1, hidden=()))
    for step in range(2):  # the first makes the state
        parameter.grad = torch.ones(1000)
        if step == 0:
            optimizer.step()
    with counter:
        optimizer.step()
    return counter.now.moved["width"] / 1000, counter.now.kernels


WAYS = {"plain": Way(), "autocast": Way(autocast=True), "narrow": Way(narrow=True)}
"""What the names of the rows say."""


def count_row(kind: str, way: str, *, compiled: bool = False) -> BlockCounts:
    """What the row of that kind and way says, counted."""
    return count_block(
        find(COUNTED_OF[kind]), dataclasses.replace(WAYS[way], compiled=compiled, grouped=kind != "moe-each")
    )


if __name__ == "__main__":
    for compiled, rows in ((False, COUNTED), (True, COMPILED)):
        print("compiled" if compiled else "as it is")
        for kind, way in rows:
            counts = dataclasses.astuple(count_row(kind, way, compiled=compiled))
            print(f'("{kind}", "{way}", {tuple(round(value, 1) for value in counts)}),')
    print({(kind, way): count_end(find(COUNTED_OF[kind]), WAYS[way]) for kind, way in KEPT_END_BYTES})
    print(count_optimizer())
