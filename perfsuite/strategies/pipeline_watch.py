"""Tells what torch's pipeline runtime does while it does it: spans of every action, message and wait, and who failed.

Everything is wrapped on the instances of one pipeline, nothing in torch's modules, and can be taken off again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from perfsuite.workload import Rank

_STAGE_METHODS = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "get_fwd_send_ops",
    "get_bwd_send_ops",
)
_RECEIVES = ("fwd_recv_ops", "bwd_recv_ops")


class Watch:
    """Spans of one rank's stages."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.doing = ""
        """What runs or ran last, for errors: ``forward of micro-batch 3 in stage 2``."""
        self._forward = (-1, -1)
        self._stages: list[Any] = []
        self._runtime: Any = None

    # -- putting it on and taking it off -------------------------------------------------------------------------

    def attach(self, stages: list[Any], runtime: Any) -> None:
        """Watch ``stages`` and what ``runtime`` waits for."""
        self._stages, self._runtime = stages, runtime
        for stage in stages:
            index = stage.stage_index
            stage.forward_one_chunk = self._compute(stage.forward_one_chunk, index, "forward")
            stage.backward_one_chunk = self._compute(stage.backward_one_chunk, index, "backward")
            stage.backward_weight_one_chunk = self._compute(stage.backward_weight_one_chunk, index, "backward_weight")
            stage.get_fwd_send_ops = self._post(stage.get_fwd_send_ops, index)
            stage.get_bwd_send_ops = self._post(stage.get_bwd_send_ops, index)
        for name in _RECEIVES:
            setattr(runtime, name, _Receives(self, getattr(runtime, name)))

    def detach(self) -> None:
        """Leave stages and runtime as torch made them."""
        for stage in self._stages:
            for name in _STAGE_METHODS:
                delattr(stage, name)
        for name in _RECEIVES:
            setattr(self._runtime, name, dict(getattr(self._runtime, name)))
        self._stages, self._runtime = [], None

    def loss(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """``function`` as a part of the forward that it follows."""

        def watched(output: Any, target: Any) -> Any:
            if not self._stages:
                return function(output, target)
            stage, micro_batch = self._forward
            with self.part("forward", stage, micro_batch):
                return function(output, target)

        return watched

    # -- what is noted -------------------------------------------------------------------------------------------

    @contextmanager
    def part(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """A span of the timeline."""
        self.doing = f"{kind} of micro-batch {micro_batch} in stage {stage}"
        with self._rank.span(kind, stage=stage, micro_batch=micro_batch):
            yield

    def _compute(self, run: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        def watched(chunk: int, *arguments: Any, **named: Any) -> Any:
            if kind == "forward":
                self._forward = (stage, chunk)
            split = kind == "backward" and not named.get("full_backward", True)
            with self.part("backward_input" if split else kind, stage, chunk):
                return run(chunk, *arguments, **named)

        return watched

    def _post(self, operations: Callable[[int], list[Any]], stage: int) -> Callable[[int], list[Any]]:
        """torch posts what it gets here at once."""

        def watched(chunk: int) -> list[Any]:
            posted = operations(chunk)
            if posted:
                with self.part("send", stage, chunk):
                    pass
            return posted

        return watched


class _Receives(dict[tuple[int, int], Any]):
    """What the runtime has posted to receive, by stage and micro-batch; taking it out and waiting for it is a span."""

    def __init__(self, watch: Watch, posted: dict[tuple[int, int], Any]) -> None:
        super().__init__(posted)
        self._watch = watch

    def __setitem__(self, key: tuple[int, int], works: Any) -> None:
        with self._watch.part("receive", *key):
            pass
        awaited = _Awaited(self._watch, key, works if isinstance(works, list) else [works])
        super().__setitem__(key, [awaited] if isinstance(works, list) else awaited)


class _Awaited:
    """Stands in for the messages of one input."""

    def __init__(self, watch: Watch, key: tuple[int, int], works: list[Any]) -> None:
        self._watch, self._key, self._works = watch, key, works

    def wait(self) -> None:
        """Wait for all of them."""
        with self._watch.part("wait", *self._key):
            for work in self._works:
                work.wait()
