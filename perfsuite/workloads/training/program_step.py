"""Actions of a training program besides its model, on one rank: encoders, moving average, log and checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter
from perfsuite.models.program import Program
from perfsuite.record.workload import DTYPES, Rank
from perfsuite.runtime import scratch

if TYPE_CHECKING:
    import torch

    from perfsuite.models.encoders_module import FrozenEncoders
    from perfsuite.strategies.trainer import Batch, Trainer

_DECAY = 0.9999  # Decay of the moving average in the public programs of Latte and Open-Sora


class ProgramStep:
    """Encoders, moving average, log and checkpoint of one rank, each with a span."""

    def __init__(self, program: Program, rank: Rank, trainer: Trainer) -> None:
        import torch

        from perfsuite.models.encoders_module import build_encoders

        plan = trainer.plan
        self._program, self._rank, self._trainer = program, rank, trainer
        self._encoders: FrozenEncoders | None = None
        self._remove: Callable[[], None] = lambda: None
        found = program.find_encoders(plan.model)
        if found is not None and trainer.needs_data:
            dtype = getattr(torch, DTYPES[plan.dtype])
            self._encoders = build_encoders(found, rank.device, dtype, seed=plan.seed)
            trainer.prepare = self._encoded
        self._ema: list[torch.Tensor] = []
        if program.ema != "none":
            dtype = getattr(torch, DTYPES[program.ema])
            homes = ((weight, "cpu" if program.ema_on_host else weight.device) for weight in self._weights())
            self._ema = [weight.to(home, dtype, copy=True) for weight, home in homes]
        if program.saves:
            try:
                directory, self._remove = scratch.make_directory("checkpoint")
            except OSError as error:
                raise InvalidParameter(
                    f"program: saves=True cannot write a checkpoint ({error.strerror}); free disk space or set TMPDIR"
                ) from None
            self._file = directory / "checkpoint.pt"

    def _weights(self) -> Iterator[torch.Tensor]:
        return (weight.detach() for weight in self._trainer.weights())

    def _encoded(self, batch: Batch) -> Batch:
        assert self._encoders is not None
        with self._rank.span("encoders"):
            return self._encoders(batch)  # type: ignore[no-any-return] # a module's call has no type

    def after_step(self, mean_loss: Callable[[], float]) -> None:
        """Run the actions after the optimizer's step; ``mean_loss`` is a collective."""
        if self._ema:
            with self._rank.span("ema"):  # one weight after the other, as the public programs do
                for average, weight in zip(self._ema, self._weights(), strict=True):
                    average.mul_(_DECAY).add_(weight.to(average.device), alpha=1 - _DECAY)
        if self._program.logs:
            with self._rank.span("logging"):
                mean_loss()
        if self._program.saves:
            with self._rank.span("saving"):
                self._save()

    def _save(self) -> None:
        import torch

        held = self._trainer.tensors()
        state = {"weights": held["weights"], "optimizer": held["optimizer"], "ema": self._ema}
        try:
            torch.save(state, self._file)
            with open(self._file, "rb") as written:
                os.fsync(written.fileno())
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
            raise InvalidParameter(
                f"program: saves=True cannot write {self._file.name} ({error}); free disk space or set TMPDIR"
            ) from None

    def tensors(self) -> Mapping[str, list[torch.Tensor]]:
        """Return the tensors that this rank keeps between steps, by kind."""
        encoders = [] if self._encoders is None else [*self._encoders.parameters(), *self._encoders.buffers()]
        return {"encoders": encoders, "ema": self._ema}

    def close(self) -> None:
        """Free the tensors and remove the checkpoint."""
        self._encoders = None
        self._ema = []
        self._remove()
