"""The decorators of a test function: ``@sizes``, ``@world_sizes``, ``@dtypes`` and ``@acceptance``.

Each is a pytest mark with data only, so it works on functions, classes and modules (``pytestmark``) of any repository.
:mod:`perfsuite.plugin.sweep` checks the data at collection, where an error can print the file and the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from perfsuite.base.errors import ConfigurationError

SIZES = "perf_sizes"
WORLD_SIZES = "perf_world_sizes"
DTYPES = "perf_dtypes"
ACCEPTANCE = "perf_acceptance"

Size = str | int | tuple[int, ...]
"""A size in a decorator: ``"64MiB"``, ``"1024x1024x512"``, ``(1024, 1024, 512)``, ``4096`` or a name (``gpt_345m``)."""


def _mark(name: str, **data: Any) -> pytest.MarkDecorator:
    mark: pytest.MarkDecorator = getattr(pytest.mark, name)
    return mark(decorated=True, **data)


def sizes(
    *,
    full: Sequence[Size],
    small: Sequence[Size],
    param: str = "message_bytes",
    extended: Sequence[Size] = (),
    ranks: Callable[[Any], int] | None = None,
) -> pytest.MarkDecorator:
    """Set the sizes of a test at both scales, for its argument ``param``.

    ``full``: sizes as published, for accelerators.  ``small``: sizes for two CPU cores.  ``--perf-scale`` chooses.
    A parameter whose name ends in ``_bytes`` gets a number of bytes: ``"64MiB"`` becomes 67108864.  Another parameter
    gets ``"AxBxC"`` as a tuple of integers, and an integer or a name unchanged.  ``extended``: small sizes that get the
    marker ``perf_extended``.  ``ranks`` returns the number of ranks of a size that fixes it, such as a mesh.
    """
    return _mark(SIZES, full=full, small=small, param=param, extended=tuple(extended), ranks=ranks)


def world_sizes(
    *counts: int,
    extended: Sequence[int] = (),
    more: Literal[False, True, "whole"] = False,
    full: Sequence[int] | None = None,
) -> pytest.MarkDecorator:
    """Set the numbers of ranks of a test; the test takes ``perf_ranks`` and calls ``perf`` with ``on=perf_ranks``.

    ``extended``: numbers with the marker ``perf_extended``, left out at the small scale unless -k, -m or a node id
    selects them.  ``more=True`` continues by doubling up to 256, and adds all ranks of the launch, or all devices of
    the host; ``more="whole"`` adds only all of them.  ``--perf-world-sizes`` replaces the added numbers.  ``full``:
    numbers at the full scale (default: the same).
    """
    _require_call("world_sizes", "2, 4, 8", counts)
    return _mark(
        WORLD_SIZES, counts=counts, extended=tuple(extended), more=more, full=None if full is None else tuple(full)
    )


def dtypes(*names: str, only_at: Size | None = None) -> pytest.MarkDecorator:
    """Set the dtypes of a test by short names (fp32, tf32, bf16, fp16, int8, ...), for its argument ``dtype``.

    With ``only_at`` the first dtype runs at every size and the others only at that size.
    """
    _require_call("dtypes", '"fp32", "bf16"', names)
    return _mark(DTYPES, names=names, only_at=only_at)


def acceptance(*sizes: Size) -> pytest.MarkDecorator:
    """Add cases of a test to the acceptance run (``-m acceptance``).

    These are the cases of the largest world size that can run, in the first dtype, at the first of ``sizes`` that the
    scale in use has (default: all sizes).
    """
    _require_call("acceptance", '"1GiB"', sizes)
    return _mark(ACCEPTANCE, sizes=sizes)


def _require_call(decorator: str, example: str, values: tuple[Any, ...]) -> None:
    # With a bare @world_sizes pytest would collect the mark instead of the test.
    if any(callable(value) for value in values):
        name = getattr(values[0], "__qualname__", values[0])
        raise ConfigurationError(f"@{decorator} above {name} has no values; write for example @{decorator}({example})")
