"""Which part of a model, on which rank, was the first to give a number that is not finite; imported on ranks only.

A NaN spreads to every rank by the loss and to every parameter by the optimizer: once the loss shows it, nothing is left
that tells where it came from.  So the parts are watched while the first step runs, which is never timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfsuite.workload import Rank
from perfsuite.workloads.training.agreement import texts_of_all

if TYPE_CHECKING:
    import torch
    from torch import nn

_BEFORE, _AFTER = -1, 1 << 30
"""Where in the order of layers a part stands that is in none: what embeds, what projects."""


class FirstStep:
    """Sums of what each innermost part of a model gives, kept on the device: a sum with a NaN is one."""

    def __init__(self, module: nn.Module) -> None:
        """Watch ``module`` until :meth:`end`."""
        self._sums: dict[tuple[int, str], list[torch.Tensor]] = {}
        """By (layer, name) in the order of the first forward: one of each forward, of what is computed again too."""
        self._in_layers = False
        self._handles = [
            part.register_forward_hook(self._noting(name))
            for name, part in module.named_modules()
            if name and next(part.children(), None) is None
        ]

    def end(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def first(self) -> tuple[int, int, str] | None:
        """Layer, place in the order of forwards and name of the first part on this rank; None: all was finite."""
        import torch

        if not self._sums:
            return None
        finite = torch.stack([torch.stack(sums).sum() for sums in self._sums.values()]).isfinite().tolist()
        parts = enumerate(zip(self._sums, finite, strict=True))
        return next(((layer, index, name) for index, ((layer, name), fine) in parts if not fine), None)

    def _noting(self, path: str) -> Any:
        _, within, inside = path.rpartition("blocks.")  # before it stands which of the rank's stages it is
        name = within + inside if within else path.rpartition(".")[2]
        layer = int(inside.partition(".")[0]) if within else None

        import torch

        def note(_: nn.Module, __: Any, output: Any) -> None:
            self._in_layers = self._in_layers or layer is not None
            place = layer if layer is not None else _AFTER if self._in_layers else _BEFORE
            # The same operations whenever it runs: selective checkpointing counts those of a block computed again.
            for tensor in _tensors(output):
                self._sums.setdefault((place, name), []).append(tensor.detach().sum(dtype=torch.float32).reshape(()))

        return note


def _tensors(output: Any) -> list[torch.Tensor]:
    import torch

    given = output if isinstance(output, (tuple, list)) else (output,)
    own = [value.to_local() if hasattr(value, "to_local") else value for value in given]
    return [value for value in own if isinstance(value, torch.Tensor) and value.is_floating_point()]


def tell_first(rank: Rank, watched: FirstStep | None) -> str:
    """What to add to the news that the loss is not finite; a collective.

    Empty where the first step's forward was finite everywhere: the gradients or a later step were not.
    """
    mine = watched.first() if watched is not None else None
    texts = texts_of_all(rank, "" if mine is None else "\n".join(map(str, mine)))
    parts = {}
    for who, text in enumerate(texts):
        if text:
            layer, index, name = text.split("\n")
            parts[who] = (int(layer), int(index), name)
    if not parts:
        return ""
    first = min(parts.values())
    ranks = [who for who, part in parts.items() if part == first]
    named = ", ".join(f"{who}{rank.shape.place(who)}" for who in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"; of the first step {first[2]} on rank {named}{more} was the first part that gave no finite numbers"
