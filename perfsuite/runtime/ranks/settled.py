"""Collectives that let go of their buffers before the rank goes on, for builds whose memory is looked at.

gloo carries out a collective in a thread of its own, which holds the buffers for some microseconds (on a busy host
milliseconds) longer than the rank waits for them.  Whether the rank or that thread is the last to let go of a buffer is
then a matter of chance, and with it how long the buffer counts.  Under :class:`Settled` a collective is carried out
where it is started and gloo's hold ends there: from then on a buffer lives as long as the rank keeps it, directly or
through the handle that it was given.  That is the definition; it depends on the program alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

COLLECTIVE = "perfsuite: collective"
"""Name of the range that the profiler sees round each."""
_POSTED = ("send", "recv_", "recv_any_source_")
"""Point to point: no thread holds a buffer of theirs, and to wait for one where it is posted may be for ever."""
_PATIENCE_S = 60.0
"""A thread that has finished its work lets go as soon as it runs again."""
_LOOK_EVERY_S = 1e-4


class Settled(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    """While it is entered, collectives of this thread are over, and their buffers given back, when they return.

    Every rank must enter it, and start its collectives in the same order.  To torch.compile it is not there.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        """To torch.compile a mode of the program's own would be a reason not to compile."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every operation passes through as it is but a collective."""
        if func.namespace != "c10d" or func.overloadpacket.__name__ in _POSTED:
            return func(*args, **(kwargs or {}))
        return _settle(func, args, kwargs or {})


def _settle(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The collective, waited for; what it returns, with a handle that holds what the backend's would hold."""
    leaves, shape = tree_flatten((args, dict(kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    before = [_owners(tensor) for tensor in given]
    # The backend gets other tensors over the same storages: whether it holds them shows in the storages' owners.
    stand_ins = {id(tensor): tensor.detach() for tensor in given}
    originals = {id(stand_ins[id(tensor)]): tensor for tensor in given}
    again, named = tree_unflatten([stand_ins.get(id(leaf), leaf) for leaf in leaves], shape)
    with torch.profiler.record_function(COLLECTIVE):
        outputs, shape = tree_flatten(func(*again, **named))
        for index, output in enumerate(outputs):
            if isinstance(output, torch.ScriptObject):
                output.wait()  # type: ignore[attr-defined]  # a method of the class that it boxes
                outputs[index] = _handle(given)
            else:
                outputs[index] = originals.get(id(output), output)
        del again, named, output
        stand_ins.clear()
        _await_owners(given, before, func)
    return tree_unflatten(outputs, shape)


def _owners(tensor: torch.Tensor) -> int:
    """How many own the storage: tensors, also those of other threads."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _await_owners(given: list[torch.Tensor], before: list[int], func: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while any(_owners(tensor) > count for tensor, count in zip(given, before, strict=True)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{func} is over and its buffers are still held after {_PATIENCE_S:g} s")
        time.sleep(_LOOK_EVERY_S)


def _handle(given: list[torch.Tensor]) -> Any:
    """A finished work that holds the tensors that it worked on."""
    future: Future[list[torch.Tensor]] = Future()
    future.set_result(given)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()
