"""The C++ part as a Python module, loaded once per process."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from simmusa.build import NAME, ensure_built


@functools.lru_cache(maxsize=1)
def native() -> Any:
    """Return the built extension; raise UnsupportedCase if it cannot be built."""
    spec = importlib.util.spec_from_file_location(NAME, ensure_built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
