"""Tensor parallelism of a language model by torch's parallelize_module, as the model's table ``parallelize`` says.

Imported on ranks only.  With sequence parallelism a rank has its tokens' share of what lies between the split parts,
(B, S / tp, D), gathers it before them and scatters sums after them; without, every rank has all tokens and the sums are
reduced (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models).
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
from perfsuite.models.gpt_module import TiedEmbedding
from perfsuite.models.language import Split
from perfsuite.models.language_module import LanguageModule

_BLOCK = "blocks.*."


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How a module's parts, which have their values already, are spread over the one dimension of ``mesh``."""

    mesh: DeviceMesh
    sequence_parallel: bool
    loss_parallel: bool
    """Logits stay split by words, for torch's ``loss_parallel``."""

    @property
    def tokens(self) -> Placement:
        """Of what lies between the split parts, (B, S, D)."""
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
        """Spread what ``module`` has beside its layers."""
        plan = {}
        for name, part in list(module.named_children()):
            split = module.config.parallelize.get(name)
            if split == "tied":
                setattr(module, name, SplitEmbedding(part, self))
            elif split is not None:
                plan[name] = self._style(split, extra_inputs=0)
        self._parallelize(module, plan)

    def _parallelize(self, module: nn.Module, plan: dict[str, Any]) -> None:
        # Every rank has the values that it needs: nothing is sent.  torch before 2.7 always sends rank 0's.
        known = inspect.signature(styles.parallelize_module).parameters
        quiet: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in known else {}
        styles.parallelize_module(
            module, self.mesh, {name: style for name, style in plan.items() if style is not None}, **quiet
        )

    def _style(self, split: Split, *, extra_inputs: int) -> Any:
        """torch's style of a part, None where the part stays whole; ``extra_inputs``: inputs after the first."""
        tokens, others = self.tokens, (None,) * extra_inputs
        placed, logits = Shard(0) if self.sequence_parallel else Replicate(), Shard(-1)
        made: dict[Split, Any] = {
            # Gathered once, however many projections take it.
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
        return made[split]() if split in made else None  # experts: their dispatcher moves rows between ranks


def overlap_messages(mesh: DeviceMesh) -> None:
    """Let the compiler cut products into pieces that travel while others are computed.

    Process-wide.  Raises UnsupportedCase where torch has no symmetric memory for the device.
    """
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
    """A tied embedding of which every rank has its share of the words."""

    def __init__(self, whole: nn.Module, parallel: TensorParallel) -> None:
        assert isinstance(whole, TiedEmbedding)
        nn.Module.__init__(self)
        self.weight = nn.Parameter(split_values(whole.weight, parallel.mesh, Shard(0)))
        self._parallel = parallel

    def forward(self, inputs: torch.Tensor, *, project: bool = False) -> torch.Tensor:
        """(B, S) tokens to this rank's (B, S / tp, D), or those to (B, S, V) logits."""
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


def split_values(values: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """This rank's part of values that every rank has; nothing is sent where torch can leave it out (2.7 and newer)."""
    known = inspect.signature(distribute_tensor).parameters
    quiet: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in known else {}
    return distribute_tensor(values.detach(), mesh, [placement], **quiet)
