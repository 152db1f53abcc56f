"""Seconds by resource of what one rank does for one micro-batch: a block, the ends of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from perfsuite.projection.communication import Links, Message
from perfsuite.projection.kernels import KernelTimes
from perfsuite.projection.layout import Group
from perfsuite.projection.operations import Attention, Matmul, Operation, Passes, Traffic


class Seconds(NamedTuple):
    """By resource."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0

    @property
    def total(self) -> float:
        """All."""
        return self[0] + self[1] + self[2] + self[3] + self[4]

    @property
    def work(self) -> float:
        """What the device computes and moves itself."""
        return self[0] + self[1] + self[2]

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """With ``other``, so many times."""
        a, b, c, d, e = other
        return Seconds(
            self[0] + times * a, self[1] + times * b, self[2] + times * c, self[3] + times * d, self[4] + times * e
        )

    def waiting(self, message: Message, seconds: float) -> Seconds:
        """With ``seconds`` of a message that nothing hides."""
        share = seconds / message.seconds if message.seconds else 0.0
        return self._replace(link=self.link + share * message.link_s, network=self.network + share * message.network_s)


NONE = Seconds()


class Priced(NamedTuple):
    """Seconds of one micro-batch in one part of the model."""

    forward: Seconds = NONE
    backward_input: Seconds = NONE
    backward_weight: Seconds = NONE
    kernels: float = 0.0
    """That the host starts."""

    @property
    def backward_s(self) -> float:
        """Both halves."""
        return self.backward_input.total + self.backward_weight.total

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward.total + self.backward_s

    def plus(self, other: Priced, times: float = 1.0) -> Priced:
        """With ``other``, so many times."""
        return Priced(
            self.forward.plus(other.forward, times),
            self.backward_input.plus(other.backward_input, times),
            self.backward_weight.plus(other.backward_weight, times),
            self.kernels + times * other.kernels,
        )


@dataclass(kw_only=True)
class Prices:
    """What operations cost on one device among its neighbours."""

    times: KernelTimes
    links: Links
    groups: dict[str, Group]
    wide: bool = False
    """Products in 16 bit whatever the dtype of the blocks."""
    traffic_ratio: float = 1.0
    """What elementwise kernels were seen to move over what is counted."""
    ratio: float = 1.0
    """A block's time in steady state over the sum of its kernels."""

    def passes(self, part: Passes) -> Priced:
        """A part of the model; what is computed again comes before the gradients."""
        again = self._sum(part.recompute)
        everything = (*part.forward, *part.backward_input, *part.backward_weight, *part.recompute)
        return Priced(
            self._sum(part.forward),
            again.plus(self._sum(part.backward_input)),
            self._sum(part.backward_weight),
            sum(operation.kernels if isinstance(operation, Traffic) else 1.0 for operation in everything),
        )

    def _sum(self, operations: Iterable[Operation]) -> Seconds:
        """Messages hide one after the other: a ring behind attention, tensor parallelism's behind products."""
        matmul = attention = memory = 0.0
        messages = []
        for operation in operations:
            if isinstance(operation, Matmul):
                matmul += self.times.matmul(operation, wide=self.wide)
            elif isinstance(operation, Attention):
                attention += self.times.attention(operation)
            elif isinstance(operation, Traffic):
                memory += self.times.traffic(operation, self.traffic_ratio)
            else:
                messages.append(operation)
        work = Seconds(matmul * self.ratio, attention * self.ratio, memory * self.ratio)
        free = {"attention": work.attention, "matmul": work.matmul}
        for operation in messages:
            behind = "attention" if operation.collective == "ring" else "matmul"
            message = self.links.seconds(operation.collective, operation.message_bytes, self.groups.get(operation.axis))
            hidden = operation.overlap * min(message.seconds, free[behind])
            free[behind] = max(0.0, free[behind] - message.seconds)
            work = work.waiting(message, message.seconds - hidden)
        return work
