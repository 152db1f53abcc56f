"""What sharing out parameters takes: each block is gathered before its passes, its gradient scattered after them.

A gather hides behind the block before, a scatter behind the backward of the block that follows.  Nothing is before the
first block but the embedding, whose own parameters everything waits for, and nothing follows the embedding's scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perfsuite.projection.communication import Links, Message
from perfsuite.projection.layout import Group, Layout
from perfsuite.projection.pricing import NONE, Priced, Seconds
from perfsuite.projection.traffic import Implementation


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A block with what it waits for."""

    block: Priced
    gather: Message
    scatter: Message
    """Of one micro-batch, with the sum over copies of what is sharded."""
    gather_waits_s: float
    """That one pass does not hide."""
    scatter_waits_s: float


@dataclass(frozen=True, kw_only=True)
class ShardedPrices:
    """Prices the messages of sharded parameters and gradients of one layout."""

    code: Implementation
    links: Links
    layout: Layout
    groups: dict[str, Group]
    second_per_byte: float
    exposed: Callable[[Message, float, Layout], float]
    """(message, seconds of work, layout) -> seconds of the message that the work does not hide."""

    @property
    def group(self) -> Group:
        """Ranks that share parameters out."""
        return self.groups.get("dp_shard") or self.groups["data"]

    def block(self, block: Priced, parameters: float, *, experts: bool = False) -> Gathered:
        """A block of so many parameters on one rank: gathered twice; scattered here where every micro-batch is.

        Where the host waits for routes, most of a block is over when the next one's gather begins.
        """
        code = self.code
        gather, scatter = self._messages(parameters)
        backward = self._moving(block.backward_input, parameters * code.sharded_bytes)
        behind_s = backward.total + block.backward_weight.total
        gather_waits_s = self.exposed(gather, behind_s, self.layout)
        both = _together(gather, scatter)
        waits_s = self.exposed(both, behind_s, self.layout)
        hides_s = 0.0 if experts and code.waits_for_routes else block.forward.total
        forward_waits_s = self.exposed(gather, hides_s, self.layout)
        ends = backward.waiting(gather, gather_waits_s) if code.scattered_bytes else backward.waiting(both, waits_s)
        return Gathered(
            block=block._replace(forward=block.forward.waiting(gather, forward_waits_s), backward_input=ends),
            gather=gather,
            scatter=scatter,
            gather_waits_s=forward_waits_s,
            scatter_waits_s=max(0.0, waits_s - gather_waits_s),
        )

    def ends(self, nearest: Gathered, embedding: Priced, parameters: float) -> Priced:
        """What a stage waits for besides, each micro-batch: its ends, of so many parameters, and its first block."""
        gather, _ = self._messages(parameters)
        moved = parameters * self.code.sharded_bytes / 2  # gathered once
        copied_s = moved * self.second_per_byte
        first_s = self.exposed(nearest.gather, embedding.forward.total + copied_s, self.layout)
        forward = self._moving(NONE, moved * (1 + 1 / self.group.ranks)).waiting(gather, gather.seconds)
        forward = forward.waiting(nearest.gather, max(0.0, first_s - nearest.gather_waits_s))
        backward = NONE if self.code.scattered_bytes else self._last(nearest, embedding, parameters)
        return Priced(forward=forward, backward_input=backward)

    def scattered(self, nearest: Gathered, embedding: Priced, parameters: float, blocks: float, each: float) -> Seconds:
        """Once a step, where the last micro-batch alone scatters: blocks of ``each`` parameters, and the ends."""
        moved = (parameters + blocks * each) * self.code.scattered_bytes
        every = self._moving(NONE, moved).waiting(nearest.scatter, blocks * nearest.scatter_waits_s)
        return every.plus(self._last(nearest, embedding, parameters))

    def _last(self, nearest: Gathered, embedding: Priced, parameters: float) -> Seconds:
        """Behind the first block's scatter is the embedding's backward alone, behind that of the ends nothing."""
        _, scatter = self._messages(parameters)
        last_s = self.exposed(nearest.scatter, embedding.backward_s, self.layout)
        waits = NONE.waiting(nearest.scatter, max(0.0, last_s - nearest.scatter_waits_s))
        return waits.waiting(scatter, scatter.seconds)

    def _messages(self, parameters: float) -> tuple[Message, Message]:
        gather = self.links.seconds("all_gather", parameters * self.code.compute_bytes, self.group)
        gradients = parameters * self.code.gradient_bytes
        scatter = self.links.seconds("reduce_scatter", gradients, self.group)
        if self.layout.shape.size("dp_replicate") > 1:
            rest = self.links.seconds("all_reduce", gradients / self.group.ranks, self.groups["dp_replicate"])
            scatter = _together(scatter, rest)
        return gather, scatter

    def _moving(self, seconds: Seconds, moved_bytes: float) -> Seconds:
        return seconds._replace(memory=seconds.memory + moved_bytes * self.second_per_byte)


def _together(first: Message, second: Message) -> Message:
    return Message(first.link_s + second.link_s, first.network_s + second.network_s)
