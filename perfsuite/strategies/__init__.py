"""Strategies: ways to spread a training step over ranks, by name; :mod:`.base` defines their interface."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Plan
from perfsuite.record.workload import Rank
from perfsuite.strategies.base import Strategy
from perfsuite.strategies.data_parallel import Ddp, Fsdp, ZeroRedundancy
from perfsuite.strategies.deepspeed.zero import Zero
from perfsuite.strategies.hybrid import Hybrid

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

__all__ = ["STRATEGIES", "Plan", "Strategy", "find"]


class Single(Strategy):
    """Plain torch on one rank."""

    name: ClassVar[str] = "single"

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter for more than one rank."""
        if shape.world_size != 1:
            raise InvalidParameter(
                f"strategy single runs on 1 rank, the case has {shape.world_size}; choose ddp, fsdp or zero1 for more"
            )

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any]:
        """Return no fields: nothing is spread."""
        return {}

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return a trainer of the whole model with AdamW."""
        from perfsuite.strategies.trainer import Trainer, make_optimizer, new_whole_module

        module = new_whole_module(rank, plan)
        return Trainer(rank, plan, module=module, optimizer=make_optimizer(module, plan))


STRATEGIES: Mapping[str, Strategy] = {
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
"""Every strategy by name, with its default options."""


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
}
"""Annotation of an option -> types of its value, and their words in a message."""


def find(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """Return the strategy of this name or ``module:Class`` with options set; InvalidParameter if one is invalid."""
    strategy = _imported(name) if ":" in name else STRATEGIES.get(name)
    if strategy is None:
        raise InvalidParameter(f"strategy {name!r} is unknown; {did_you_mean(name, STRATEGIES)}")
    if not options:
        return strategy
    names = [field.name for field in dataclasses.fields(strategy) if field.name != "stage"]
    if unknown := sorted(set(options) - set(names)):
        has = f"choose from {', '.join(names)}" if names else "it has none"
        raise InvalidParameter(f"strategy {name} has no option {', '.join(unknown)}; {has}")
    for field in dataclasses.fields(strategy):
        if field.name in options:
            _require_kind(name, field, options[field.name])
    return dataclasses.replace(strategy, **options)


def _require_kind(strategy: str, field: dataclasses.Field[Any], value: object) -> None:
    """Raise InvalidParameter for a value of a wrong type; a text such as "False" would count as true."""
    words = {word.strip() for word in str(getattr(field.type, "__name__", field.type)).split("|")}
    kinds = [_KINDS[word] for word in words - {"None"} if word in _KINDS]
    if (value is None and "None" in words) or not kinds or len(kinds) < len(words - {"None"}):
        return
    if not any(type(value) in types for types, _ in kinds):
        choices = ", ".join(choice for _, choice in kinds)
        raise InvalidParameter(f"{field.name}={value!r} of strategy {strategy} has a wrong type; choose {choices}")


def _imported(name: str) -> Strategy:
    """Return a user's strategy with its default options; raises InvalidParameter if there is none."""
    module, _, attribute = name.partition(":")
    try:
        maker = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise InvalidParameter(
            f"strategy {name!r}: {module} cannot be imported ({error}); put it on sys.path"
        ) from None
    if not (isinstance(maker, type) and issubclass(maker, Strategy)):
        raise InvalidParameter(f"strategy {name!r} is not a subclass of perfsuite.strategies.Strategy; name one")
    return maker()
