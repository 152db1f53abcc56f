"""Tensor parallelism of a language model by torch's parallelize_module, from the model's table ``parallelize``.

Imported on ranks only.  With sequence parallelism a rank holds its share of the tokens between the split parts,
(B, S / tp, D), gathers all tokens before them and scatters sums after them.  Without it every rank holds all tokens and
sums are reduced (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as styles

from perfsuite.base.errors import UnsupportedCase
from perfsuite.models.language import Split
from perfsuite.models.language_module import LanguageModule, TiedEmbedding

_BLOCK = "blocks.*."


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Spreads the parts of a module, which have values already, over the one dimension of ``mesh``."""

    mesh: DeviceMesh
    sequence_parallel: bool
    loss_parallel: bool  # Keep logits split by words, for torch's ``loss_parallel``

    @property
    def tokens(self) -> Placement:
        """Placement of the (B, S, D) activations between the split parts."""
        return Shard(1) if self.sequence_parallel else Replicate()

    def split_block(self, module: LanguageModule, block: nn.Module) -> None:
        """Spread one layer of ``module``."""
        plan = {}
        for path, split in module.config.parallelize.items():
            if path.startswith(_BLOCK):
                name = path.removeprefix(_BLOCK)
                plan[name] = self._style(split, extra_inputs=module.extra_inputs if name == "attention" else 0)
        self._parallelize(block, plan)

    def split_ends(self, module: LanguageModule) -> None:
        """Spread the parts of ``module`` outside its layers."""
        plan = {}
        for name, part in list(module.named_children()):
            split = module.config.parallelize.get(name)
            if split == "tied":
                setattr(module, name, SplitEmbedding(part, self))
            elif split is not None:
                plan[name] = self._style(split, extra_inputs=0)
        self._parallelize(module, plan)

    def _parallelize(self, module: nn.Module, plan: dict[str, Any]) -> None:
        # Every rank has its values, so none are sent; torch before 2.7 always sends those of rank 0.
        parameters = inspect.signature(styles.parallelize_module).parameters
        quiet: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in parameters else {}
        styles.parallelize_module(
            module, self.mesh, {name: style for name, style in plan.items() if style is not None}, **quiet
        )

    def _style(self, split: Split, *, extra_inputs: int) -> Any:
        """Return torch's style of a part, None if it stays whole; ``extra_inputs``: inputs after the first."""
        tokens, others = self.tokens, (None,) * extra_inputs
        placed, logits = Shard(0) if self.sequence_parallel else Replicate(), Shard(-1)
        made: dict[Split, Any] = {
            # Gathered once for all projections.
            "gathered": lambda: styles.PrepareModuleInput(
                input_layouts=(tokens, *others), desired_input_layouts=(Replicate(), *others)
            ),
            "words": lambda: styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
            "positions": lambda: styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=placed),
            "column": styles.ColwiseParallel,
            "row": lambda: styles.RowwiseParallel(output_layouts=tokens),
            "head": lambda: styles.ColwiseParallel(
                input_layouts=tokens,
                output_layouts=logits if self.loss_parallel else Replicate(),
                use_local_output=not self.loss_parallel,
            ),
        }
        if self.sequence_parallel:
            made["sequence"] = lambda: styles.SequenceParallel(use_local_output=True)
        return made[split]() if split in made else None  # experts: their dispatcher moves rows


def overlap_messages(mesh: DeviceMesh) -> None:
    """Let the compiler overlap messages with products, in the whole process; UnsupportedCase if torch cannot."""
    try:
        from torch._inductor import config
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh.get_group().group_name)
        config._micro_pipeline_tp = True
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UnsupportedCase(
            f"async_tensor needs an accelerator with torch's symmetric memory ({error}); leave it out here"
        ) from None


class SplitEmbedding(TiedEmbedding):
    """A tied embedding; every rank holds its share of the words."""

    def __init__(self, whole: nn.Module, parallel: TensorParallel) -> None:
        assert isinstance(whole, TiedEmbedding)
        nn.Module.__init__(self)
        # This rank's part of values that every rank has; torch 2.7 and newer can leave out sending them.
        parameters = inspect.signature(distribute_tensor).parameters
        quiet: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in parameters else {}
        self.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), parallel.mesh, [Shard(0)], **quiet))
        self._parallel = parallel

    def forward(self, inputs: torch.Tensor, *, project: bool = False) -> torch.Tensor:
        """Return this rank's (B, S / tp, D) for (B, S) tokens, or (B, S, V) logits for (B, S / tp, D)."""
        mesh, tokens = self._parallel.mesh, self._parallel.tokens
        if not project:
            words = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False)
            return _local(F.embedding(words, self.weight), tokens)
        features = DTensor.from_local(inputs, mesh, [tokens], run_check=False)
        logits = F.linear(features.redistribute(placements=[Replicate()]), self.weight)
        return logits if self._parallel.loss_parallel else _local(logits, Replicate())


def _local(x: torch.Tensor, placement: Placement) -> torch.Tensor:
    assert isinstance(x, DTensor)
    return x.redistribute(placements=[placement]).to_local()
