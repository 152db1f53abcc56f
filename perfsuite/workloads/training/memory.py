"""Memory of a training step, in an untimed build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perfsuite.platforms.base import Clock
from perfsuite.platforms.clocks import EventClock, PerfCounterClock
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.training.memory_ledger import Ledger, ledger_of, parts_against_peak, storage_bytes
from perfsuite.workloads.training.on_rank import TrainingStep

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.training.train_step import TrainStep


class Observed(Step):
    """Base of the untimed builds: builds the training step in every iteration, so that its allocations are observed."""

    def __init__(self, workload: TrainStep, rank: Rank) -> None:
        self.workload = workload
        self.rank = rank

    @property
    def clock(self) -> Clock:
        """Clock of events in the device's current stream, or the host's clock on a CPU."""
        if self.rank.device.type == "cpu":
            return PerfCounterClock()
        import torch

        return EventClock(torch.get_device_module(self.rank.device), self.rank.device.type)

    @contextmanager
    def training(self, rank: Rank | None = None) -> Iterator[TrainingStep]:
        """Return a context with a newly built step, closed at the end."""
        step = TrainingStep(self.workload, rank or self.rank)
        try:
            yield step
        finally:
            step.close()


class MemoryStep(Observed):
    """Bytes of weights, gradients, optimizer, activations, peak and the rest on each rank.

    The kinds are the bytes of the tensors themselves, each storage counted once.  Totals come from the device's
    allocator; on a CPU, which has no such statistics, from the allocator events of torch's profiler.  Memory from
    before the build does not count.  The first step creates the optimizer's state, the second is observed.
    """

    def run(self) -> None:
        """Build, run two steps, for stages also forwards and backwards only, and record the bytes."""
        measured = self._measured()
        if self.workload.staged:
            place = self.rank.shape.coordinates(self.rank.rank)["pp"]
            for kind in ("peak_activations", "peak"):
                self._record(f"{kind}_bytes_rank{place}", measured[kind])
        for kind, count in measured.items():
            self._record(f"{kind}_bytes", count)

    def _record(self, name: str, count: int) -> None:
        self.rank.record(name, float(count), unit="bytes", reduce="max")

    def _measured(self) -> dict[str, int]:
        ledger = ledger_of(self.rank.device)
        kinds: dict[str, int] = {}
        with ledger.observing(), self.training() as step:
            step.run()
            self._observe(step, ledger, kinds)
            if self.workload.staged:
                self._observe_in_flight(step, ledger)
        totals = ledger.totals()
        final = totals["final"]
        held, at_once = kinds.pop("held_gradients"), kinds.pop("at_once")
        activations = {}
        if "after forward" in totals:
            activations["activations"] = totals["after forward"] - totals["before forward"]
            at_once = max(at_once, kinds.pop("before_forward") + activations["activations"])
        if self.workload.staged:
            activations["peak_activations"] = totals["peak in flight"] - totals["start in flight"]
        return {
            **kinds,
            **activations,
            "peak": totals["peak"],
            "final_device": final,
            "untracked": final - sum(kinds[kind] for kind in ("weights", "optimizer", "encoders", "ema")) - held,
            "final_host": ledger.host_bytes,
            **ledger.beyond(),
            **parts_against_peak(at_once, totals["peak"]),
        }

    def _observe(self, step: TrainingStep, ledger: Ledger, kinds: dict[str, int]) -> None:
        trainer = step.trainer

        @contextmanager
        def first_forward() -> Iterator[None]:
            kinds["before_forward"] = self._on_device(step.tensors())
            ledger.mark("before forward")
            yield
            ledger.mark("after forward")

        ledger.mark("start")
        trainer.forward_and_backward(step.batches, first_forward)
        seen: set[int] = set()
        tensors = step.tensors()
        kinds["weights"] = storage_bytes(tensors["weights"], seen)
        kinds["gradients"] = storage_bytes(tensors["gradients"], seen)
        kinds["at_once"] = self._on_device(tensors)
        del tensors
        step.end()
        after = step.tensors()
        # Buckets keep gradients between steps, so they count in the final total.
        seen.clear()
        storage_bytes(after["weights"], seen)
        kinds["held_gradients"] = storage_bytes(after["gradients"], seen)
        kinds["optimizer"] = storage_bytes(after["optimizer"], seen)
        kinds["encoders"] = storage_bytes(after["encoders"], seen)
        kinds["ema"] = self._on_device({"ema": after["ema"]})
        kinds["at_once"] = max(kinds["at_once"], self._on_device(after))
        del after
        ledger.mark("final")

    def _observe_in_flight(self, step: TrainingStep, ledger: Ledger) -> None:
        """Observe the peak of forwards and backwards beyond the memory at their start.  That memory includes gradients,
        which are zeroed and not freed, and the optimizer's state.
        """
        step.trainer.forward_and_backward(step.batches)
        step.trainer.optimizer.zero_grad(set_to_none=False)
        ledger.mark("start in flight")
        step.trainer.forward_and_backward(step.batches)
        ledger.mark("final in flight")

    def _on_device(self, tensors: Mapping[str, list[torch.Tensor]]) -> int:
        """Return the bytes of all kinds on the device; offloaded tensors do not count."""
        device = self.rank.device.type
        everything = (tensor for kind in tensors.values() for tensor in kind)
        return storage_bytes((tensor for tensor in everything if tensor.device.type == device), set())
