"""The parameters of a training step and the names of its metrics, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_args

from perfsuite import models, strategies
from perfsuite.base.errors import InvalidParameter, nearest_multiples
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import TIMED
from perfsuite.metrics.flop_conventions import FROZEN, Transformer, count_all
from perfsuite.models.base import AttentionMethod, Checkpointing, Model
from perfsuite.models.program import Program
from perfsuite.record.result import Work
from perfsuite.record.step import Training
from perfsuite.record.workload import Process, Purpose
from perfsuite.strategies import Plan, Strategy
from perfsuite.strategies.deepspeed.zero import GLOBAL, MICRO, batch_fields, read_config
from perfsuite.workloads.checks import MeshWorkload, NativeWorkload, require_choices, require_counts

_PRELOAD = (
    *("torch._dynamo", "torch.profiler", "perfsuite.workloads.training.builds"),
    *("perfsuite.workloads.training.parity", "perfsuite.models.build", "torch.distributed.device_mesh"),
)
"""Modules that every rank process would import anyway: torch's compiler, the models, the builds."""
_DTYPES = ("fp32", "tf32", "bf16", "fp16")


_PARTS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "backward_with_optimizer_ms", "remainder_ms")
"""Metrics of a rank that runs one part after the other."""
STAGES = (
    *("bubble_ratio", "bubble_to_ideal_ratio", "median_bubble_ratio", "simulated_bubble_ratio"),
    *("balanced_bubble_ratio", "in_flight_micro_batches", "warm_up_percent", "steady_percent"),
    "cool_down_percent",
)
"""Metrics of the timeline of a pipeline."""
MEMORY = (
    *("weights_gib", "gradients_gib", "optimizer_gib", "encoders_gib", "ema_gib"),
    "activations_gib",  # of one forward, if a rank has the whole model
    "peak_activations_gib",  # of all micro-batches in flight, if it has stages
    *("peak_gib", "fragmentation_gib", "final_device_gib", "untracked_gib", "final_host_gib", "whole_device_gib"),
)
_EXPERTS = ("expert_imbalance", "dropped_percent", "balance_loss")  # Metrics of models with experts
BUILDS: Mapping[str, tuple[str, ...]] = {
    "memory": MEMORY,
    "exposed": (
        *(f"exposed_communication_{figure}percent" for figure in ("", "low_", "high_")),
        "exposed_kernels_percent",
    ),
    "flops": ("counted_tflop",),
    "loss": ("final_loss", "time_to_target_s"),
    "traffic": (
        "communication_time_s",
        "compute_time_s",
        "communication_bytes",
        "communication_percent",
        *(f"{axis}_busbw_gb_per_s" for axis in ("dp", "tp", "cp", "ep", "pp")),
    ),
}
"""Metrics of each build."""


@dataclass(frozen=True, kw_only=True)
class TrainCase(NativeWorkload, MeshWorkload):
    """The parameters of a training step, and its plan, work and metrics."""

    model: str  # Name of a configuration, such as gpt2, llama2-7b, latte-l or opensora.
    strategy: str = "single"
    """single, ddp, fsdp, zero_redundancy, zero0 to zero3, hybrid for a mesh with stages, or ``module:Class``."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration to replace, such as ``sequence_length``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy, such as ``{"reshard": False}`` or ``{"schedule": "zbv"}``."""
    mesh: str = ""  # Shape of the mesh, such as dp_replicate2-dp_shard4 or pp2-dp2; empty: all ranks on dp.
    micro_batch_size: int | None = None
    """Samples of one forward on one rank (LBS); None: from ``global_batch_size`` or a ds_config.json, else 1."""
    global_batch_size: int | None = None
    """Samples of a step on all replicas (GBS = LBS x accumulation x replicas); None: computed."""
    accumulation: int = 1  # Micro-batches of a step (GAS), which a pipeline's schedule orders.
    dtype: str = "fp32"  # fp32, tf32, bf16 or fp16; the last two by autocast or as the strategy does.
    checkpointing: Checkpointing = "none"
    """Activations: keep all (none), compute blocks again (full), compute cheap operations again (selective)."""
    attention: AttentionMethod = "auto"  # Kernel: torch's choice (auto), math, flash.
    compiled: bool = False  # torch.compile on every block.
    data: str = "synthetic"
    """synthetic: random batches in memory; generated: files of numbers written by perfsuite; video: video files written
    by perfsuite, for encoders; else the folder of a data set."""
    dataset_samples: int = 704  # Samples of the files that perfsuite writes; the data set of report 001 has 704 videos.
    num_workers: int = 0  # Loader processes of each rank; 0: the rank reads by itself.
    learning_rate: float = 1e-4  # Learning rate of AdamW.
    seed: int = 0  # Seed of the initial values.
    program: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the training program besides the model, such as ``{"ema": "fp32"}``: fields of
    :class:`perfsuite.models.program.Program`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the communication library, set before the ranks start."""
    builds: tuple[Purpose, ...] = ()  # Untimed builds to run: memory, exposed, flops, loss, traffic.
    loss_steps: int = 20  # Steps of the loss build.
    target_loss: float | None = None  # Target loss of the loss build.

    aligned: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kinds = {"checkpointing": get_args(Checkpointing), "attention": get_args(AttentionMethod)}
        require_choices(self, dtype=_DTYPES, **kinds)
        if not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise InvalidParameter(f"num_workers={self.num_workers!r} is not a count; choose 0 or more")
        batches = [name for name in ("micro_batch_size", "global_batch_size") if getattr(self, name) is not None]
        require_counts(self, "accumulation", "dataset_samples", "loss_steps", *batches)
        if self.num_workers and self.data == "synthetic":
            raise InvalidParameter(
                f"num_workers={self.num_workers} needs files, and data='synthetic' has none; choose data='generated'"
            )
        for name, value in self.environment.items():
            if not (name and isinstance(value, str)) or "=" in name:
                raise InvalidParameter(f"environment: {name}={value!r} is not a variable; give its name and a text")
        self.find_strategy()
        self.find_program().require(self.find_model(), self.dtype)
        if self.data == "video" and self.find_program().encoders == "none":
            raise InvalidParameter(
                f"data='video' needs encoders, which turn pixels into inputs of model {self.model}; set "
                "program={'encoders': ...}, or choose data='generated'"
            )
        if self.find_model().experts and self.compiled:
            raise InvalidParameter(
                f"compiled blocks are not supported for model {self.model}: its experts' number of rows depends on the "
                "data; leave compiled out"
            )
        self._require_builds()
        if self.mesh:
            self._require_mesh(MeshShape.parse(self.mesh))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of all training steps, of stages or of a rank's parts, and of the chosen builds."""
        parts = (*STAGES, "optimizer_ms") if self.staged else _PARTS
        data = () if self.data == "synthetic" else ("steps_per_epoch",)
        builds = (name for build in self.builds for name in BUILDS[build] if name not in self.absent())
        experts = _EXPERTS if self.find_model().experts else ()
        extra = (f"{part}_ms" for part in self.find_program().spans)
        return (*TIMED, *parts, *extra, "device_utilisation_percent", *experts, *data, *builds)

    def absent(self) -> tuple[str, ...]:
        """Return the metrics of the builds that this case cannot have."""
        extra = (f"{part}_gib" for part in ("encoders", "ema") if part not in self.find_program().spans)
        return ("activations_gib" if self.staged else "peak_activations_gib", *extra)

    @property
    def process(self) -> Process | None:
        """Processes of the strategy, with the case's environment variables."""
        process = self.find_strategy().process
        return Process(env={**(process.env if process else {}), **self.environment}) if self.environment else process

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules to import early: of every rank, of the compiler, and of the strategy."""
        compiler = ("torch._inductor.compile_fx",) if self.compiled else ()
        return (*_PRELOAD, *compiler, *self.find_strategy().preload)

    @property
    def arrivals(self) -> bool:
        """Whether ranks should arrive together; not in a pipeline, whose later stages start later."""
        return not self.staged

    @property
    def staged(self) -> bool:
        """Whether a rank has stages of the model, ordered by a schedule, instead of the whole model."""
        return "pp" in MeshShape.parse(self.mesh or "1").names

    def _require_builds(self) -> None:
        purposes = [purpose for purpose in get_args(Purpose) if purpose != "time"]
        for build in self.builds:
            if build not in purposes:
                raise InvalidParameter(f"builds: {build!r} is unknown; choose from {', '.join(purposes)}")
        reasons = {
            "traffic": "parts of compiled blocks cannot be marked",
            "flops": "torch cannot count operations of compiled blocks",
        }
        for purpose, reason in reasons.items():
            if purpose in self.builds and self.compiled:
                raise InvalidParameter(f"builds: {reason}; leave out {purpose!r} or compiled")

    def _require_mesh(self, shape: MeshShape) -> None:
        self.plan(shape)
        schedule = self.find_strategy().find_schedule(shape, self.accumulation)
        if "flops" in self.builds and schedule is not None and schedule.splits_backwards:
            raise InvalidParameter(
                f"builds: torch cannot count operations of the split backwards of schedule {schedule.name}; "
                "leave out 'flops' or choose a schedule with whole backwards such as 1f1b"
            )

    def find_model(self) -> Model:
        """Return the model's configuration."""
        model = models.find_trained(self.model, self.overrides)
        return model.padded(MeshShape.parse(self.mesh).size("tp")) if self.mesh else model

    def find_strategy(self) -> Strategy:
        """Return the strategy with its options."""
        return strategies.find(self.strategy, self.options)

    def find_program(self) -> Program:
        """Return the settings of the training program."""
        return Program.of(self.program)

    def untimed(self) -> tuple[Purpose, ...]:
        """Return the chosen builds."""
        return self.builds

    def needs_accelerator(self) -> str:
        """Return the strategy's option that needs an accelerator."""
        return self.find_strategy().needs_accelerator()

    def trained_model(self, shape: MeshShape) -> Model:
        """Return the model that is trained on this mesh."""
        return self.find_model()

    def plan(self, shape: MeshShape) -> Plan:
        """Return each rank's plan on this mesh; InvalidParameter if the batch or the strategy's options do not fit."""
        strategy = self.find_strategy()
        strategy.require(shape)
        plan = Plan(
            model=self.trained_model(shape),
            dtype=self.dtype,
            micro_batch_size=self._micro_batch_size(shape),
            accumulation=self.accumulation,
            checkpointing=self.checkpointing,
            attention=self.attention,
            compiled=self.compiled,
            learning_rate=self.learning_rate,
            clip=self.find_program().clip,
            loss_scale=self.find_program().loss_scale,
            seed=self.seed,
        )
        strategy.check_plan(plan, shape)
        return plan

    def _micro_batch_size(self, shape: MeshShape) -> int:
        """Return LBS with GBS = LBS x GAS x replicas, set by the case or its ds_config.json."""
        config = str(self.options.get("config", ""))
        written = batch_fields(read_config(config), config) if config else {}
        spread = self.accumulation * shape.replicas
        axes = " x ".join(f"{axis} {shape.size(axis)}" for axis in shape.data_axes)
        product = f" ({axes})" if " x " in axes else ""
        factors = f"accumulation {self.accumulation} x {shape.replicas} replicas{product}"
        micro = self.micro_batch_size or written.get(MICRO)
        name, total = "global_batch_size", self.global_batch_size
        if total is None and GLOBAL in written:
            name, total = f"{config}: {GLOBAL}", written[GLOBAL]
        if total is None:
            return micro or 1
        if micro is None:
            if total % spread:
                legal = nearest_multiples(total, spread)
                raise InvalidParameter(f"{name}={total} does not divide by {factors} = {spread}; choose {legal}")
            return total // spread
        if micro * spread != total:
            accumulation, rest = divmod(total, micro * shape.replicas)
            other = "" if rest else f", set accumulation={accumulation}"
            raise InvalidParameter(
                f"{name}={total} is not micro_batch_size {micro} x {factors} = {micro * spread}; "
                f"choose {micro * spread}{other} or leave one of them out"
            )
        return micro

    def work(self, shape: MeshShape) -> Work:
        """Return operations by convention, samples and tokens of a step; InvalidParameter if the case cannot run."""
        plan, model, program = self.plan(shape), self.find_model(), self.find_program()
        if self.data not in ("synthetic", "generated", "video"):
            from perfsuite.models.dataset import read  # with numpy

            read(Path(self.data), program.inputs(model))
        samples = float(plan.batch_size * shape.replicas)
        counted = Transformer(
            parameters=model.active_parameters,
            layers=model.layers,
            width=model.width,
            tokens=model.tokens_per_sample,
            vocabulary=model.vocabulary,
            forward_flops=model.forward_flops,
            block_flops=model.block_flops,
            recomputes=self.checkpointing == "full",
        )
        conventions = dict(count_all(counted))
        if frozen := program.frozen_flops(model):  # separate: no convention counts frozen encoders
            conventions[FROZEN] = frozen
        return Work(
            flops={name: samples * count for name, count in conventions.items()},
            dtype=self.dtype,
            samples=samples,
            tokens=samples * model.tokens_per_sample,
            training=self._training(plan, shape),
        )

    def _training(self, plan: Plan, shape: MeshShape) -> Training | None:
        decided = self.find_strategy().training(plan, shape)
        if decided is None:
            return None
        return Training(
            model=self.model,
            overrides=dict(self.overrides),
            layout=str(shape),
            strategy=self.strategy,
            micro_batch_size=plan.micro_batch_size,
            num_micro_batches=plan.accumulation,
            dtype=self.dtype,
            checkpointing=self.checkpointing,
            attention=self.attention,
            compiled=self.compiled,
            narrow=self.find_strategy().narrows(plan),
            program=dict(self.program),
            **decided,
        )
