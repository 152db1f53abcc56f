"""Options of the suite that ships, beside those of the plugin."""

from __future__ import annotations


def pytest_addoption(parser):
    parser.getgroup("perfsuite").addoption(
        "--perf-data", metavar="DIR", help="data sets of your own, a folder per model; see test_perf/test_train_step.py"
    )
