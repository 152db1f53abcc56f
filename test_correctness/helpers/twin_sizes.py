"""Training steps as small as their twins: what DTensor finds out about the shapes of one serves the other.

A rank finds out once for each operation and shape how DTensor spreads it, which is most of the time of a short test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from perfsuite.base.mesh import MeshShape
from perfsuite.models import find


def as_its_twin(model: str, mesh: str = "", **overrides: Any) -> dict[str, Any]:
    """Model, sizes and micro-batch of a training step without stages on a mesh: those of its own twin."""
    of_twin = find(model, overrides).twin(MeshShape.parse(mesh) if mesh else None)
    plain = find(model)
    names = [field.name for field in dataclasses.fields(plain) if field.name != "name"]
    sizes = {name: getattr(of_twin, name) for name in names if getattr(of_twin, name) != getattr(plain, name)}
    return {"model": model, "overrides": sizes, "micro_batch_size": 2}
