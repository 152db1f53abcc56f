"""The training step on one rank, and the actions of its program besides the model; imported on ranks only.

Such actions are encoders, a moving average, a log and a checkpoint.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.text import listed
from perfsuite.models.base import Sampled
from perfsuite.models.dataset import Dataset, generate, has_codec, read
from perfsuite.models.dit_module import FrozenEncoders, build_encoders
from perfsuite.models.layers import local
from perfsuite.models.loading import Files, Synthetic
from perfsuite.models.program import Program
from perfsuite.record.workload import DTYPES, Rank, Step
from perfsuite.runtime import scratch
from perfsuite.runtime.scratch import data_folder
from perfsuite.strategies import expert
from perfsuite.strategies.trainer import Batch, Copies, Trainer
from perfsuite.workloads.checks import texts_of_all
from perfsuite.workloads.training.case import TrainCase

_DECAY = 0.9999  # Decay of the moving average in the public programs of Latte and Open-Sora


class _ProgramStep:
    """Encoders, moving average, log and checkpoint of one rank, each with a span."""

    def __init__(self, program: Program, rank: Rank, trainer: Trainer) -> None:
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
            return self._encoders(batch)

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
        encoders = [] if self._encoders is None else [*self._encoders.parameters(), *self._encoders.buffers()]
        return {"encoders": encoders, "ema": self._ema}

    def close(self) -> None:
        self._encoders = None
        self._ema = []
        self._remove()


class TrainingStep(Step):
    """One rank's model and data."""

    def __init__(self, workload: TrainCase, rank: Rank) -> None:
        plan = workload.plan(rank.shape)
        self._rank = rank
        self._strategy = workload.strategy
        self.trainer: Trainer = workload.find_strategy().build(rank, plan)
        self._program = _ProgramStep(workload.find_program(), rank, self.trainer)
        self._data = open_samples(workload, rank, self.trainer)
        self.batches: Iterator[Any] = iter(()) if self._data is None else self._data
        self.loss: torch.Tensor | None = None
        # a hook would be compiled, and its removal would compile again
        watched = rank.purpose == "time" and not plan.compiled
        self._first_step = _FirstStep(self.trainer.module) if watched else None
        self._parameters_checked = False
        for name, value, unit in (
            ("local_batch", plan.micro_batch_size, "samples"),
            ("sequence_length", plan.model.tokens_per_sample, "tokens"),
            ("accumulation", plan.accumulation, "steps"),
            ("global_batch", plan.batch_size * rank.shape.replicas, "samples"),
        ):
            rank.record(name, value, unit=unit, reduce="equal")

    def run(self) -> None:
        """Run one step of the optimizer."""
        self.loss = self.trainer.forward_and_backward(self.batches)
        self.end()
        if self.loss is not None:
            self._rank.record("loss", self.loss, reduce="mean")
        if self._first_step is not None:
            self._first_step.end()

    def end(self) -> None:
        """Step the optimizer, then run the training program's own actions."""
        with self._rank.span("optimizer"):
            self.trainer.step()
        self._program.after_step(self.mean_loss)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that this rank keeps between steps, by kind."""
        return {**self.trainer.tensors(), **self._program.tensors()}

    def mean_loss(self) -> float:
        """Return the mean loss of the last step over all replicas; a collective."""
        return self.trainer.mean_loss(self.loss)

    def check(self) -> None:
        """Check as :meth:`TrainStep.check`; a collective with the same result on all ranks."""
        loss = self.mean_loss()
        if not math.isfinite(loss):
            raise WrongResult(
                f"loss of {self.trainer.plan.model.name} under {self._strategy} in {self.trainer.plan.dtype}, "
                f"mean over replicas{first_not_finite(self._rank, self._first_step)}",
                expected="a finite number",
                got=loss,
            )
        self._require_finite_parameters()
        if self.trainer.plan.model.experts:
            expert.record(self._rank, self.trainer.module)
        for copies in self.trainer.copies():
            self._check_copies(copies)

    def _require_finite_parameters(self) -> None:
        """Raise WrongResult on all ranks if the first step left parameters that are not finite; a collective, once."""
        if self._first_step is None or self._parameters_checked:
            return
        self._parameters_checked = True
        own = [local(parameter.detach()).sum(dtype=torch.float32) for parameter in self.trainer.module.parameters()]
        fine = not own or bool(torch.stack(own).isfinite().all())
        broken = [text for text in texts_of_all(self._rank, "" if fine else "broken") if text]
        if broken:
            raise WrongResult(
                f"parameters of {self.trainer.plan.model.name} under {self._strategy} in {self.trainer.plan.dtype} "
                f"after a step{first_not_finite(self._rank, self._first_step)}",
                expected="finite numbers",
                got=f"others on {len(broken)} of {self._rank.world_size} ranks",
            )

    def _check_copies(self, copies: Copies) -> None:
        both = torch.full((2,), -math.inf, dtype=torch.float64, device=self._rank.device)  # a rank may hold no copy
        name, sums, group = copies
        for own in sums:
            both = torch.maximum(both, torch.stack((own, -own)))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        most, least = float(both[0]), -float(both[1])
        if most not in (least, -math.inf):
            raise WrongResult(
                f"sum of {name} under {self._strategy}, largest and smallest of any rank",
                expected=most,
                got=least,
            )

    def close(self) -> None:
        """End the loaders and free the model."""
        if self._data is not None:
            self._data.close()
        self._program.close()
        self.trainer.close()
        self.loss = None


def open_samples(workload: TrainCase, rank: Rank, trainer: Trainer) -> Synthetic | Files | None:
    """Return this rank's batches, in order; None if its stages take none; a collective."""
    plan = trainer.plan
    inputs = workload.find_program().inputs(plan.model)
    if workload.data == "synthetic":
        return Synthetic(inputs, trainer.numbers(), rank.device) if trainer.needs_data else None
    dataset = _dataset(workload, rank, inputs)
    batch = plan.batch_size * rank.shape.replicas
    rank.record("steps_per_epoch", dataset.samples / batch, unit="steps", reduce="equal")
    if not trainer.needs_data:
        return None
    return Files(inputs, dataset, trainer.numbers(), rank.device, num_workers=workload.num_workers)


def _dataset(workload: TrainCase, rank: Rank, inputs: Sampled) -> Dataset:
    if workload.data not in ("generated", "video"):
        return read(Path(workload.data), inputs)
    as_video = workload.data == "video" and has_codec()
    if workload.data == "video":
        rank.record("raw_frames", float(not as_video), reduce="max")
    shapes = zlib.crc32(repr(inputs.parts).encode())
    kind = "-video" if as_video else ""
    problem: OSError | None = None
    directory = Path()
    try:
        directory = data_folder() / f"{inputs.name}-{shapes:08x}{kind}-{workload.dataset_samples}"
        if rank.local_rank == 0:  # one rank of each host writes, the others wait
            generate(inputs, directory, workload.dataset_samples, as_video=as_video)
    except OSError as error:
        problem = error
    failed = torch.tensor([float(problem is not None)], device=rank.device)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=rank.group())
    if bool(failed.item()):
        raise InvalidParameter(
            f"data={workload.data!r} cannot be written ({problem.strerror if problem else 'on another host'}); "
            "free disk space there or set TMPDIR"
        )
    return read(directory, inputs)


_BEFORE, _AFTER = -1, 1 << 30  # Places of parts outside layers: before them (embeddings), and after them (projections)


class _FirstStep:
    """Finds the part of a model, and its rank, that was the first to return a number that is not finite.  A NaN spreads
    to every rank by the loss and to every parameter by the optimizer, so its source is lost when the loss shows it.
    Therefore the sums of each innermost part's outputs are kept on the device during the first step, forwards and
    backwards, which is not timed: the sum over a NaN is a NaN.
    """

    def __init__(self, module: nn.Module) -> None:
        """Watch ``module`` until :meth:`end`."""
        self._outputs = _Sums()
        self._gradients = _Sums()
        """Summed gradients of a part's inputs and of its parameters, before ranks are averaged."""
        self._in_layers = False
        self._parameters: set[int] = set()
        self._handles: list[Any] = [
            part.register_forward_hook(self._noting(name))
            for name, part in module.named_modules()
            if name and next(part.children(), None) is None
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def first(self) -> tuple[int, int, int, str] | None:
        """Return the place on this rank where numbers were first not finite, in the order of a step; None if all were
        finite.  The place is 0 for a forward or 1 for a backward; the layer, negative in a backward, which starts at
        the last; the position in the order of outputs; and the name.
        """
        for direction, sums in enumerate((self._outputs, self._gradients)):
            if (part := sums.first()) is not None:
                return direction, *part
        return None

    def _noting(self, path: str) -> Any:
        _, within, inside = path.rpartition("blocks.")  # the text before it is the rank's stage
        name = within + inside if within else path.rpartition(".")[2]
        layer = int(inside.partition(".")[0]) if within else None

        def note(part: nn.Module, inputs: Any, output: Any) -> None:
            self._in_layers = self._in_layers or layer is not None
            place = layer if layer is not None else _AFTER if self._in_layers else _BEFORE
            self._outputs.add((place, name), output)
            new = [parameter for parameter in part.parameters(recurse=False) if id(parameter) not in self._parameters]
            self._parameters.update(map(id, new))
            for tensor in (*inputs, *new):
                if getattr(tensor, "requires_grad", False):
                    self._handles.append(tensor.register_hook(functools.partial(self._gradients.add, (-place, name))))

        return note


class _Sums:
    """Sums of outputs in the order of time, each with layer and name."""

    def __init__(self) -> None:
        self._sums: list[tuple[tuple[int, str], torch.Tensor]] = []

    def add(self, key: tuple[int, str], output: Any) -> None:
        # Always the same operations: selective checkpointing counts those of a recomputed block.
        for tensor in _tensors(output):
            self._sums.append((key, tensor.detach().sum(dtype=torch.float32).reshape(())))

    def first(self) -> tuple[int, int, str] | None:
        """Return the first sum that is not finite in the lowest layer with one: layer, position in the order, name."""
        if not self._sums:
            return None
        finite = torch.stack([total for _, total in self._sums]).isfinite().tolist()
        came = enumerate(zip(self._sums, finite, strict=True))
        return min(((layer, index, name) for index, (((layer, name), _), fine) in came if not fine), default=None)


def _tensors(output: Any) -> list[torch.Tensor]:
    values = output if isinstance(output, (tuple, list)) else (output,)
    parts = (value.to_local() if hasattr(value, "to_local") else value for value in values)
    return [value for value in parts if isinstance(value, torch.Tensor) and value.is_floating_point()]


def first_not_finite(rank: Rank, watched: _FirstStep | None) -> str:
    """Return a message part with the place where numbers were first not finite, or nothing; a collective."""
    own = watched.first() if watched is not None else None
    texts = texts_of_all(rank, "" if own is None else "\n".join(map(str, own)))
    parts = {}
    for who, text in enumerate(texts):
        if text:
            *place, name = text.split("\n")
            parts[who] = (*map(int, place), name)
    if not parts:
        return ""
    first = min(parts.values())
    ranks = [who for who, part in parts.items() if part == first]
    named = listed([f"{who}{rank.shape.place(who)}" for who in ranks], 4)
    when, kind = ("the first step's backward", "gradients") if first[0] else ("the first step", "numbers")
    return f"; in {when} {first[-1]} on rank {named} was the first part without finite {kind}"
