"""Counts what a step posts: every collective and message of this thread and its backward, by axis and part.

A mode of torch's dispatcher sees them below autograd and below DTensor, whoever posts them: a strategy, DTensor, DDP's
reducer, FSDP2.  Sizes are nccl-tests' S; the group's ranks tell the axes of the mesh.  Imported on ranks only.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite.base.errors import UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.strategies.traffic import DATA, OTHER, PIPELINE

_OPERATORS: Mapping[str, str] = {
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ reduce_scatter_tensor "
    "reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send isend",
    "receive": "recv_ recv_any_source_ irecv",
}
_NAMES: Mapping[str, str] = MappingProxyType(
    {operator: name for name, all_ in _OPERATORS.items() for operator in all_.split()}
)
"""nccl-tests' names of torch's operators in ``c10d`` and ``_c10d_functional``."""
_WITHOUT_MESSAGE = ("barrier", "monitored_barrier_")
_SPREADS_PARAMETERS = ("torch.distributed.fsdp.", "torch.distributed._composable.")
"""Modules of torch that gather parameters and reduce gradients, whichever axes they do it along."""


Key = tuple[str, str, str]
"""Axis, collective and part."""


class Marks(Protocol):
    """Tells which part of the step runs."""

    @property
    def part(self) -> str:
        """Its name."""


@dataclass(frozen=True, kw_only=True)
class Posted:
    """One collective or message as this rank posted it."""

    axis: str
    """Axes of its group, joined by dashes."""
    collective: str
    part: str
    """Part of the step that it belongs to."""
    place: str
    """Part of the step that waits for it."""
    group: str
    """Name of its group."""
    ranks: int
    """Ranks of its group."""
    dtype: torch.dtype
    elements: int
    """S over the size of an element."""
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Elements received from and sent to each rank of an all_to_all."""
    peer: int = -1
    """Rank in the group: the other end of a message, the root of a broadcast or reduce."""

    @property
    def key(self) -> Key:
        """What a record of traffic is kept by."""
        return self.axis, self.collective, self.part

    @property
    def message_bytes(self) -> int:
        """S."""
        return self.elements * self.dtype.itemsize

    @property
    def even(self) -> bool:
        """Whether every rank of an all_to_all sends and receives as much as this one; True of all others."""
        return len({*self.splits[0], *self.splits[1]}) <= 1


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is posted while it is entered; groups of one rank or of the backend ``fake`` send nothing."""

    def __init__(self, shape: MeshShape, rank: int, marks: Marks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.posted: list[Posted] = []
        self._marks = marks
        self._axes = axes_by_ranks(shape, rank)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note ``func`` where it communicates, then run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as the operators that DTensor makes of it
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        operator = func._schema.name.partition("::")[2]
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs)
        communicates = given.keys() & {"process_group", "group_name"}
        if not communicates or operator in _WITHOUT_MESSAGE:
            return
        if operator not in _NAMES:
            raise UnsupportedCase(
                f"torch's operator {func} communicates in a way that nobody counts; leave out 'traffic'"
            )
        group = _group_of(given[communicates.pop()])
        if dist.get_backend(group).rpartition(":")[2] == "fake":
            return
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if len(ranks) == 1:
            return
        axis = self._axes.get(ranks) or f"ranks {','.join(map(str, ranks))}"
        part, place = self._part(axis)
        name, count = _NAMES[operator], len(ranks)
        elements, dtype = _elements(name, given, count)
        self.posted.append(
            Posted(
                axis=axis,
                collective=name,
                part=part,
                place=place,
                group=group.group_name,
                ranks=count,
                dtype=dtype,
                elements=elements,
                splits=_splits(given, count) if name == "all_to_all" else ((), ()),
                peer=next((int(given[key]) for key in ("dst", "src", "root_rank") if key in given), -1),
            )
        )

    def _part(self, axis: str) -> tuple[str, str]:
        """Which part a collective along ``axis`` belongs to, and which waits for it."""
        if axis == "pp":
            return PIPELINE, PIPELINE
        here, axes = self._marks.part, axis.split("-")
        if {"pp", "tp"} & set(axes):
            return here, here
        if _spreads_parameters():
            return DATA, here
        if any(name.startswith("dp") for name in axes):
            return DATA, OTHER  # DDP's reducer posts inside a part and waits at the backward's end
        return here, here


def axes_by_ranks(shape: MeshShape, rank: int) -> Mapping[tuple[int, ...], str]:
    """The axes, joined by dashes, of every group of several ranks that ``rank`` is in, by the group's ranks.

    >>> dict(axes_by_ranks(MeshShape.parse("dp2-tp2"), 1))
    {(1, 3): 'dp', (0, 1): 'tp', (0, 1, 2, 3): 'dp-tp'}
    """
    names = [name for name, size in shape.axes if size > 1]
    chosen = (axes for count in range(1, len(names) + 1) for axes in itertools.combinations(names, count))
    return {shape.group(rank, *axes): "-".join(axes) for axes in chosen}


def _spreads_parameters() -> bool:
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_SPREADS_PARAMETERS):
            return True
        frame = frame.f_back
    return False


def find_group(name: str) -> dist.ProcessGroup:
    """The process group that torch registered under this name."""
    registered: Any = dist.distributed_c10d
    group: dist.ProcessGroup = registered._resolve_process_group(name)
    return group


def _group_of(given: Any) -> dist.ProcessGroup:
    if isinstance(given, str):
        return find_group(given)
    # An operator gets torch's box around a group, one of newer torch the group itself.
    group: dist.ProcessGroup = given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)
    return group


_INPUTS = ("input_tensor", "input_tensors", "input_list", "inputs", "input", "tensors", "tensor")
_OUTPUTS = ("output_tensor", "output_tensors", "outputs", "output", "out")
_SPLIT_SIZES = (("output_split_sizes", _OUTPUTS), ("input_split_sizes", _INPUTS))


def _tensors(given: Mapping[str, Any], names: Sequence[str]) -> list[torch.Tensor]:
    """Those of the first argument among ``names`` that has any."""
    for value in (given.get(name) for name in names):
        if isinstance(value, torch.Tensor):
            return [value]
        if value:
            return [tensor for item in value for tensor in ([item] if isinstance(item, torch.Tensor) else item)]
    return []


def _elements(name: str, given: Mapping[str, Any], ranks: int) -> tuple[int, torch.dtype]:
    """Elements of S, and what they are: what all ranks gather or the root scatters, else what this rank gives."""
    inputs = _tensors(given, _INPUTS)
    if name == "scatter":  # only the root has the whole
        mine = _tensors(given, _OUTPUTS)
        return ranks * sum(tensor.numel() for tensor in mine), mine[0].dtype
    count = sum(tensor.numel() for tensor in inputs)
    return count * ranks if name in ("all_gather", "gather") else count, inputs[0].dtype


def _splits(given: Mapping[str, Any], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of an all_to_all received from and sent to each rank; rows are split, the other sizes are a row's."""
    both = []
    for sizes, names in _SPLIT_SIZES:
        rows, buffers = given.get(sizes) or (), _tensors(given, names) or _tensors(given, _INPUTS)
        if len(buffers) == ranks:  # a tensor for each rank
            both.append(tuple(buffer.numel() for buffer in buffers))
        elif rows:
            row = math.prod(buffers[0].shape[1:])
            both.append(tuple(int(count) * row for count in rows))
        else:
            both.append((buffers[0].numel() // ranks,) * ranks)
    received, sent = both
    return received, sent
