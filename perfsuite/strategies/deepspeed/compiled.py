"""Kernels that DeepSpeed compiles when they are first wanted, by one process at a time."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import why_not_private


@contextmanager
def compiling(root: Path) -> Iterator[Path]:
    """The folder below ``root`` in which only this process compiles meanwhile, for this torch and this Python.

    torch's own lock is a file that stays when its maker is killed, and all later ones wait for it without end.  Here
    the system's lock on a file of ours tells who compiles, and ends with its process: a lock of torch's was left over.
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
    """Load what DeepSpeed's ``builder`` makes; compiled where it was not, which may take minutes."""
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
