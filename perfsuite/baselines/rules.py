"""Rules for the fields of a baseline file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from perfsuite.baselines.runs import QUANTILES, moment
from perfsuite.baselines.text import Fault, Where

Rule = Callable[[Any], str]
"""Return the expected form of a value; empty if the value has it."""
Rules = Mapping[str, Rule]

KEY_DIGITS = 12
"""Hex digits of the key of a session or an environment."""

_SHORTEST_S, _LONGEST_S = math.exp(-40), math.exp(40)
"""Range of times that can be used in computations."""

NONE: Rules = MappingProxyType({})


def check_fields(plain: Mapping[str, Any], required: Rules, optional: Rules, where: Where) -> None:
    """Raise Fault unless ``plain`` has all required fields, no unknown ones, and each follows its rule."""
    for name, value in plain.items():
        rule = required.get(name) or optional.get(name)
        if rule is None:
            raise Fault(f"{name} is not a field that belongs here", where=(*where, name))
        if expected := rule(value):
            raise Fault(f"{name}={json.dumps(value):.60} {expected}", where=(*where, name))
    if not required.keys() <= plain.keys():
        missing = ", ".join(sorted(required.keys() - plain.keys()))
        raise Fault(f"{missing} is missing", where=where)


def as_object(value: Any, where: Where) -> Mapping[str, Any]:
    """Return ``value`` if it is a JSON object.  Raises Fault otherwise."""
    if not isinstance(value, dict):
        raise Fault(f"{where[-1]} should be an object", where=where)
    return value


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and value else "should be a text that is not empty"


def _any_text(value: Any) -> str:
    return "" if isinstance(value, str) else "should be a text"


def _text_or_null(value: Any) -> str:
    return "" if value is None else _text(value)


def _true(value: Any) -> str:
    return "" if value is True else "should be true, or left out"


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "should be true or false"


def _object(value: Any) -> str:
    return "" if isinstance(value, dict) else "should be an object"


def _runs(value: Any) -> str:
    return "" if isinstance(value, list) and value else "should be a list of runs, not an empty one"


def _count(value: Any) -> str:
    return "" if type(value) is int and value >= 0 else "should be a whole number, 0 or more"


def _positive(value: Any) -> str:
    return "" if type(value) is int and value >= 1 else "should be a whole number, 1 or more"


def _share(value: Any) -> str:
    return "" if _is_number(value) and 0 <= value <= 1 else "should be a number from 0 to 1"


def _log_seconds(value: Any) -> str:
    fits = value is None or (_is_number(value) and -40 <= value <= 40)
    return "" if fits else "should be the natural logarithm of seconds, or null"


def _time(value: Any) -> str:
    try:
        moment(value)
    except (ValueError, TypeError, AttributeError):
        return "should be a UTC time such as 2025-11-21T02:44:12Z"
    return ""


def _hex(value: Any) -> str:
    fits = isinstance(value, str) and re.fullmatch(r"[0-9a-f]{8}", value)
    return "" if fits else "should be eight hex digits"


def _key(value: Any) -> str:
    fits = isinstance(value, str) and len(value) == KEY_DIGITS and value.isalnum()
    return "" if fits else f"should be {KEY_DIGITS} hex digits"


def _quantiles(value: Any) -> str:
    fits = (
        isinstance(value, list)
        and len(value) == len(QUANTILES)
        and all(_is_number(number) and _SHORTEST_S < number < _LONGEST_S for number in value)
        and sorted(value) == value
    )
    return "" if fits else f"should be {len(QUANTILES)} positive ascending numbers of seconds"


def _numbers(value: Any) -> str:
    fits = isinstance(value, dict) and all(_is_number(number) for number in value.values())
    return "" if fits else "should be an object of numbers"


def _one_of(*choices: str) -> Rule:
    return lambda value: "" if value in choices else f"should be {' or '.join(choices)}"


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or type(value) is int


DOCUMENT: Rules = MappingProxyType(
    {
        "benchmarks": lambda value: "" if isinstance(value, list) else "should be a list",
        "commit_info": _object,
        "datetime": _any_text,
        "environments": _object,
        "machine_info": _object,
        "perfsuite": _object,
        "sessions": _object,
        "unmeasured": lambda value: "" if isinstance(value, list) else "should be a list",
        "version": _text,
    }
)
HEADER: Rules = MappingProxyType(
    {
        "cases": _count,
        "check": _hex,
        "fingerprint": _text,
        "hardware": _object,
        "platform": _text,
        "schema": _positive,
        "simulated": _flag,
    }
)
UNMEASURED_CASE: Rules = MappingProxyType(
    {
        "check": _hex,
        "extra_info": _object,
        "fullname": _text,
        "group": _text_or_null,
        "name": _text,
        "options": _object,
        "param": _text_or_null,
        "params": _object,
        "runs": _runs,
    }
)
MEASURED_CASE: Rules = MappingProxyType({**UNMEASURED_CASE, "stats": _object})
EXTRA: Rules = MappingProxyType({"backend": _any_text, "metrics": _object, "workload": _text, "world_size": _positive})
EXTRA_OPTIONAL: Rules = MappingProxyType({"accepted": _object, "defaults": _object, "training": _object})
ACCEPTED: Rules = MappingProxyType({"reason": _text, "session": _text, "time": _time})
ACCEPTED_OPTIONAL: Rules = MappingProxyType({"kind": _one_of("improved", "environment")})
MEANING: Rules = MappingProxyType({"better": _one_of("higher", "lower", "neither"), "unit": _any_text})
MEANING_OPTIONAL: Rules = MappingProxyType({"own": _true})
SESSION_OPTIONAL: Rules = MappingProxyType({"boot": _text})
SESSION: Rules = MappingProxyType({"commit": _any_text, "environment": _key, "session": _text})
RUN_NAMES: Mapping[str, str] = MappingProxyType({"run": "ordinal"})
"""Fields of a run that have another name in :class:`~perfsuite.baselines.runs.RunSummary`."""
RUN: Rules = MappingProxyType({"session": _key, "time": _time})
"""Fields of every run; the session has the others."""
RUN_OPTIONAL: Rules = MappingProxyType(
    {"disturbance": _text, "process": _one_of("reused"), "reference": _true, "run": _positive}
)
"""Fields that a run leaves out if they have the default of the summary."""
UNMEASURED_RUN: Rules = MappingProxyType({**RUN, "outcome": _one_of("out_of_memory")})
SAMPLES: Rules = MappingProxyType(
    {"clean": _count, "location": _log_seconds, "metrics": _numbers, "quantiles_s": _quantiles, "samples": _positive}
)
"""Fields of every run with samples."""
SAMPLES_OPTIONAL: Rules = MappingProxyType(
    {
        "all_yardstick": _log_seconds,
        "clean_mean": _log_seconds,
        "clean_p95": _log_seconds,
        "control": _text,
        "cpu_share": _share,
        "throttled": _share,
        "iterations": _positive,
        "mean": _log_seconds,
        "yardstick": _log_seconds,
        "yardstick_mean": _log_seconds,
        "yardstick_p95": _log_seconds,
    }
)
MEASURED_RUN: Rules = MappingProxyType({**RUN, **SAMPLES})
MEASURED_OPTIONAL: Rules = MappingProxyType({**RUN_OPTIONAL, **SAMPLES_OPTIONAL})
