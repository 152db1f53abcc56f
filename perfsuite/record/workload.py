"""The parts of a performance case: Workload, Step and Rank.

Nothing here imports torch: only :meth:`Workload.build`, :meth:`Workload.check` and the step run on ranks with torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from perfsuite.base.errors import InvalidParameter

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from perfsuite.base.mesh import MeshShape
    from perfsuite.record.result import Measurement, Record, Work
    from perfsuite.record.step import Component, Traffic

Purpose = Literal["time", "memory", "exposed", "flops", "loss", "traffic"]
Yardstick = Literal["compute", "memory", "message", "sleep"]
Pin = Literal["none", "cores", "numa"]
"""Where ranks run: as a plain program's, each on its share of the cores, or on that of its device's memory node."""

DTYPES: Mapping[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
"""Short names used in ids, JSON and platforms.toml -> names of torch dtypes (tf32 is float32 storage)."""

ITEM_BYTES: Mapping[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
"""Bytes of one element by short dtype name."""


def require_dtype(dtype: str) -> None:
    """Raise InvalidParameter unless ``dtype`` is a short dtype name."""
    if dtype not in DTYPES:
        raise InvalidParameter(f"dtype={dtype!r} is unknown; choose from {', '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class Process:
    """Requirements of a workload on its rank processes, which are then always new."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before the interpreter starts."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long and how often a case is timed; read once from the options, sent with every case."""

    min_rounds: int = 5  # Samples taken at least, unless ``timeout_s`` ends the case.
    max_rounds: int = 1000  # Samples taken at most.
    max_time_s: float = 1.0  # After ``min_rounds``, sampling stops once it has taken this long.
    warmup_time_s: float = 1.0  # The warm-up stops when steady or after this long.
    warmup_min_iterations: int = 3
    warmup_min_s: float | None = None
    """The warm-up goes on for so many seconds of iterations, steady or not; None leaves that to the clock's rules."""
    smoke: bool = False  # Build, check and one iteration only (``--benchmark-disable``).
    disable_gc: bool = True  # Python's garbage collector is off during samples.
    cache_flush: bool = False
    """Write a buffer larger than the last-level cache before every iteration: a sample is then one."""
    sustain_s: float | None = None
    """Seconds of sampling, instead of ``max_rounds`` and ``max_time_s``, to see if the device keeps its speed."""
    yardstick: bool = False  # Time a control that resembles the step after every sample.
    timeout_s: float = 120.0
    """One build of the case, its checks included, must end within this; so must joining the process group before it."""
    fixed_timeout: bool = False
    """``timeout_s`` was asked for: it is not made longer for a case whose work needs longer on its device."""

    @property
    def asked_s(self) -> float:
        """Seconds that a timed build runs because that was asked for, on top of any deadline."""
        return (self.sustain_s or 0.0) + (self.warmup_min_s or 0.0)


class Step(ABC):
    """A built workload on one rank."""

    @abstractmethod
    def run(self) -> Any:
        """Run one iteration. Only this is timed."""

    def refill(self) -> None:
        """Restore the inputs before each ``check``; not timed."""
        return

    def close(self) -> None:
        """Free buffers and groups of the step."""
        return


class CallableStep(Step):
    """A step made of a callable."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def run(self) -> Any:
        """Run one iteration."""
        return self._run()


class Rank(Protocol):
    """The rank that builds a workload."""

    device: torch.device  # Device of this rank.
    rank: int  # Number of this rank, from 0.
    local_rank: int  # Number of this rank on its host, from 0.
    world_size: int  # Number of ranks.
    purpose: Purpose  # Purpose of this build: timing, or memory, FLOPs, exposed communication, losses, traffic.
    shape: MeshShape  # Sizes of the mesh's axes.

    @property
    def mesh(self) -> torch.distributed.device_mesh.DeviceMesh:
        """torch's DeviceMesh of :attr:`shape`; the first use is a collective."""

    def submesh(self, *axes: str) -> torch.distributed.device_mesh.DeviceMesh:
        """Return the mesh along ``axes`` as one dimension; without axes of several ranks this rank alone."""

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group along ``axes`` (default: all ranks)."""

    def dtype(self, name: str) -> torch.dtype:
        """Return torch's dtype of a short name; fp32 and tf32 also set the TF32 switch."""

    def generator(self, seed: int) -> torch.Generator:
        """Return a seeded generator on :attr:`device`; it gives the same numbers on every rank."""

    def span(self, name: str, **attributes: int | str) -> AbstractContextManager[None]:
        """Mark a part of the step; parts may repeat and overlap."""

    def keep_timeline(self, schedule: str, *, axis: str = "pp") -> None:
        """Make a timeline of the spans forward, backward, ..., which give ``stage`` and ``micro_batch``.

        The ranks along ``axis`` are the pipeline; ``schedule`` is the name of its schedule.
        """

    def record(self, name: str, value: Any, **meaning: Any) -> None:
        """Record a number besides the time; a tensor is read after the last sample.

        ``meaning`` has fields of :class:`perfsuite.OwnMetric`: ``record("memory", 2.1, unit="GiB", better="lower")``.
        NaN or an infinity fails the case.
        """

    def keep_traffic(self, traffic: Sequence[Traffic], components: Sequence[Component], *, place: str = "") -> None:
        """Report the messages of a step, by axis, collective and part, and the times of its parts.

        Ranks with the same ``place`` must have the same calls and bytes, except uneven ones.
        """


class Probe(Protocol):
    """Runs builds on the ranks of a case, for a workload that searches its size."""

    def __call__(self, workload: Workload, purpose: Purpose) -> Measurement:
        """Return the measurement of one build of ``workload``; raises OutOfMemory and the other errors of a case.

        A build for ``purpose`` time is timed, and is the result of the case if the search ends with its workload.
        """


class Workload(ABC):
    """Base of workloads: frozen keyword-only dataclasses whose fields are the parameters of the case.

    A subclass replaces a property below by an attribute (``metrics = ("tflops",)``) or by a property.
    """

    aligned: ClassVar[bool] = True
    """Whether a barrier precedes each sample; False for training steps."""
    yardstick: ClassVar[Yardstick] = "compute"
    """Kind of control that resembles the step; on a CPU it is refined during the warm-up."""
    captured: ClassVar[bool] = False  # Whether a captured graph of a launch-bound kernel is timed too.
    fills_memory: ClassVar[bool] = False
    """Whether it fills the memory; the buffers of the control are then always allocated."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of its metrics, the most important first."""
        return ("latency_us",)

    @property
    def process(self) -> Process | None:
        """Requirements on the rank processes; None: none."""
        return None

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its ranks import; forked ranks inherit them."""
        return ()

    @property
    def arrivals(self) -> bool:
        """Whether the rank that is late at the first communication is reported."""
        return True

    @abstractmethod
    def work(self, shape: MeshShape) -> Work:
        """Return the work of one iteration on a mesh of this shape, without importing torch.

        Raises InvalidParameter when the workload cannot be spread over that many ranks.
        """

    @abstractmethod
    def build(self, rank: Rank) -> Step:
        """Return the step: allocate on ``rank.device``, take groups from ``rank.group`` or ``rank.mesh`` only."""

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult if one :meth:`Step.run` on refilled inputs gave a wrong result."""
        return None

    def twin(self) -> Workload | None:
        """Return a small version that one process can check before the timed build; None: none."""
        return None

    def layout(self) -> str:
        """Return the mesh of the case, such as ``dp2-tp4``; empty: all ranks on ``dp``."""
        return ""

    def settle(self, probe: Probe) -> tuple[Workload, tuple[Record, ...]]:
        """Return the workload to time and records of a search, such as for the largest batch.

        The driver calls it before timing, not for smoke runs.
        """
        return self, ()

    def untimed(self) -> tuple[Purpose, ...]:
        """Return the purposes of builds without timing, each of one iteration."""
        return ()

    def native_dtype(self) -> str:
        """Return the dtype that the device must compute natively; empty: none."""
        return ""

    def sustained_s(self) -> float | None:
        """Return the seconds of timing; None: as the options say."""
        return None

    def needs_accelerator(self) -> str:
        """Return the part of the case that needs an accelerator; empty: none."""
        return ""

    def parameters(self) -> dict[str, Any]:
        """Return the fields by name."""
        described: Any = self  # a Workload is a dataclass by contract, which its base class cannot say
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(described)}

    def defaults(self) -> dict[str, Any]:
        """Return the default values of the parameters, by name."""
        described: Any = self
        return {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(described)
            if (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        }


def as_step(made: object, maker: str) -> Step:
    """Return ``made`` as a Step; a callable becomes one iteration.  Raises InvalidParameter, naming ``maker``."""
    if isinstance(made, Step):
        return made
    if not callable(made):
        lazy = isinstance(made, (Generator, AsyncGenerator, Coroutine))
        shown = f"a {type(made).__name__}" if lazy else f"{made!r:.80}"
        raise InvalidParameter(f"{maker} returned {shown}; return a callable that is one iteration, or a Step")
    return CallableStep(made)


@dataclass(frozen=True, kw_only=True)
class FunctionWorkload(Workload):
    """A plain function of a test file: ``step(rank, **parameters)`` returns a callable or a Step."""

    function: Callable[..., Any]  # Module-level function that runs on every rank.
    arguments: Mapping[str, Any] = field(default_factory=dict)  # Keyword arguments after ``rank``.
    preload = ("pytest",)  # by the function's file: 0.2 s in each of its ranks

    def work(self, shape: MeshShape) -> Work:
        """Return empty work: a plain function has only a time."""
        from perfsuite.record.result import Work  # pytest runs without a perf case load this module, and not that one

        return Work()

    def build(self, rank: Rank) -> Step:
        """Call the function once and return its result as a step."""
        return as_step(self.function(rank, **self.arguments), self.function.__qualname__)

    def parameters(self) -> dict[str, Any]:
        """The keyword arguments."""
        return dict(self.arguments)

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the function's signature."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {one.name: one.default for one in parameters if one.default is not one.empty}
