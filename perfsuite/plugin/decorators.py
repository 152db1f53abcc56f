"""What a test author writes over a test function: ``@sizes``, ``@world_sizes``, ``@dtypes`` and ``@acceptance``.

Each is a pytest mark that carries data and nothing else, so it works on functions, classes and modules (``pytestmark``)
of any repository.  The data is checked at collection, where the error can name the file and the function; see
:mod:`perfsuite.plugin.sweep`.
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
"""As an author writes it: ``"64MiB"``, ``"1024x1024x512"``, ``(1024, 1024, 512)``, ``4096``, a name (``gpt_345m``)."""


def sizes(
    *,
    full: Sequence[Size],
    small: Sequence[Size],
    param: str = "message_bytes",
    extended: Sequence[Size] = (),
    ranks: Callable[[Any], int] | None = None,
) -> pytest.MarkDecorator:
    """Sizes of a test at both scales, handed to its argument ``param``.

    ``full`` are the sizes as published, ``small`` those that take minutes on two CPU cores; the platform or
    ``--perf-scale`` chooses.  A parameter whose name ends in ``_bytes`` takes sizes in bytes (``"64MiB"`` arrives as
    67108864); otherwise ``"AxBxC"`` arrives as a tuple of integers, an integer as it is, and any other word that begins
    with a letter or a digit (``2D_8x1x1``) as that word.
    Cases of the ``extended`` ones among the small sizes carry the marker of that name, see :func:`world_sizes`.
    Where the size says the number of ranks, as a mesh does, ``ranks`` tells it of the argument's value: the case is
    selected and skipped by it.
    """
    mark: pytest.MarkDecorator = getattr(pytest.mark, SIZES)
    return mark(full=full, small=small, param=param, extended=tuple(extended), ranks=ranks)


def world_sizes(
    *counts: int,
    extended: Sequence[int] = (),
    more: Literal[False, True, "whole"] = False,
    full: Sequence[int] | None = None,
) -> pytest.MarkDecorator:
    """Numbers of ranks that a test runs on; the test takes ``ranks`` and passes it to ``perf`` as ``on=ranks``.

    Cases of the ``extended`` ones among them carry the marker of that name: at the small scale they are left out unless
    -k, -m or a node id selects them.  With ``more`` further numbers follow what there is: doubled up to 256, then the
    ranks of the launch or the devices of the host; ``--perf-world-sizes`` names others instead.
    ``more="whole"`` adds that last number alone, as an extended case at the small scale unless it is asked for.  For a
    platform that is not here it is the devices of its maker's host; simulated devices share one host's cores and add
    none.
    ``full`` are the numbers at the full scale where they are others; none where other tests have them.
    """
    _require_call("world_sizes", "2, 4, 8", counts)
    mark: pytest.MarkDecorator = getattr(pytest.mark, WORLD_SIZES)
    return mark(counts=counts, extended=tuple(extended), more=more, full=None if full is None else tuple(full))


def dtypes(*names: str, only_at: Size | None = None) -> pytest.MarkDecorator:
    """Short dtype names (fp32, tf32, bf16, fp16, int8, ...) that a test runs in, handed to its argument ``dtype``.

    With ``only_at`` the first dtype runs at every size and the others at that size alone; where the scale in use does
    not have the size, only the first one runs.
    """
    _require_call("dtypes", '"fp32", "bf16"', names)
    mark: pytest.MarkDecorator = getattr(pytest.mark, DTYPES)
    return mark(names=names, only_at=only_at)


def acceptance(*sizes: Size) -> pytest.MarkDecorator:
    """Cases of the acceptance run (``-m acceptance``): they get the marker of that name.

    These are the cases of the largest world size that there is room for, in the first dtype, at the first of ``sizes``
    that the scale in use has; without any at all sizes.
    """
    _require_call("acceptance", '"1GiB"', sizes)
    mark: pytest.MarkDecorator = getattr(pytest.mark, ACCEPTANCE)
    return mark(sizes=sizes)


def _require_call(decorator: str, example: str, values: tuple[Any, ...]) -> None:
    # A bare @world_sizes would swallow the test: pytest would collect the mark in its place.
    if any(callable(value) for value in values):
        name = getattr(values[0], "__qualname__", values[0])
        raise ConfigurationError(f"@{decorator} above {name} has no values; write for example @{decorator}({example})")
