"""Settings of a training program besides its model, such as encoders and checkpoints; all are off by default.

A published time or memory covers a whole program.  Two runs of one model and strategy are comparable only if these
settings agree too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.models.base import Model, Sampled
from perfsuite.models.encoders import Encoders, find_encoders
from perfsuite.record.workload import ITEM_BYTES

_EMA_DTYPES = ("none", "fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Settings of one training program."""

    encoders: str = "none"
    """Frozen encoders that compute the model's inputs from pixels and words in every step: a key of
    :data:`perfsuite.models.encoders.ENCODERS`. Every rank holds them whole, in the case's dtype."""
    ema: str = "none"
    """Moving average of the weights after every step: none, or its dtype.  Each rank averages the weights it holds."""
    ema_on_host: bool = False  # Keep the average in host memory.
    clip: float | None = None  # Largest L2 norm of all gradients together; None: gradients are not clipped.
    loss_scale: float | None = None  # Fixed loss scale in fp16; None: a dynamic one.
    logs: bool = False  # Average the loss of every step over the ranks and read it on the host.
    saves: bool = False  # Write weights, optimizer state and average to a file in every step.

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Program:
        """Return the program with these settings.

        Raises InvalidParameter for an unknown setting or an invalid value.

        >>> Program.of({"ema": "fp32"}).ema
        'fp32'
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in names:
                raise InvalidParameter(f"program: setting {name!r} is unknown; {did_you_mean(name, names)}")
        return cls(**settings)

    def __post_init__(self) -> None:
        if self.ema not in _EMA_DTYPES:
            raise InvalidParameter(f"program: ema={self.ema!r} is unknown; choose {', '.join(_EMA_DTYPES)}")
        if self.ema_on_host and self.ema == "none":
            raise InvalidParameter("program: ema_on_host needs a moving average; set ema, for example 'fp32'")
        for name in ("clip", "loss_scale"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise InvalidParameter(f"program: {name}={value!r} is not valid; choose a number above 0, or None")
        for name in ("ema_on_host", "logs", "saves"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"program: {name}={getattr(self, name)!r} is not valid; choose True or False")

    def require(self, model: Model, dtype: str) -> None:
        """Raise InvalidParameter if a case with this model and dtype cannot have these settings."""
        self.find_encoders(model)
        if self.loss_scale is not None and dtype != "fp16":
            raise InvalidParameter(
                f"program: loss_scale={self.loss_scale:g} has no effect with dtype={dtype!r}; choose fp16, or None"
            )

    def find_encoders(self, model: Model) -> Encoders | None:
        """Return the frozen encoders before ``model``, or None."""
        return find_encoders(self.encoders, model)

    def inputs(self, model: Model) -> Sampled:
        """Return the owner of a data set's samples: the model, or its encoders' inputs."""
        encoders = self.find_encoders(model)
        return model if encoders is None else encoders.inputs(model)  # type: ignore[arg-type] # encoders go with a Dit

    def frozen_flops(self, model: Model) -> float:
        """Return the operations of the encoders for one sample."""
        encoders = self.find_encoders(model)
        return 0.0 if encoders is None else encoders.forward_flops(model)  # type: ignore[arg-type] # as above

    def encoders_bytes(self, model: Model, dtype: str) -> int:
        """Return the bytes of the encoders on one rank."""
        encoders = self.find_encoders(model)
        return 0 if encoders is None else encoders.parameters * ITEM_BYTES[dtype]

    @property
    def ema_bytes(self) -> int:
        """Bytes of the average on the device, per number of the weights that a rank holds."""
        return 0 if self.ema == "none" or self.ema_on_host else ITEM_BYTES[self.ema]

    @property
    def spans(self) -> tuple[str, ...]:
        """Names of the step's parts that these settings add."""
        chosen = {
            "encoders": self.encoders != "none", "ema": self.ema != "none", "logging": self.logs, "saving": self.saves,
        }  # fmt: skip
        return tuple(name for name, on in chosen.items() if on)
