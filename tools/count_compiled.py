"""What the kernels of a compiled graph move, by the schedule of torch's own compiler: nothing is generated or built.

A graph comes here where Inductor would write its code: it is lowered and scheduled, which decides what is fused into
one kernel, its kernels are counted, and the graph runs as it is, operation by operation.  A kernel reads what others
made and writes what others read once (``get_read_write_buffer_accesses``); products and attention are calls of
kernels with costs of their own.  Schedules are those of cores, whose fusions follow the same rules as a device's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode


@dataclass(kw_only=True)
class Kernels:
    """Of one graph: sizes and bytes of what each of its kernels reads or writes."""

    moved: list[tuple[torch.Size, int]] = field(default_factory=list)
    """(shape, bytes)"""
    fused: int = 0
    """Kernels that the compiler writes."""
    called: list[str] = field(default_factory=list)
    """Operators whose kernels it calls."""


class _Scheduled(BaseException):
    """Carries a graph's kernels out of the compiler; no error, which it would wrap."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels


def compiler(ran: Callable[[Kernels], None]) -> Callable[..., Any]:
    """A backend of torch.compile that tells ``ran`` of a graph's kernels each time that it runs."""

    def schedule(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        kept = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        kernels = _kernels(graph, inputs, options)

        def run(arguments: list[Any]) -> Any:
            ran(kernels)
            given = list(arguments)
            arguments.clear()
            return kept(*given)

        run._boxed_call = True  # type: ignore[attr-defined] # how torch asks for arguments in one list
        return run

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=schedule)  # type: ignore[arg-type] # of any output

    return compile_graph


def _kernels(graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Kernels:
    """What Inductor's scheduler makes of a graph that torch.compile cut out."""

    def stop(lowered: GraphLowering) -> NoReturn:
        lowered.init_wrapper_code()
        lowered._update_scheduler()
        raise _Scheduled(_count(lowered))

    with config.patch(force_disable_caches=True), mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_fx.compile_fx_inner(graph, inputs, **options)
        except _Scheduled as scheduled:
            return scheduled.kernels
    raise AssertionError("the compiler wrote no code")


def _count(lowered: GraphLowering) -> Kernels:
    found = Kernels()
    for node in lowered.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):  # one of a kernel's results
            continue
        if isinstance(node, ExternKernelSchedulerNode):
            name = str(getattr(node.node, "op_overload", None) or node.node.python_kernel_name)
            found.called.append(name.removeprefix("aten.").removeprefix("extern_kernels.").partition(".")[0])
            continue
        found.fused += 1
        accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
        for name, moved in accesses.items():
            buffer = lowered.graph_inputs.get(name) or lowered.name_to_buffer[name]
            found.moved.append((torch.Size(int(size) for size in buffer.get_size()), moved))
    return found
