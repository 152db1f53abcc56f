"""A bare ``--benchmark-compare`` means this machine's baseline, where the session has perf cases and nothing else.

pytest-benchmark loads what it compares with before collection, when it is not known which tests there are.  So a bare
option is taken from it and given back, with the file where there is one, once collection is done.
"""

from __future__ import annotations

import pytest

from perfsuite.plugin.collect import is_case
from perfsuite.plugin.gate_options import gate_options_key
from perfsuite.plugin.state import suite_key

bare_key = pytest.StashKey[bool]()


def take_bare_option(config: pytest.Config) -> None:
    """Take a bare option from pytest-benchmark for now."""
    config.stash[bare_key] = config.getoption("benchmark_compare", None) is True
    if config.stash[bare_key]:
        config.option.benchmark_compare = None


def give_bare_option_back(session: pytest.Session) -> None:
    """Give it back: with this machine's file, or as it was."""
    config = session.config
    # pytest-benchmark has no public way to say later what to compare with.
    benchmarks = getattr(config, "_benchmarksession", None)
    if not config.stash.get(bare_key, False) or benchmarks is None:
        return
    perf = any(is_case(item) for item in session.items)
    plain = any("benchmark" in getattr(item, "fixturenames", ()) and not is_case(item) for item in session.items)
    suite = config.stash.get(suite_key, None)
    config.option.benchmark_compare = True
    if perf and not plain and suite is not None and suite.session is not None:
        from perfsuite.baselines.baseline import Hardware
        from perfsuite.baselines.store import path_of

        hardware = Hardware(platform=suite.machine.name, fingerprint=suite.session.fingerprint, key={})
        folder = config.stash[gate_options_key].folder_for(simulated=suite.machine.simulated)
        file = path_of(folder, hardware)
        if file.exists():
            config.option.benchmark_compare = str(file)
    benchmarks.compare = config.option.benchmark_compare
    benchmarks.handle_loading()
