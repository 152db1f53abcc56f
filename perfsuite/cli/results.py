"""RESULTS as subcommands take them: journals, baseline files and, where they are of use, histories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import open_regular, why
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline
from perfsuite.journal import Journal, read_journal
from perfsuite.platforms import Catalog
from perfsuite.record.codec import plain_json
from perfsuite.reports.stored import stored_result
from perfsuite.reports.tables.case import from_result
from perfsuite.reports.tables.recording import Recording, recording_of

_LONGEST_HEADER = 1 << 24


def read_results(path: Path) -> Journal | Baseline:
    """A journal or a baseline file; PerfsuiteError when it is neither, or damaged."""
    require_file(path, "a journal or a baseline file")
    first = first_object(path)
    is_journal = path.suffix == ".jsonl" if first is None else "header" in first
    return read_journal(path) if is_journal else store.read(path)


def require_file(path: Path, kinds: str) -> None:
    """Raise ConfigurationError, which names the kinds of files that are of use, unless there is a file."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is no file; give {kinds}")


def first_object(path: Path) -> Mapping[str, Any] | None:
    """The JSON object on the first line; None where there is none: a baseline file has no object on one line alone."""
    try:
        with open_regular(path) as file:
            first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {why(error)}") from None
    try:
        plain = plain_json(first)
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else {}


def read_run(path: Path, catalog: Catalog) -> Recording:
    """The results in a journal or baseline file, as tables take them; PerfsuiteError as :func:`read_results`."""
    results = read_results(path)
    if isinstance(results, Journal):
        return _run_of_journal(results, catalog)
    return _run_of_baseline(path, results, catalog)


def _run_of_journal(journal: Journal, catalog: Catalog) -> Recording:
    header = journal.header
    return recording_of(
        journal.results.values(),
        name=str(journal.path),
        platform=header.platform,
        fingerprint=header.fingerprint,
        missing=journal.record.missing,
        versions=header.versions,
        device=catalog.models.get(header.platform),
    )


def _run_of_baseline(path: Path, baseline: Baseline, catalog: Catalog) -> Recording:
    hardware = baseline.hardware
    entries = (entry for _, entry in sorted(baseline.entries.items()))
    about: dict[str, Any] = {
        "platform": hardware.platform,
        "fingerprint": hardware.fingerprint,
        "simulated": hardware.simulated,
    }
    return Recording(
        name=f"{path}, newest run of each case",
        cases=tuple(from_result(stored_result(entry, hardware)) for entry in entries),
        environment=baseline.newest.environment if baseline.newest else {},
        versions=baseline.versions,
        device=catalog.models.get(hardware.platform),
        **about,
    )
