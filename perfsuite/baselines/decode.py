"""Document -> baseline: check every field of a file, and print a wrong one with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.baselines import rules
from perfsuite.baselines.baseline import KEPT_RUNS, Acceptance, Baseline, CaseKey, Entry, Hardware, newest
from perfsuite.baselines.rules import as_object, check_fields
from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary
from perfsuite.baselines.sessions import REFERENCE_MOST
from perfsuite.baselines.text import CASE_LISTS, Fault, Where, check_of, header_of
from perfsuite.record.codec import from_json
from perfsuite.record.own_metrics import OwnMetric
from perfsuite.record.result import Training

SCHEMA = 2
"""Version of the file format; a reader refuses others."""

Plain = Mapping[str, Any]


def decode(document: Plain) -> Baseline:
    """Return the baseline of a document.  Raises Fault with the value and the broken rule."""
    header = _header(document)
    sources = _sources(document)
    entries: dict[CaseKey, Entry] = {}
    for name in CASE_LISTS:
        for index, plain in enumerate(document[name]):
            where = (name, index)
            entry = _decode_entry(as_object(plain, where), sources, where, measured=name == "benchmarks")
            if entry.case.key in entries:
                raise Fault(f"the case {entry.case.node} with these parameters occurs twice", where=where)
            entries[entry.case.key] = entry
    if header["cases"] != len(entries):
        raise Fault(
            f"the header has cases={header['cases']}, the file has {len(entries)}: some were removed or added by hand",
            where=("perfsuite",),
        )
    if header["check"] != check_of(header_of(document)):
        raise Fault("the header was changed by hand after perfsuite wrote it", where=("perfsuite",))
    hardware = Hardware(
        platform=header["platform"],
        fingerprint=header["fingerprint"],
        key=header["hardware"],
        simulated=header["simulated"],
    )
    return Baseline(
        hardware=hardware, entries=entries, commit_info=document["commit_info"], machine_info=document["machine_info"]
    )


def _header(document: Plain) -> Plain:
    header = document.get("perfsuite")
    if not isinstance(header, dict):
        origin = "pytest-benchmark's own" if "benchmarks" in document else "not a benchmark file"
        raise Fault(f'there is no "perfsuite" object: the file is foreign ({origin}), perfsuite did not write it')
    schema = header.get("schema")
    if type(schema) is int and schema != SCHEMA:
        rule = f"newer than {SCHEMA}, the newest that this perfsuite knows; upgrade perfsuite"
        if schema < SCHEMA:
            rule = f"older than {SCHEMA}, the only one that this perfsuite reads; store runs anew"
        raise Fault(f"schema {schema} is {rule}", where=("perfsuite",))
    check_fields(header, rules.HEADER, rules.NONE, ("perfsuite",))
    check_fields(document, rules.DOCUMENT, rules.NONE, ())
    return header


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Fields that all runs of one session share."""

    session: str
    commit: str
    boot: str
    environment: Plain


def _sources(document: Plain) -> Mapping[str, _Source]:
    environments = document["environments"]
    for key, environment in environments.items():
        as_object(environment, ("environments", key))
    sources = {}
    for key, plain in document["sessions"].items():
        where = ("sessions", key)
        check_fields(as_object(plain, where), rules.SESSION, rules.SESSION_OPTIONAL, where)
        if plain["environment"] not in environments:
            raise Fault(f"environment {plain['environment']} is not among the file's environments", where=where)
        sources[key] = _Source(
            session=plain["session"],
            commit=plain["commit"],
            boot=plain.get("boot", ""),
            environment=environments[plain["environment"]],
        )
    return sources


def _decode_entry(plain: Plain, sources: Mapping[str, _Source], where: Where, *, measured: bool) -> Entry:
    check_fields(plain, rules.MEASURED_CASE if measured else rules.UNMEASURED_CASE, rules.NONE, where)
    extra = plain["extra_info"]
    check_fields(extra, rules.EXTRA, rules.EXTRA_OPTIONAL, (*where, "extra_info"))
    meanings = {}
    for name, meaning in extra["metrics"].items():
        inside = (*where, "extra_info", "metrics", name)
        check_fields(as_object(meaning, inside), rules.MEANING, rules.MEANING_OPTIONAL, inside)
        plain_meaning = {"unit": meaning["unit"], "better": meaning["better"]}
        try:
            own = OwnMetric(name=name, **plain_meaning) if "own" in meaning else None
        except InvalidParameter as unusable:
            raise Fault(str(unusable), where=inside) from None
        meanings[name] = MetricMeaning(**plain_meaning, own=own)
    accepted = None
    if "accepted" in extra:
        check_fields(extra["accepted"], rules.ACCEPTED, rules.ACCEPTED_OPTIONAL, (*where, "extra_info", "accepted"))
        accepted = Acceptance(**extra["accepted"])
    runs, reference = _decode_runs(plain["runs"], sources, (*where, "runs"))
    if plain["check"] != check_of(plain):
        raise Fault(
            f"{plain['fullname']} was changed by hand after perfsuite wrote it: its check does not match", where=where
        )
    case = CaseIdentity(
        node=plain["fullname"],
        world_size=extra["world_size"],
        backend=extra["backend"],
        parameters=plain["params"],
        workload=extra["workload"],
        group=plain["group"],
        metrics=meanings,
        defaults=extra.get("defaults", {}),
        training=_training(extra["training"], (*where, "extra_info", "training")) if "training" in extra else None,
    )
    return Entry(case=case, runs=runs, accepted=accepted, reference=reference)


def _training(plain: Any, where: Where) -> Training:
    try:
        return from_json(Training, plain)
    except ValueError as wrong:
        raise Fault(str(wrong), where=where) from None


def _decode_runs(
    plain: Sequence[Any], sources: Mapping[str, _Source], where: Where
) -> tuple[tuple[RunSummary, ...], tuple[RunSummary, ...]]:
    kept = tuple(_decode_run(run, sources, (*where, index)) for index, run in enumerate(plain))
    reference = tuple(run for run, fields in zip(kept, plain, strict=True) if fields.get("reference"))
    once = len({run.key for run in kept}) == len(kept)
    runs = newest(kept) if once else ()
    if len({run.key for run in (*runs, *reference)}) < len(kept) or len(reference) > REFERENCE_MOST:
        raise Fault(
            f"{len(kept)} runs; a case has at most {KEPT_RUNS}, each once, and a reference of {REFERENCE_MOST}",
            where=where,
        )
    return runs, reference


def _decode_run(plain: Any, sources: Mapping[str, _Source], where: Where) -> RunSummary:
    fields = as_object(plain, where)
    measured = "outcome" not in fields
    if measured:
        check_fields(fields, rules.MEASURED_RUN, rules.MEASURED_OPTIONAL, where)
    else:
        check_fields(fields, rules.UNMEASURED_RUN, rules.RUN_OPTIONAL, where)
    source = sources.get(fields["session"])
    if source is None:
        raise Fault(f"session {fields['session']} is not among the file's sessions", where=where)
    clean, samples, location = fields.get("clean", 0), fields.get("samples", 0), fields.get("location")
    if clean > samples or (location is None) != (clean == 0):
        raise Fault(f"clean={clean} contradicts samples={samples} and location={location}", where=where)
    own = {rules.RUN_NAMES.get(name, name): fields[name] for name in fields if name not in ("reference", "session")}
    own["quantiles_s"] = tuple(fields.get("quantiles_s", ()))
    return RunSummary(
        session=source.session, commit=source.commit, boot=source.boot, environment=source.environment, **own
    )
