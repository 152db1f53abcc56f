"""Records the actions of torch's pipeline runtime: spans of every action, message and wait, and the failed action.

Methods of stage instances are wrapped, and can be restored.  torch's function that posts messages is replaced during
a step (:meth:`Watch.posting`), because a stage does not see the waits for its messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from perfsuite.record.workload import Rank

_COMPUTE = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_SENDS = ("get_fwd_send_ops", "get_bwd_send_ops")
_RECEIVES = ("get_fwd_recv_ops", "get_bwd_recv_ops")
_KINDS = ("forward", "backward", "backward_weight")  # Names of the spans of ``_COMPUTE``


class Watch:
    """Records the spans of one rank's stages."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._last = ("start", -1, -1)
        self._forward = (-1, -1)  # Stage and micro-batch of the last forward, which the loss belongs to
        self._receiving: tuple[int, int] | None = None
        """Stage and micro-batch of the input whose receives are posted next."""
        self._stages: list[Any] = []

    def attach(self, stages: list[Any]) -> None:
        """Wrap the methods of ``stages``."""
        self._stages = list(stages)
        for stage in stages:
            for name, kind in zip(_COMPUTE, _KINDS, strict=True):
                setattr(stage, name, self._compute(getattr(stage, name), stage.stage_index, kind))
            for name in _SENDS:
                setattr(stage, name, self._send(getattr(stage, name), stage.stage_index))
            for name in _RECEIVES:
                setattr(stage, name, self._receive(getattr(stage, name), stage.stage_index))

    def detach(self) -> None:
        """Restore the methods of the stages."""
        for stage in self._stages:
            for name in (*_COMPUTE, *_SENDS, *_RECEIVES):
                delattr(stage, name)
        self._stages = []

    def posting(self, post: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's function ``post`` with spans of receives when they are posted and during their waits.  The
        stage's method that created the operations just before names their input.
        """

        def watched(*arguments: Any, **named: Any) -> Any:
            key, self._receiving = self._receiving, None
            works = post(*arguments, **named)
            if key is None or not works:
                return works
            with self.part("receive", *key):
                pass
            # torch 2.8 and newer returns a list, older ones one object for all messages of an input.
            several = isinstance(works, list)
            awaited = _Awaited(self, key, works if several else [works])
            return [awaited] if several else awaited

        return watched

    def loss(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return ``function`` as a part of the forward before it."""

        def watched(output: Any, target: Any) -> Any:
            if not self._stages:
                return function(output, target)
            stage, micro_batch = self._forward
            with self.part("forward", stage, micro_batch):
                return function(output, target)

        return watched

    @property
    def doing(self) -> str:
        """The running or last action, for errors: ``forward of micro-batch 3 in stage 2``."""
        kind, stage, micro_batch = self._last
        return f"{kind} of micro-batch {micro_batch} in stage {stage}"

    def part(self, kind: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Return a span of the timeline."""
        self._last = (kind, stage, micro_batch)
        return self._rank.span(kind, stage=stage, micro_batch=micro_batch)

    def _compute(self, run: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        def watched(chunk: int, *arguments: Any, **named: Any) -> Any:
            if kind == "forward":
                self._forward = (stage, chunk)
            split = kind == "backward" and not named.get("full_backward", True)
            with self.part("backward_input" if split else kind, stage, chunk):
                return run(chunk, *arguments, **named)

        return watched

    def _send(self, operations: Callable[[int], list[Any]], stage: int) -> Callable[[int], list[Any]]:
        """Record a send when torch asks for its operations: torch posts them at once."""

        def watched(chunk: int) -> list[Any]:
            posted = operations(chunk)
            if posted:
                with self.part("send", stage, chunk):
                    pass
            return posted

        return watched

    def _receive(self, operations: Callable[[int], list[Any]], stage: int) -> Callable[[int], list[Any]]:
        def watched(chunk: int) -> list[Any]:
            self._receiving = (stage, chunk)
            return operations(chunk)

        return watched


class _Awaited:
    """Wraps the messages of one input, with a span of the wait."""

    def __init__(self, watch: Watch, key: tuple[int, int], works: list[Any]) -> None:
        self._watch, self._key, self._works = watch, key, works

    def wait(self) -> None:
        """Wait for all messages."""
        with self._watch.part("wait", *self._key):
            for work in self._works:
                work.wait()
