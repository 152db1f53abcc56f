"""A bare ``--benchmark-compare`` means this machine's baseline, where the session has perf cases and nothing else.

pytest-benchmark loads what it compares with before collection, when it is not known which tests there are.  So a bare
option is taken from it and given back, with the file where there is one, once collection is done.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.plugin.collect import is_case
from perfsuite.plugin.gate_options import gate_options_key
from perfsuite.plugin.state import suite_key

bare_key = pytest.StashKey[bool]()
apart_key = pytest.StashKey[list[str]]()
"""Lines on cases that were not compared, because they ran with other settings."""


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


def leave_out_changed(session: pytest.Session) -> None:
    """Take cases that ran with other settings out of what pytest-benchmark compares with, before it compares.

    Where nothing is left that ``--benchmark-compare-fail`` could fail for, the run is a usage error.
    """
    config = session.config
    files = getattr(getattr(config, "_benchmarksession", None), "compared_mapping", None) or {}
    suite = config.stash.get(suite_key, None)
    if not files or suite is None or suite.session is None:
        return
    from perfsuite.baselines.runs import CaseIdentity
    from perfsuite.baselines.summarise import case_of

    said = config.stash.setdefault(apart_key, [])
    for path, stored in files.items():
        for node in stored.keys() & suite.session.results.keys():
            extra = stored[node].get("extra_info", {})
            parameters = extra.get("parameters", stored[node].get("params") if "workload" in extra else None)
            now = case_of(suite.session.results[node])
            if parameters is None:  # a file that an earlier version saved
                continue
            then = CaseIdentity(
                node=node,
                world_size=extra["world_size"],
                backend=extra["backend"],
                parameters=parameters,
                workload=extra.get("workload", now.workload),
                defaults=extra.get("defaults", {}),
            )
            changed = "; ".join(f"{name}: {old} -> {new}" for name, new, old in now.changed(then))
            if changed:
                del stored[node]
                said.append(f"not compared with {Path(str(path)).name}: {node}: {changed}")
    ran = [bench.fullname for bench in config._benchmarksession.benchmarks]  # type: ignore[attr-defined]
    common = any(name in stored for stored in files.values() for name in ran)
    if said and not common and config.getoption("benchmark_compare_fail", None) and not session.exitstatus:
        said.append("--benchmark-compare-fail: no case was compared; compare with a file of the same settings")
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
