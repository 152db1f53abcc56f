"""Rank side of DeepSpeed ZeRO; imported only if DeepSpeed is installed.

DeepSpeed compiles kernels at their first use, which takes minutes.  On a CPU none is used: its shared-memory
collectives are off, and the optimizer is torch's unless ``cpu_adam`` selects DeepSpeed's.  With an accelerator the
optimizer of offloaded state is DeepSpeed's CPU Adam.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-untyped] # DeepSpeed has no types
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad  # type: ignore[import-untyped] # as above

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.writing import why_not_private
from perfsuite.models.base import Plan
from perfsuite.models.build import build
from perfsuite.models.layers import Block, TrainingModule, fill_parameter
from perfsuite.record.workload import Rank
from perfsuite.strategies.trainer import Batch, Trainer, new_whole_module


def build_engine(
    rank: Rank, plan: Plan, settings: dict[str, Any], adam: Mapping[str, Any], *, compiled: bool
) -> ZeroTrainer:
    """Return a trainer with DeepSpeed's engine around the model, over all ranks.  ``settings`` are DeepSpeed's,
    ``adam`` those of the optimizer.  ``compiled``: the optimizer is DeepSpeed's CPU Adam.
    """
    start(rank)
    spread = settings["zero_optimization"]["stage"] == 3
    module = _spread_module(rank, plan, settings) if spread else new_whole_module(rank, plan)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    make = torch.optim.AdamW
    if compiled:
        load_compiled(deepspeed.ops.op_builder.CPUAdamBuilder())
        make = deepspeed.ops.adam.DeepSpeedCPUAdam
    optimizer = make(trained, **adam)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, model_parameters=trained, config=settings, dist_init_required=False
    )
    return ZeroTrainer(rank, plan, module=module, unit=engine, optimizer=optimizer, casts=False, replicates=False)


def start(rank: Rank) -> None:
    """Make DeepSpeed use the rank's device and the existing process group, and compile nothing on a CPU."""
    if rank.device.type == "cpu":
        compatible = deepspeed.ops.__compatible_ops__
        compatible["deepspeed_shm_comm"] = False
        # Otherwise DeepSpeed 0.15 runs numactl to count a host's devices in every backward of stage 3.
        os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    else:
        use_device(rank.device, dist.get_backend(rank.group()))
    deepspeed.init_distributed(dist_init_required=False)


def _spread_module(rank: Rank, plan: Plan, settings: dict[str, Any]) -> TrainingModule:
    """Return the model; each parameter is spread when it is created, then gathered to be filled."""
    rank.dtype(plan.dtype)
    with deepspeed.zero.Init(config_dict_or_path=settings, remote_device=None):
        module = build(plan.model, plan.checkpointing, plan.attention)
    unhook()
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if rank.rank == 0:
                fill_parameter(module, name, parameter, plan.seed)
    for block in module.blocks.children():
        assert isinstance(block, Block)
        block.reentrant = True  # parameters change their shapes outside a module's forward
    return module


def unhook() -> None:
    """Restore classes' ``__init__`` after zero.Init of DeepSpeed 0.15, whose hook would spread all later modules."""
    for kind in deepspeed.runtime.zero.partition_parameters.get_all_subclasses(torch.nn.Module):
        own = vars(kind).get("__init__")
        if own is not None and inspect.unwrap(own) is inspect.unwrap(super(kind, kind).__init__):
            del kind.__init__


class ZeroTrainer(Trainer):
    """Steps DeepSpeed's engine, which counts micro-batches by itself."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; the engine's step after all but the last only counts it."""
        return nullcontext() if last else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        yield
        self.unit.step()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss; floating-point inputs are cast to the engine's dtype."""
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.plan.dtype)
        if narrow is not None:
            batch = {name: x.to(narrow) if x.is_floating_point() else x for name, x in batch.items()}
        return self.unit(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the engine's backward, which scales the loss."""
        self.unit.backward(loss)

    def step(self) -> None:
        """Step the optimizer, with the engine's clipping and scaling."""
        self.unit.step()

    def loss_scale(self) -> float:
        """Return the engine's loss scale."""
        return float(getattr(self.unit.optimizer, "loss_scale", None) or 1.0)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield whole gradients, gathered by DeepSpeed."""
        scale = self.loss_scale()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                gradient = safe_get_full_grad(parameter)
                if gradient is None:
                    gradient = parameter.grad
                yield name, None if gradient is None else gradient.float() / scale

    def weights(self) -> list[torch.Tensor]:
        """Return this rank's parameters, in stage 3 its part of each."""
        parameters: list[Any] = list(self.module.parameters())
        spread = [parameter.ds_tensor for parameter in parameters if getattr(parameter, "ds_tensor", None) is not None]
        return spread or super().weights()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return this rank's tensors, including the engine's own.  The wide copies of parameters that stages 1 to 3
        step count as optimizer, because they are spread with it.
        """
        tensors = super().tensors()
        engine: Any = self.unit.optimizer
        averaged = getattr(engine, "averaged_gradients", None) or {}
        tensors["gradients"] += [
            gradient for group in averaged.values() for gradient in group or [] if gradient is not None
        ]
        for place in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            tensors["optimizer"] += list(getattr(engine, place, None) or [])
        return tensors

    def close(self) -> None:
        """Free the engine's buffers and hooks, then the model."""
        self.unit.destroy()
        super().close()


@contextmanager
def compiling(root: Path) -> Iterator[Path]:
    """Yield the folder below ``root`` for this torch and this Python, in which only this process compiles.  torch's own
    lock is a file that stays when its process is killed; all later processes then wait forever.  The system's lock on a
    separate file ends with its process, so a lock file of torch found under it is stale and removed.
    """
    folder = root / "perfsuite" / f"torch-{version('torch')}-{sys.implementation.cache_tag}"
    if problem := why_not_private(folder.parent):
        raise ConfigurationError(
            f"compiled kernels go to {folder.parent}, which {problem}; set TORCH_EXTENSIONS_DIR to a folder of your own"
        )
    folder.mkdir(exist_ok=True)
    with (folder / "compiling").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for left in folder.glob("*/lock"):
            left.unlink()
        yield folder


def load_compiled(builder: Any) -> None:
    """Load the kernel of DeepSpeed's ``builder``; compiles it first if needed, which may take minutes."""
    wanted = os.environ.get("TORCH_EXTENSIONS_DIR")
    with compiling(Path(wanted) if wanted else Path.home() / ".cache") as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        try:
            builder.load()
        finally:
            if wanted is None:
                del os.environ["TORCH_EXTENSIONS_DIR"]
            else:
                os.environ["TORCH_EXTENSIONS_DIR"] = wanted


_SAME_NAME = (
    *("set_device", "current_device", "device_count", "synchronize", "manual_seed", "manual_seed_all", "initial_seed"),
    *("set_rng_state", "get_rng_state", "stream", "current_stream", "default_stream", "device", "empty_cache"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
    *("reset_peak_memory_stats", "is_available"),
)
_OTHER_NAME: Mapping[str, str] = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    # Some vendors' modules have broken functions of these names; this one resets both peaks.
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
_CONSTANTS: Mapping[str, object] = {
    **dict.fromkeys(("is_bf16_supported", "is_fp16_supported"), True),
    **dict.fromkeys(("is_synchronized_device", "use_host_timers", "resolves_data_dependency"), False),
    **dict.fromkeys(("handles_memory_backpressure", "is_triton_supported"), False),
    **dict.fromkeys(("range_push", "range_pop", "replay_graph", "set_compile_backend"), None),
    "get_compile_backend": "inductor",
}
_TENSORS: Mapping[str, torch.dtype] = {
    **{"BFloat16Tensor": torch.bfloat16, "HalfTensor": torch.half, "FloatTensor": torch.float},
    **{"DoubleTensor": torch.double, "ByteTensor": torch.uint8, "IntTensor": torch.int, "LongTensor": torch.long},
}
_HOST_KERNELS = "deepspeed.ops.op_builder.cpu"
_HOST_OPTIMIZERS = ("CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder")
"""Kernels for offloaded state.  Other kernels for the host would be compiled, for minutes, and not used."""


def use_device(device: torch.device, backend: str) -> None:
    """Make DeepSpeed train on ``device`` over ``backend``; call it before any other use of DeepSpeed."""
    from deepspeed.accelerator import get_accelerator, set_accelerator  # type: ignore[import-untyped]  # no types

    if get_accelerator().device_name() != device.type:
        set_accelerator(make_accelerator(device.type, backend))


def make_accelerator(device: str, backend: str) -> Any:
    """Return an accelerator over ``torch.get_device_module(device)`` whose collectives use ``backend``."""
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator  # type: ignore[import-untyped]  # no types

    module: Any = torch.get_device_module(device)
    members: dict[str, Any] = {
        **{name: _forward(module, name) for name in _SAME_NAME},
        **{name: _forward(module, other) for name, other in _OTHER_NAME.items()},
        **{name: _constant(value) for name, value in _CONSTANTS.items()},
        **{name: _tensor(dtype, device) for name, dtype in _TENSORS.items()},
        **_own(module, device, backend),
        "Event": module.Event,
        "Stream": module.Stream,
    }
    accelerator: Any = type("ModuleAccelerator", (DeepSpeedAccelerator,), members)()
    accelerator._name, accelerator._communication_backend_name = device, backend
    accelerator._compile_backend = "inductor"
    return accelerator


def _forward(module: Any, name: str) -> Callable[..., Any]:
    def call(_: Any, *arguments: Any, **named: Any) -> Any:
        if "device_index" in named:
            arguments = (*arguments, named.pop("device_index"))
        return getattr(module, name)(*arguments, **named)

    return call


def _constant(value: object) -> Callable[..., object]:
    return lambda _, *arguments, **named: value


def _tensor(dtype: torch.dtype, device: str) -> property:
    return property(lambda _: functools.partial(torch.tensor, dtype=dtype, device=device))


def _own(module: Any, device: str, backend: str) -> dict[str, Any]:
    """Return the members of an accelerator that are not just another name."""
    visible = f"{device.upper()}_VISIBLE_DEVICES"

    def total_memory(_: Any, device_index: int | None = None) -> int:
        index = module.current_device() if device_index is None else device_index
        return int(module.get_device_properties(index).total_memory)

    def no_graph(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"graphs of {device} are not recorded through DeepSpeed")

    def builder(_: Any, name: str) -> Any:
        kinds = dict(inspect.getmembers(importlib.import_module(_HOST_KERNELS), inspect.isclass))
        return kinds[name] if name in _HOST_OPTIMIZERS and name in kinds else kinds["NotImplementedBuilder"]

    def show_devices(_: Any, environment: dict[str, str], indices: list[int]) -> None:
        environment[visible] = ",".join(map(str, indices))

    return {
        "device_name": lambda _, index=None: device if index is None else f"{device}:{index}",
        "current_device_name": lambda _: f"{device}:{module.current_device()}",
        "communication_backend_name": lambda _: backend,
        "random": lambda _: torch.random,
        "default_generator": lambda _, index: torch.Generator(device=f"{device}:{index}"),
        "total_memory": total_memory,
        "available_memory": lambda _, device_index=None: int(module.mem_get_info(device_index)[0]),
        "supported_dtypes": lambda _: [torch.float, torch.half, torch.bfloat16],
        "lazy_call": lambda _, callback: callback(),
        "on_accelerator": lambda _, tensor: tensor.device.type == device,
        "op_builder_dir": lambda _: _HOST_KERNELS,
        "get_op_builder": builder,
        "create_op_builder": lambda _, name: builder(_, name)(),
        "build_extension": lambda _: importlib.import_module("torch.utils.cpp_extension").BuildExtension,
        "create_graph": no_graph,
        "capture_to_graph": no_graph,
        "export_envs": lambda _: [name for name in os.environ if name.startswith(f"{device.upper()}_")],
        "visible_devices_envs": lambda _: [visible],
        "set_visible_devices_envs": show_devices,
    }
