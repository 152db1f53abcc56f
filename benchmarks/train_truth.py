"""Accuracy of the suite on training steps, against bare loops in the same ranks, set times and counted bytes.

    python benchmarks/train_truth.py [--pairs 20] [--device cpu] [--model gpt2-tiny] [--ranks 2]
    python benchmarks/train_truth.py --memory-runs 20 [--busy 2]

Prints: the step's time by the suite over a hand-written loop of the same model and strategy, with a 95 % interval over
interleaved pairs; the remainder of a step whose parts sleep; the reported time of a sleep that is injected into one
rank's forward; and the difference between every memory figure and the allocated bytes.  With --memory-runs it prints
instead how many different memory figures each strategy gave in so many runs, while --busy loops ran.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_budget import busy
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import MIB
from perfsuite.models import find
from perfsuite.platforms import families
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.statistics.robust import ratio_interval
from perfsuite.workloads.training.memory import MemoryStep
from perfsuite.workloads.training.train_step import TrainStep

BUDGET = Budget(min_rounds=10, max_time_s=0.2, warmup_time_s=0.1)
ONCE = Budget(min_rounds=1, max_rounds=1, warmup_min_iterations=1, warmup_time_s=0.0)
SMOKE = Budget(smoke=True)
TURNS = 4
"""Turns of both arms in one ratio.  It compares medians, because the speed of the host changes within a second."""
PARTS_S = {"data": 0.005, "forward": 0.04, "backward": 0.08, "optimizer": 0.02}
"""Seconds that each part of an emulated step sleeps."""
HELD_BYTES = 8 * MIB
"""Bytes that a forward keeps for its backward beside its own."""


@dataclass(frozen=True, kw_only=True)
class Again(TrainStep):
    """A training step whose twin was checked before."""

    def twin(self):
        return None


# -- on the ranks ------------------------------------------------------------------------------------------------


def bare(rank, model="gpt2-tiny", micro_batch_size=4, rounds=10):
    """The training loop as one writes it by hand: same values, same batches, same wrapper; median of the worst rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from perfsuite.models.build import build
    from perfsuite.models.layers import materialize
    from perfsuite.models.loading import synthetic_batch

    config = find(model)
    with torch.device("meta"):
        module = build(config)
    materialize(module, rank.device, seed=0)
    if rank.world_size > 1:
        module = DistributedDataParallel(module, bucket_cap_mb=25.0, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    first = [micro_batch_size * (rank.rank + rank.world_size * index) for index in range(4)]
    batches = [
        {name: x.to(rank.device) for name, x in synthetic_batch(config, list(range(n, n + micro_batch_size))).items()}
        for n in first
    ]
    wait = torch.cuda.synchronize if rank.device.type == "cuda" else (lambda: None)

    def step(number):
        loss = module(**batches[number % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def loop():
        for number in range(3):
            step(number)
        times = []
        for number in range(rounds):
            wait()
            start = time.perf_counter()
            step(number)
            wait()
            worst = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=rank.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            times.append(float(worst))
        rank.record("bare_s", statistics.median(times))

    return loop


def emulated(rank, parts_s, late=-1, delay_s=0.0):
    """The suite's own step around parts that only sleep; one rank's forward may sleep longer."""
    import torch

    step = TrainStep(model="gpt2-micro", strategy="ddp").build(rank)
    loss = torch.zeros((), device=rank.device)
    batch = next(step.batches)

    class Batches:
        def __next__(self):
            time.sleep(parts_s["data"])
            return batch

        def close(self):
            pass

    def forward(batch):
        time.sleep(parts_s["forward"] + (delay_s if rank.rank == late else 0.0))
        return loss

    step.batches.close()
    step.batches = Batches()
    step.trainer.forward = forward
    step.trainer.backward = lambda loss: time.sleep(parts_s["backward"])
    step.trainer.step = lambda: time.sleep(parts_s["optimizer"])
    return step


class Holding(MemoryStep):
    """Memory of a step whose forward keeps bytes of its own until the backward."""

    @contextmanager
    def training(self, rank=None):
        import torch

        with super().training(rank) as step:
            forward, backward, held = step.trainer.forward, step.trainer.backward, []

            def keep(batch):
                held.append(torch.empty(HELD_BYTES, dtype=torch.uint8, device=self.rank.device))
                return forward(batch)

            def give_back(loss):
                held.clear()
                backward(loss)

            step.trainer.forward, step.trainer.backward = keep, give_back
            yield step


def memory(rank, model="gpt2-tiny", holding=False):
    """What the suite's memory build finds; see Holding."""
    workload = TrainStep(model=model, strategy="ddp" if rank.world_size > 1 else "single")
    return (Holding if holding else MemoryStep)(workload, rank)


# -- on the driver -----------------------------------------------------------------------------------------------


def function(body, ranks, budget=BUDGET, **arguments):
    return Job(workload=FunctionWorkload(function=body, arguments=arguments), world_size=ranks, budget=budget)


def compare(driver, model, ranks, pairs):
    """Suite over bare loop, arms alternating in the same rank processes."""
    strategy = "ddp" if ranks > 1 else "single"
    suite = Job(workload=Again(model=model, strategy=strategy, micro_batch_size=4), world_size=ranks, budget=BUDGET)
    by_hand = function(bare, ranks, ONCE, model=model, micro_batch_size=4)
    driver.run(suite)
    driver.run(by_hand)
    ratios = []
    for _ in range(pairs):
        suite_s, bare_s = [], []
        for turn in range(TURNS):
            for which in ("suite", "bare") if turn % 2 else ("bare", "suite"):
                if which == "suite":
                    suite_s.append(driver.run(suite).median_s)
                else:
                    records = {record.name: record.value for record in driver.run(by_hand).records}
                    bare_s.append(records["bare_s"])
        ratios.append(statistics.median(suite_s) / statistics.median(bare_s))
    mean, low, high = ratio_interval(ratios)
    print(
        f"{model} under {strategy} on {ranks} rank(s), suite over bare loop: "
        f"{mean:.4f} [{low:.4f}, {high:.4f}] from {pairs} pairs"
    )


def remainder(driver, ranks, pairs):
    """Share of an emulated step that no span covers; the most of all runs beside the median."""
    shares = []
    for _ in range(pairs):
        measurement = driver.run(function(emulated, ranks, parts_s=PARTS_S))
        spans = {span.name: span.time_s for span in measurement.spans}
        shares.append(spans["remainder"] / measurement.median_s)
    print(
        f"emulated step of {sum(PARTS_S.values()) * 1e3:g} ms on {ranks} ranks: remainder "
        f"{statistics.median(shares):.2%} of the step, at most {max(shares):.2%} of {pairs} runs"
    )


def delays(driver, pairs):
    """An injected sleep in one rank's forward against what its span says beyond the other rank's."""
    for delay_s in (0.02, 0.05):
        shares, named = [], 0
        for _ in range(pairs):
            job = function(emulated, 2, parts_s=PARTS_S, late=1, delay_s=delay_s)
            forward = next(span for span in driver.run(job).spans if span.name == "forward")
            shares.append((forward.slowest_s - PARTS_S["forward"]) / delay_s)
            named += forward.slowest_rank == 1
        mean, low, high = ratio_interval(shares)
        print(
            f"{delay_s * 1e3:g} ms of sleep in rank 1's forward: reported over injected {mean:.4f} "
            f"[{low:.4f}, {high:.4f}], rank named in {named} of {pairs}"
        )


def known_bytes(driver, model, ranks):
    """Each figure of the memory build minus the bytes that are known to have been allocated."""
    plain, held = (
        {record.name: record.value for record in driver.run(function(memory, ranks, SMOKE, **each)).records}
        for each in ({"model": model}, {"model": model, "holding": True})
    )
    weights = 4 * find(model).parameters
    batches = TrainStep(model=model).work(MeshShape.of()).tokens + 1
    tensors = (plain["optimizer_bytes"] - 2 * weights) / 4
    expected = {
        "weights": (plain["weights_bytes"], weights),
        "gradients": (plain["gradients_bytes"], weights),
        "optimizer, two moments and a counter per tensor": (plain["optimizer_bytes"], 2 * weights + 4 * round(tensors)),
        "untracked, batches, loss and buckets": (
            plain["untracked_bytes"],
            4 * 8 * batches + 4 + (weights if ranks > 1 else 0),
        ),
        "activations, with and without 8 MiB held": (
            held["activations_bytes"] - plain["activations_bytes"],
            HELD_BYTES,
        ),
    }
    for name, (found, known) in expected.items():
        print(f"memory of {model} on {ranks} rank(s), {name}: {found:.0f} bytes, off by {found - known:.0f}")


def repeats(driver, model, ranks, runs, strategies):
    """How many sets of memory figures are seen in so many runs."""
    for strategy in strategies:
        job = Job(workload=TrainStep(model=model, strategy=strategy), world_size=ranks, budget=SMOKE, purpose="memory")
        seen = set()
        for _ in range(runs):
            records = {each.name: each.value for each in driver.run(job).records if each.unit == "bytes"}
            del records["final_host_bytes"]  # the kernel's figure, not the allocator's
            seen.add(tuple(records.items()))
        found = [dict(each) for each in seen]
        peaks = ", ".join(sorted({f"{each['peak_bytes']:.0f}" for each in found}))
        parts = ", ".join(sorted({f"{each['parts_at_once_bytes']:.0f}" for each in found}))
        print(
            f"memory of {model} under {strategy} on {ranks} ranks: {len(seen)} set(s) of figures in {runs} runs; "
            f"peak {peaks}, parts alive at once {parts} bytes",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory-runs", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0)
    arguments = parser.parse_args()
    strategies = ["ddp", "fsdp", "zero_redundancy"]
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    strategies += [f"zero{stage}" for stage in range(4) if deepspeed]
    with tempfile.TemporaryDirectory() as logs:
        preload = ("torch", "torch.distributed", "torch._dynamo", "perfsuite.runtime.ranks.worker")
        if arguments.memory_runs and deepspeed:
            preload += ("deepspeed",)
        transport = LocalTransport(start_method="fork", preload=preload, log_directory=Path(logs))
        family = families()[arguments.device]
        driver = Driver(transport=transport, family=family, rootpath=Path(__file__).parent, device_count=1)
        try:
            if arguments.memory_runs:
                with busy(arguments.busy):
                    repeats(driver, arguments.model, arguments.ranks, arguments.memory_runs, strategies)
                return
            known_bytes(driver, arguments.model, 1)
            known_bytes(driver, arguments.model, arguments.ranks)
            remainder(driver, arguments.ranks, max(3, arguments.pairs // 4))
            delays(driver, max(3, arguments.pairs // 4))
            compare(driver, arguments.model, arguments.ranks, arguments.pairs)
        finally:
            driver.close()


if __name__ == "__main__":
    main()
