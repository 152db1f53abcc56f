"""A pytest plugin that writes what every collected case would hand to the ranks, a line of JSON each, and runs nothing.

``pytest test_perf -p test_correctness.helpers.collected_workloads --collected=FILE -k s4000 --perf-project`` reaches
the cases of a platform that is not here too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfsuite.plugin.collect import is_case
from perfsuite.plugin.fixtures import state_key
from perfsuite.runtime.values import recorded


def pytest_addoption(parser):
    parser.addoption("--collected", type=Path, help="file that is written")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Hand the test something that only takes down what perf was given, and skips the test."""
    if not is_case(pyfuncitem):
        return (yield)

    def write(what, world_size, why_not):
        told = {
            "case": pyfuncitem.nodeid,
            "test": pyfuncitem.originalname,
            "platform": pyfuncitem.funcargs["perf_platform"].name,
            "workload": type(what).__name__,
            "parameters": recorded(what.parameters()) if what else {},
            "world_size": world_size,
            "why_not": why_not,
        }
        with pyfuncitem.config.getoption("--collected").open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

    def take_down(what, on=1):
        write(what, getattr(on, "world_size", on), pyfuncitem.stash[state_key].unfit)
        pytest.skip("taken down")

    pyfuncitem.funcargs["perf"] = take_down
    return (yield)
