"""Batches on the rank: random ones, or read from a data set by torch's DataLoader.

The number of a sample in the whole run chooses it, never a rank's seed: step s, micro-batch m, replica r and place b
give number ((s x accumulation + m) x replicas + r) x micro_batch_size + b, modulo the number of samples.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from perfsuite.base.errors import InvalidParameter
from perfsuite.models.base import Sampled, SampleTensor
from perfsuite.models.dataset import Dataset

_PR_SET_PDEATHSIG = 1
_DIFFERENT_BATCHES = 4  # Synthetic batches that are made before the first step and used in turn


def numbers_of(replica: int, replicas: int, micro_batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of the samples of a replica's micro-batches, without end.

    >>> numbers = numbers_of(replica=1, replicas=2, micro_batch_size=2)
    >>> next(numbers), next(numbers)
    ([2, 3], [6, 7])
    """
    first = replica * micro_batch_size
    while True:
        yield list(range(first, first + micro_batch_size))
        first += replicas * micro_batch_size


def draw(part: SampleTensor, number: int) -> torch.Tensor:
    """Return the random value of ``part`` in sample ``number``."""
    generator = torch.Generator().manual_seed(number * 31 + len(part.name))
    if part.below:
        return torch.randint(0, part.below, part.shape, generator=generator)
    return torch.randn(part.shape, generator=generator)


def synthetic_batch(model: Sampled, numbers: list[int]) -> dict[str, torch.Tensor]:
    """Return random samples of these numbers, stacked."""
    return {part.name: torch.stack([draw(part, number) for number in numbers]) for part in model.parts}


class Synthetic(Iterator[Mapping[str, torch.Tensor]]):
    """A few batches on the device, used in turn: loading data takes no time."""

    def __init__(self, model: Sampled, numbers: Iterator[list[int]], device: torch.device) -> None:
        drawn = (synthetic_batch(model, next(numbers)) for _ in range(_DIFFERENT_BATCHES))
        batches = [{name: values.to(device) for name, values in batch.items()} for batch in drawn]
        self._batches = itertools.cycle(batches)

    def __next__(self) -> Mapping[str, torch.Tensor]:
        return next(self._batches)

    def close(self) -> None:
        """Free the batches."""
        del self._batches


class Rows(TorchDataset[dict[str, torch.Tensor]]):
    """Samples of a data set; noise and noise level are drawn when a sample is read."""

    def __init__(self, model: Sampled, dataset: Dataset) -> None:
        self._drawn = [part for part in model.parts if not part.stored]
        self._integers = {part.name for part in model.parts if part.below}
        self._pixels = {part.name for part in model.parts if part.pixels}
        self._dataset = dataset
        self._arrays: Mapping[str, Any] | None = None

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if self._arrays is None:  # each loader process maps the files
            self._arrays = self._dataset.open()
        index = number % self._dataset.samples
        sample = {}
        for name, array in self._arrays.items():
            row = torch.from_numpy(array[index % len(array)].astype("int64" if name in self._integers else "float32"))
            sample[name] = row / 127.5 - 1 if name in self._pixels else row
        return {**sample, **{part.name: draw(part, number) for part in self._drawn}}


class Files(Iterator[Mapping[str, torch.Tensor]]):
    """Batches read from disk by ``num_workers`` loader processes (0: by the rank itself) and copied to the device."""

    def __init__(
        self, model: Sampled, dataset: Dataset, numbers: Iterator[list[int]], device: torch.device, *, num_workers: int
    ) -> None:
        self._device, pins = device, device.type != "cpu"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="pin_memory_device is deprecated")  # torch 2.8 and newer
            # Always fork: other start methods run a server for the loaders, which stays if the rank is killed. Loaders
            # use no device, so a fork is safe.
            loader = DataLoader(
                Rows(model, dataset),
                batch_sampler=numbers,
                num_workers=num_workers,
                multiprocessing_context="fork" if num_workers else None,
                worker_init_fn=_end_with_rank,
                pin_memory=pins,
                pin_memory_device=device.type if pins else "",  # needed by torch 2.5 for devices other than CUDA
            )
            self._batches = iter(loader)

    def __next__(self) -> Mapping[str, torch.Tensor]:
        try:
            batch: Mapping[str, torch.Tensor] = next(self._batches)
        except InvalidParameter as error:  # torch adds the traceback of the loader process
            raise InvalidParameter(str(error).rstrip().rpartition("InvalidParameter: ")[2]) from None
        return {name: values.to(self._device, non_blocking=True) for name, values in batch.items()}

    def close(self) -> None:
        """End the loader processes."""
        del self._batches


def _end_with_rank(_: int) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the rank ended before prctl
        os._exit(1)
