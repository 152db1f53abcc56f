"""How a workload travels to the ranks: the name under which a module holds its code, and its parameters as values."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from perfsuite.record.workload import FunctionWorkload, Workload
from perfsuite.runtime.held import Holder, find
from perfsuite.runtime.transports.base import Message
from perfsuite.runtime.values import decode, encode


def refer(workload: Workload, rootpath: Path, test_module: str = "") -> Message:
    """The JSON form of ``workload``; raises InvalidParameter when it cannot travel.

    ``test_module`` names the module of the test: a decorator from elsewhere may have given the object its own module.
    """
    carrier = _carrier(workload)
    holder = Holder(rootpath=rootpath, test_module=test_module)
    where = holder.name(carrier)
    path = where["attribute"]
    return {
        "function": isinstance(workload, FunctionWorkload),
        **where,
        "fields": {name: encode(value, holder, f"{path}({name}=...)") for name, value in workload.parameters().items()},
        "sys_path": list(_resolved(tuple(sys.path), os.getcwd())),
    }


@functools.lru_cache(maxsize=1)
def _resolved(search_path: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The import path as another process can use it.  The same for every case: to follow the links takes 1 ms.

    An entry that is no file may be one that an editable install's finder knows by its name: it stays as it is.
    """
    return tuple(str(Path(entry).resolve()) if os.path.exists(entry or folder) else entry for entry in search_path)


def describe(workload: Workload) -> str:
    """``module:Class`` or ``module:function``, for the record."""
    carrier = _carrier(workload)
    return f"{carrier.__module__}:{carrier.__qualname__}"


def resolve(reference: Message) -> Workload:
    """The workload that :func:`refer` described, made anew on a rank."""
    for entry in reference["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    carrier = find(reference)
    fields = {name: decode(value) for name, value in reference["fields"].items()}
    if reference["function"]:
        return FunctionWorkload(function=carrier, arguments=fields)
    workload = carrier(**fields)
    assert isinstance(workload, Workload)
    return workload


def _carrier(workload: Workload) -> Any:
    return workload.function if isinstance(workload, FunctionWorkload) else type(workload)
