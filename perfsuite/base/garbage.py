"""Python's search for garbage, put off while many records are made that all stay.

It looks through what there is again and again as that grows: a fifth of the time of a journal of 10,000 cases.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Nothing that is made in here is searched for garbage before its end; also a decorator.

    For what ends soon: a read, a report.  Inside of itself it does nothing more.
    """
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
