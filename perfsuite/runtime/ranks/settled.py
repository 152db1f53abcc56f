"""Collectives that release their buffers before the rank goes on, for builds whose memory is measured.

gloo executes a collective in a thread of its own, which holds the buffers for some microseconds (on a busy host
milliseconds) after the rank's wait. So chance decides which of the two frees a buffer, and when. Under :class:`Settled`
a collective runs at the call, and gloo's hold ends there. From then on a buffer lives as long as the rank keeps it,
directly or through its handle: the measured memory depends on the program alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

COLLECTIVE = "perfsuite: collective"  # Name of the profiler's range around each.
_POSTED = ("send", "recv_", "recv_any_source_")  # Point-to-point: a wait at the call could block for ever.
_PATIENCE_S = 60.0  # Time limit for a thread that has finished its work to release buffers.
_LOOK_EVERY_S = 1e-4


class Settled(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    """While entered, a collective returns after its end, with its buffers released; all ranks must enter it alike."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile would not compile under a mode of the program."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pass every operation on, and complete collectives."""
        if func.namespace != "c10d" or func.overloadpacket.__name__ in _POSTED:
            return func(*args, **(kwargs or {}))
        return _settle(func, args, kwargs or {})


def _settle(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of the finished collective, with handles that keep its tensors alive like the backend's."""
    leaves, shape = tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    before = [_owners(tensor) for tensor in tensors]
    # The backend gets other tensors over the same storages: the storages' owner counts show whether it holds them.
    stand_ins = {id(tensor): tensor.detach() for tensor in tensors}
    originals = {id(stand_ins[id(tensor)]): tensor for tensor in tensors}
    again, named = tree_unflatten([stand_ins.get(id(leaf), leaf) for leaf in leaves], shape)
    with torch.profiler.record_function(COLLECTIVE):
        outputs, shape = tree_flatten(func(*again, **named))
        for index, output in enumerate(outputs):
            if isinstance(output, torch.ScriptObject):
                output.wait()  # type: ignore[attr-defined]  # a method of the class that it boxes
                outputs[index] = _handle(tensors)
            else:
                outputs[index] = originals.get(id(output), output)
        del again, named, output
        stand_ins.clear()
        _await_owners(tensors, before, func)
    return tree_unflatten(outputs, shape)


def _owners(tensor: torch.Tensor) -> int:
    """Return the number of owners of the storage: tensors, also those of other threads."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _await_owners(tensors: list[torch.Tensor], before: list[int], func: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while any(_owners(tensor) > count for tensor, count in zip(tensors, before, strict=True)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{func} has finished, but its buffers are still held after {_PATIENCE_S:g} s")
        time.sleep(_LOOK_EVERY_S)


def _handle(tensors: list[torch.Tensor]) -> Any:
    future: Future[list[torch.Tensor]] = Future()
    future.set_result(tensors)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()
