"""Counts the collectives and messages of a step, of this thread and its backward, by axis and part; replays them.

A mode of torch's dispatcher sees them below autograd and below DTensor, from any source: a strategy, DTensor, DDP's
reducer, FSDP2.  Sizes are nccl-tests' S; the group's ranks give the axes of the mesh.

The replay posts each counted collective again on its group, with buffers of its size and without computation.  Ranks of
a group posted the same collectives in the same order, so their replays match.  The sizes of an uneven all_to_all depend
on the data, so these are replayed one by one.  Messages are replayed in both directions at once.

Imported on ranks only.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite.base.collectives import receives_first
from perfsuite.base.errors import UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.platforms.base import Clock
from perfsuite.strategies.traffic import DATA, OTHER, PIPELINE, make_call

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
_NAMES: Mapping[str, str] = {operator: name for name, all_ in _OPERATORS.items() for operator in all_.split()}
"""nccl-tests' names of torch's operators in ``c10d`` and ``_c10d_functional``."""
_WITHOUT_MESSAGE = ("barrier", "monitored_barrier_")
_SPREADS_PARAMETERS = ("torch.distributed.fsdp.", "torch.distributed._composable.")
"""Modules of torch that gather parameters and reduce gradients, along any axes."""


Key = tuple[str, str, str]  # Axis, collective and part


@dataclass(frozen=True, kw_only=True)
class Posted:
    """One collective or message as this rank posted it."""

    axis: str  # Axes of its group, joined by dashes
    collective: str
    part: str  # Part of the step that it belongs to
    place: str  # Part of the step that waits for it
    group: str
    ranks: int
    dtype: torch.dtype
    elements: int  # Size S in elements
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Elements received from and sent to each rank of an all_to_all."""
    peer: int = -1  # Rank in the group: the peer of a message, the root of a broadcast or reduce

    @property
    def key(self) -> Key:
        """Key of its record of traffic."""
        return self.axis, self.collective, self.part

    @property
    def message_bytes(self) -> int:
        """Size S in bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def even(self) -> bool:
        """Whether every rank of an all_to_all sends and receives as much as this one; True for others."""
        return len({*self.splits[0], *self.splits[1]}) <= 1


class Counting(TorchDispatchMode):
    """Counts collectives while it is entered; groups of one rank or of the backend ``fake`` send nothing."""

    def __init__(self, shape: MeshShape, rank: int, part: Callable[[], str] = lambda: OTHER) -> None:
        """``part`` returns the name of the part of the step that runs."""
        super().__init__()
        self.posted: list[Posted] = []
        self._running = part
        self._axes = axes_by_ranks(shape, rank)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count ``func`` if it communicates, then run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls back with its local operators
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        operator = func._schema.name.partition("::")[2]
        arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        arguments.update(kwargs)
        communicates = arguments.keys() & {"process_group", "group_name"}
        if not communicates or operator in _WITHOUT_MESSAGE:
            return
        if operator not in _NAMES:
            raise UnsupportedCase(
                f"torch's operator {func} communicates in a way that cannot be counted; leave out 'traffic'"
            )
        value = arguments[communicates.pop()]  # torch's box around a group; in newer torch the group or its name
        if isinstance(value, str):
            group = find_group(value)
        else:
            group = value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)
        if dist.get_backend(group).rpartition(":")[2] == "fake":
            return
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if len(ranks) == 1:
            return
        axis = self._axes.get(ranks) or f"ranks {','.join(map(str, ranks))}"
        part, place = self._part(axis)
        name, count = _NAMES[operator], len(ranks)
        elements, dtype = _elements(name, arguments, count)
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
                splits=_splits(arguments, count) if name == "all_to_all" else ((), ()),
                peer=next((int(arguments[key]) for key in ("dst", "src", "root_rank") if key in arguments), -1),
            )
        )

    def _part(self, axis: str) -> tuple[str, str]:
        """Return the part that a collective along ``axis`` belongs to, and the part that waits for it."""
        if axis == "pp":
            return PIPELINE, PIPELINE
        here, axes = self._running(), axis.split("-")
        if {"pp", "tp"} & set(axes):
            return here, here
        if _spreads_parameters():
            return DATA, here
        if any(name.startswith("dp") for name in axes):
            return DATA, OTHER  # DDP's reducer posts inside a part and waits at the end of the backward
        return here, here


def axes_by_ranks(shape: MeshShape, rank: int) -> Mapping[tuple[int, ...], str]:
    """Return the axes, joined by dashes, of every group of several ranks with ``rank``, by the group's ranks.

    >>> dict(axes_by_ranks(MeshShape.parse("dp2-tp2"), 1))
    {(1, 3): 'dp', (0, 1): 'tp', (0, 1, 2, 3): 'dp-tp'}
    """
    names = [name for name, size in shape.axes if size > 1]
    chosen = (axes for count in range(1, len(names) + 1) for axes in itertools.combinations(names, count))
    return {shape.group(rank, *axes): "-".join(axes) for axes in chosen}


def _spreads_parameters() -> bool:
    frames = traceback.walk_stack(sys._getframe(3))
    return any(frame.f_globals.get("__name__", "").startswith(_SPREADS_PARAMETERS) for frame, _ in frames)


def find_group(name: str) -> dist.ProcessGroup:
    """Return the process group that torch registered under this name."""
    registered: Any = dist.distributed_c10d
    return registered._resolve_process_group(name)


_INPUTS = ("input_tensor", "input_tensors", "input_list", "inputs", "input", "tensors", "tensor")
_OUTPUTS = ("output_tensor", "output_tensors", "outputs", "output", "out")
_SPLIT_SIZES = (("output_split_sizes", _OUTPUTS), ("input_split_sizes", _INPUTS))


def _tensors(arguments: Mapping[str, Any], names: Sequence[str]) -> list[torch.Tensor]:
    """Return the tensors of the first non-empty argument among ``names``."""
    for value in (arguments.get(name) for name in names):
        if isinstance(value, torch.Tensor):
            return [value]
        if value:
            return [tensor for item in value for tensor in ([item] if isinstance(item, torch.Tensor) else item)]
    return []


def _elements(name: str, arguments: Mapping[str, Any], ranks: int) -> tuple[int, torch.dtype]:
    """Return the elements of S and their dtype: those that all ranks gather or the root scatters, else this rank's."""
    inputs = _tensors(arguments, _INPUTS)
    if name == "scatter":  # only the root has all of it
        outputs = _tensors(arguments, _OUTPUTS)
        return ranks * sum(tensor.numel() for tensor in outputs), outputs[0].dtype
    count = sum(tensor.numel() for tensor in inputs)
    return count * ranks if name in ("all_gather", "gather") else count, inputs[0].dtype


def _splits(arguments: Mapping[str, Any], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements of an all_to_all received from and sent to each rank; the first dimension is split."""
    both = []
    for sizes, names in _SPLIT_SIZES:
        rows, buffers = arguments.get(sizes) or (), _tensors(arguments, names) or _tensors(arguments, _INPUTS)
        if len(buffers) == ranks:  # one tensor per rank
            both.append(tuple(buffer.numel() for buffer in buffers))
        elif rows:
            row = math.prod(buffers[0].shape[1:])
            both.append(tuple(int(count) * row for count in rows))
        else:
            both.append((buffers[0].numel() // ranks,) * ranks)
    received, sent = both
    return received, sent


_BACK_TO_BACK = 5  # Calls between two readings of the clock
_ROUNDS = 3  # Repeats, of which the median counts
MESSAGES = ("send", "receive")


class TrafficReplay:
    """Replays the collectives of one rank's step."""

    def __init__(self, device: torch.device, clock: Clock, uneven: frozenset[Key]) -> None:
        """``uneven``: collectives that some rank of the world posted with unequal splits."""
        self._device = device
        self._clock = clock
        self._uneven = uneven

    def seconds(self, posted: Sequence[Posted]) -> Mapping[Posted, float]:
        """Return the seconds of one call of each collective; all ranks of a group replay the same ones.  A sent and a
        received message go at once: the time counts for the sent one, or for the received one on a rank that sends none
        of that size.
        """
        posted_s: dict[Posted, float] = {}
        for axis in sorted({post.axis for post in posted}):
            along = [post for post in posted if post.axis == axis]
            posted_s.update(self._collectives([post for post in along if post.collective not in MESSAGES]))
            posted_s.update(self._messages([post for post in along if post.collective in MESSAGES]))
        return posted_s

    def _collectives(self, posted: Sequence[Posted]) -> Mapping[Posted, float]:
        samples: dict[Posted, list[float]] = {}
        for post in posted:
            if post in samples and post.key not in self._uneven:
                continue
            call = self._call(post)
            if post.key in self._uneven:
                call()
                samples.setdefault(post, []).append(self._round(call))
            else:
                samples[post] = [self._time(call)]
        return {post: statistics.fmean(times) for post, times in samples.items()}

    def _time(self, call: Callable[[], object]) -> float:
        call()  # the other ranks have arrived
        return statistics.median(self._round(call) for _ in range(_ROUNDS))

    def _round(self, call: Callable[[], object]) -> float:
        start = self._clock.stamp()
        for _ in range(_BACK_TO_BACK):
            call()
        end = self._clock.stamp()
        self._clock.wait(end)
        return self._clock.elapsed_s(start, end) / _BACK_TO_BACK

    def _call(self, posted: Posted) -> Callable[[], object]:
        group = find_group(posted.group)
        whole, part = self._buffer(posted, posted.elements), self._buffer(posted, posted.elements // posted.ranks)
        name, root = posted.collective, dist.get_global_rank(group, max(posted.peer, 0))
        source = part if name in ("all_gather", "gather") else whole
        target = part if name in ("reduce_scatter", "scatter") else whole
        if name == "all_to_all":
            target = self._buffer(posted, sum(posted.splits[0]))
        return make_call(dist, name, source, target, group, root=root, splits=posted.splits)

    def _buffer(self, posted: Posted, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=posted.dtype, device=self._device)

    def _messages(self, posted: Sequence[Posted]) -> Mapping[Posted, float]:
        """Exchange all messages of one size at once, one per direction and peer."""
        posted_s: dict[Posted, float] = {}
        sizes = sorted({(post.message_bytes, str(post.dtype)) for post in posted})
        for size in sizes:
            same = list(dict.fromkeys(post for post in posted if (post.message_bytes, str(post.dtype)) == size))
            pairs = list({(post.collective, post.peer): post for post in same}.values())
            time_s = self._time(self._exchange(pairs))
            sent = [post for post in same if post.collective == "send"] or same
            posted_s.update(dict.fromkeys(same, 0.0))
            posted_s.update(dict.fromkeys(sent, time_s / len({post.peer for post in sent})))
        return posted_s

    def _exchange(self, posted: Sequence[Posted]) -> Callable[[], object]:
        group = find_group(posted[0].group)
        buffers = [self._buffer(post, post.elements) for post in posted]
        peers = [dist.get_global_rank(group, post.peer) for post in posted]
        own_rank = dist.get_rank()

        def order(index: int) -> tuple[int, bool]:
            receives = posted[index].collective == "receive"
            return peers[index], receives != receives_first(self._device.type, own_rank, peers[index])

        ways = {"send": dist.isend, "receive": dist.irecv}
        operations = [
            dist.P2POp(ways[posted[index].collective], buffers[index], peers[index], group)
            for index in sorted(range(len(posted)), key=order)
        ]

        def exchange() -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return exchange
