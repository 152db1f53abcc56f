"""A DeepSpeed accelerator for devices that DeepSpeed does not support, over torch's module of the device.

DeepSpeed 0.19 knows ten families by name and uses the CPU for all others.  If an accelerator is set before the first
use, it trains on any device of torch; of its own kernels only those for the host are then used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

_SAME_NAME = (
    *("set_device", "current_device", "device_count", "synchronize", "manual_seed", "manual_seed_all", "initial_seed"),
    *("set_rng_state", "get_rng_state", "stream", "current_stream", "default_stream", "device", "empty_cache"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
    *("reset_peak_memory_stats", "is_available"),
)
_OTHER_NAME: Mapping[str, str] = MappingProxyType(
    {
        "memory_cached": "memory_reserved",
        "max_memory_cached": "max_memory_reserved",
        # Some vendors' modules have broken functions of these names; this one resets both peaks.
        "reset_max_memory_allocated": "reset_peak_memory_stats",
        "reset_max_memory_cached": "reset_peak_memory_stats",
    }
)
_CONSTANTS: Mapping[str, object] = MappingProxyType(
    {
        **dict.fromkeys(("is_bf16_supported", "is_fp16_supported"), True),
        **dict.fromkeys(("is_synchronized_device", "use_host_timers", "resolves_data_dependency"), False),
        **dict.fromkeys(("handles_memory_backpressure", "is_triton_supported"), False),
        **dict.fromkeys(("range_push", "range_pop", "replay_graph", "set_compile_backend"), None),
        "get_compile_backend": "inductor",
    }
)
_TENSORS: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **{"BFloat16Tensor": torch.bfloat16, "HalfTensor": torch.half, "FloatTensor": torch.float},
        **{"DoubleTensor": torch.double, "ByteTensor": torch.uint8, "IntTensor": torch.int, "LongTensor": torch.long},
    }
)
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
