"""Real gloo ranks that run a collective on random inputs and compare it with NumPy.

Driven by test_collectives_reference: ``python -m test_correctness.helpers.reference_ranks N`` forks N ranks once.
Each line on stdin is a command (JSON), each line on stdout the list of the answers of the ranks that took part; the
end of stdin ends them all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from perfsuite.base.errors import WrongResult
from perfsuite.workloads import collective
from perfsuite.workloads.collective_base import Collective, CollectiveStep
from test_correctness.helpers.bare_rank import BareRank


def reference(name: str, inputs: list[np.ndarray], rank: int, count: int) -> np.ndarray | None:
    """What ``rank`` must hold afterwards, by the books, when S is ``count`` elements; None where it is not defined."""
    ranks = len(inputs)
    if (rank and name in ("Reduce", "Gather")) or (name == "OneDirection" and rank < ranks // 2):
        return None
    shares = np.floor(count // ranks * np.arange(1, ranks + 1) / ranks).astype(int)
    books: dict[str, Callable[[], np.ndarray]] = {
        "AllReduce": lambda: np.sum(inputs, axis=0),
        "AllGather": lambda: np.concatenate(inputs),
        "ReduceScatter": lambda: np.split(np.sum(inputs, axis=0), ranks)[rank],
        "AllToAll": lambda: np.concatenate([np.split(sent, ranks)[rank] for sent in inputs]),
        "AllToAllUneven": lambda: np.concatenate([np.split(sent, np.cumsum(shares)[:-1])[rank] for sent in inputs]),
        "Broadcast": lambda: inputs[0],
        "Reduce": lambda: np.sum(inputs, axis=0),
        "Gather": lambda: np.concatenate(inputs),
        "Scatter": lambda: np.split(inputs[0], ranks)[rank],
        "SendRecv": lambda: (inputs[ranks // 2 :] + inputs[: ranks // 2])[rank],
        "RingShift": lambda: inputs[rank - 1],
        "OneDirection": lambda: inputs[rank - ranks // 2],
    }
    return books[name]()


class Member:
    """One rank: answers commands."""

    def __init__(self, index: int, groups: dict[int, dist.ProcessGroup]) -> None:
        self._index = index
        self._groups = groups

    def answer(self, command: dict[str, Any]) -> str | None:
        """Empty when all is well, a message when not, None when this rank has no part in it."""
        ranks = command["ranks"]
        if self._index >= ranks:
            return None
        workload_class = getattr(collective, command["op"])
        rank = BareRank(rank=self._index, world_size=ranks, group=self._groups[ranks])
        if workload_class is collective.Barrier:
            return self._barrier(rank, command)
        workload = workload_class(message_bytes=command["message_bytes"], dtype=command["dtype"])
        step = workload.build(rank)
        try:
            if "damage" in command:
                return self._damaged(workload, step, rank, command)
            return self._compared(workload, step, rank, command["seed"]) or self._checked(workload, step, rank)
        finally:
            step.close()

    def _compared(self, workload: Collective, step: CollectiveStep, rank: BareRank, seed: int) -> str:
        """Random inputs against NumPy; sums of at most 5 values in [0, 12] are exact in every dtype."""
        inputs = []
        for each in range(rank.world_size):
            elements = workload.extents(step.count, rank.world_size, each)[0]
            inputs.append(np.random.default_rng([seed, each]).integers(0, 13, elements))
        step.refill()
        step.end.source.copy_(torch.from_numpy(inputs[rank.rank]))
        step.run()
        expected = reference(type(workload).__name__, inputs, rank.rank, step.count)
        got = step.end.target.to(torch.float64).numpy()
        if expected is None or np.array_equal(expected, got):
            return ""
        return f"rank {rank.rank}: NumPy has {expected[:8]}, the collective {got[:8]}"

    def _checked(self, workload: Collective, step: CollectiveStep, rank: BareRank) -> str:
        """The workload's own check on its own inputs, twice: a step is checked before and after it is timed."""
        for _ in range(2):
            step.run()
            step.refill()
            step.run()
            workload.check(rank, step)
        covered = sum(length for _, _, length in workload.expected(step.count, rank.world_size, rank.rank))
        if covered not in (0, step.end.target.numel()):
            return f"the check covers {covered} of {step.end.target.numel()} elements"
        return ""

    def _damaged(self, workload: Collective, step: CollectiveStep, rank: BareRank, command: dict[str, Any]) -> str:
        """What the check says of a damaged result; empty when it does not notice."""
        step.refill()
        if command["damage"] != "not run":
            step.run()
        if rank.rank == command["victim"]:
            damage(step, command["damage"], random.Random(command["seed"]))
        try:
            workload.check(rank, step)
        except WrongResult as error:
            return str(error)
        return ""

    def _barrier(self, rank: BareRank, command: dict[str, Any]) -> str:
        workload = collective.Barrier()
        step = workload.build(rank)
        if "damage" in command:
            step = collective.CallableStep(lambda: None)
        try:
            workload.check(rank, step)
        except WrongResult as error:
            return str(error)
        return ""


def damage(step: CollectiveStep, kind: str, rng: random.Random) -> None:
    """Change the output as a broken collective would."""
    output = step.end.target
    match kind:
        case "element":
            index = rng.randrange(output.numel())
            output[index] = output[index] + 1
        case "not a number":
            output[rng.randrange(output.numel())] = float("nan")
        case "shifted":
            output.copy_(output.roll(1))
        case "halves swapped":
            output.copy_(output.roll(output.numel() // 2))
        case "maximum instead of sum":
            own = [step.pattern.values(rank=each) for each in range(step.end.ranks)]
            top = torch.tensor([max(values) for values in zip(*own, strict=True)], dtype=output.dtype)
            output.copy_(top.repeat(output.numel() // len(top) + 1)[: output.numel()])
        case "wider dtype":
            step.end = dataclasses.replace(step.end, target=output.to(torch.complex64))
        case _:
            assert kind == "not run", kind


def serve(index: int, ranks: int, store: str, commands: int, answers: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=index, world_size=ranks, timeout=timedelta(seconds=30)
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(2, ranks + 1)}
    member = Member(index, groups)
    with os.fdopen(commands) as incoming, os.fdopen(answers, "w") as outgoing:
        for line in incoming:
            try:
                text = member.answer(json.loads(line))
            except Exception as error:  # whatever it is, the test shall see it instead of waiting
                text = f"rank {index}: {type(error).__name__}: {error}"
            print(json.dumps(text), file=outgoing, flush=True)
    dist.destroy_process_group()


def main(ranks: int) -> None:
    pipes = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(ranks):
            (command_read, command_write), (answer_read, answer_write) = os.pipe(), os.pipe()
            if os.fork() == 0:
                for earlier, answers in pipes:  # else the siblings' pipes never end
                    earlier.close()
                    answers.close()
                os.close(command_write)
                os.close(answer_read)
                os.close(0)
                serve(index, ranks, f"{folder}/store", command_read, answer_write)
                os._exit(0)
            os.close(command_read)
            os.close(answer_write)
            pipes.append((os.fdopen(command_write, "w"), os.fdopen(answer_read)))
        for line in sys.stdin:
            for commands, _ in pipes:
                commands.write(line)
                commands.flush()
            replies = [json.loads(answers.readline() or '"the rank died"') for _, answers in pipes]
            print(json.dumps([reply for reply in replies if reply is not None]), flush=True)
        for commands, _ in pipes:
            commands.close()
        for _ in pipes:
            os.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
