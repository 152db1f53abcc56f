"""Ways to spread a training step over ranks, by name; what each offers is in :mod:`.base`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.strategies.base import Strategy
from perfsuite.strategies.ddp import Ddp
from perfsuite.strategies.deepspeed.zero import Zero
from perfsuite.strategies.fsdp import Fsdp
from perfsuite.strategies.hybrid import Hybrid
from perfsuite.strategies.plan import Plan
from perfsuite.strategies.single import Single
from perfsuite.strategies.zero_redundancy import ZeroRedundancy

__all__ = ["STRATEGIES", "Plan", "Strategy", "find"]

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "single": Single(),
        "ddp": Ddp(),
        "fsdp": Fsdp(),
        "zero_redundancy": ZeroRedundancy(),
        "zero0": Zero(stage=0),
        "zero1": Zero(stage=1),
        "zero2": Zero(stage=2),
        "zero3": Zero(stage=3),
        "hybrid": Hybrid(),
    }
)
"""Every strategy by name, with its default options."""


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "bool": ((bool,), "True or False"),
        "int": ((int,), "a whole number"),
        "float": ((int, float), "a number"),
        "str": ((str,), "a text"),
    }
)
"""By the annotation of an option: types that its value may have, and how a message names them."""


def find(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy of this name, or ``module:Class`` of somebody else's, with some of its options set.

    Raises InvalidParameter for a name or option that there is not, and for options that contradict each other.
    """
    strategy = _imported(name) if ":" in name else STRATEGIES.get(name)
    if strategy is None:
        raise InvalidParameter(f"strategy {name!r} is unknown; {did_you_mean(name, STRATEGIES)}")
    if not options:
        return strategy
    known = [field.name for field in dataclasses.fields(strategy) if field.name != "stage"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise InvalidParameter(f"strategy {name} has no option {', '.join(unknown)}; {has}")
    for field in dataclasses.fields(strategy):
        if field.name in options:
            _require_kind(name, field, options[field.name])
    return dataclasses.replace(strategy, **options)


def _require_kind(strategy: str, field: dataclasses.Field[Any], value: object) -> None:
    """Raise InvalidParameter for a value of another kind than the option's: a text is true, whatever it says."""
    words = {word.strip() for word in str(getattr(field.type, "__name__", field.type)).split("|")}
    kinds = [_KINDS[word] for word in words - {"None"} if word in _KINDS]
    if (value is None and "None" in words) or not kinds or len(kinds) < len(words - {"None"}):
        return
    if not any(type(value) in types for types, _ in kinds):
        choices = ", ".join(choice for _, choice in kinds)
        raise InvalidParameter(f"{field.name}={value!r} of strategy {strategy} is of another kind; choose {choices}")


def _imported(name: str) -> Strategy:
    """Somebody else's strategy with its default options; InvalidParameter where there is none."""
    module, _, attribute = name.partition(":")
    try:
        maker = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise InvalidParameter(
            f"strategy {name!r}: {module} cannot be imported ({error}); put it on sys.path"
        ) from None
    if not (isinstance(maker, type) and issubclass(maker, Strategy)):
        raise InvalidParameter(f"strategy {name!r} is no subclass of perfsuite.strategies.Strategy; name one")
    return maker()
