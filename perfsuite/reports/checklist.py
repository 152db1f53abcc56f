"""The tuning checklist of report 004, answered from results, with evidence and advice.

A line without results names the command that measures them.  If the report has no threshold, the answer names
perfsuite's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural, significant
from perfsuite.platforms import DeviceModel
from perfsuite.platforms.detection import family_class
from perfsuite.platforms.quirks import numbers
from perfsuite.reports.ids import token_of
from perfsuite.reports.stored import Recording
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.recording import gathered
from perfsuite.suite import runnable

Verdict = Literal["yes", "no", "not measured", "does not apply"]
MOST_COMMUNICATION = 0.30  # Share of a step, of the report.
LEAST_UTILISATION_PERCENT = 80.0  # Of the report.
LEAST_BATCH = 0.5  # Share of the largest batch that fits; perfsuite's own threshold.
LEAST_LINK = 0.5  # Share of the peak of a node's network; perfsuite's own threshold.
BATCH_TOKENS = (500_000, 4_000_000)  # Global batch of a GPT, of the report.
BATCH_SAMPLES = (256, 4096)  # Global batch of a vision model, of the report.
_PERF = "pytest test_perf"
_NOISE = 0.02  # Relative difference up to which two cases of one session are equal.
_WIDE, _HALF = ("fp32", "tf32"), ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class ChecklistLine:
    """The answer to one line of the list."""

    line: str = ""
    verdict: Verdict
    evidence: str = ""
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The input of the answers."""

    cases: Sequence[TableCase]  # Measured or not, of one platform.
    worker: Mapping[str, Any]  # Versions of torch's libraries, as a rank reported them.
    device: DeviceModel | None = None  # The platform's row; None for an unknown platform.

    @property
    def training(self) -> list[TableCase]:
        """Measured steps, without searches for a batch."""
        return [case for case in self.cases if case.workload == "TrainStep" and "samples_per_s" in case.values]


def facts_of(recordings: Sequence[Recording]) -> Facts:
    """Return the input of the answers; ConfigurationError for results of several machines."""
    machines = {recording.run.hardware: recording for recording in recordings}
    if len(machines) > 1:
        raise ConfigurationError(f"results of several machines, {', '.join(machines)}; give those of one")
    worker: dict[str, object] = {}
    for recording in recordings:
        worker.update(recording.run.environment.get("driver") or {})
        worker.update(recording.run.environment.get("worker") or {})
    return Facts(cases=gathered(recordings, None).cases, worker=worker, device=recordings[-1].device)


def answers(facts: Facts) -> Iterator[ChecklistLine]:
    """Every line of the list in the report's order."""
    for line, command, judge in _LINES:
        found = judge(facts) or ChecklistLine(verdict="not measured")
        if found.verdict == "not measured" and not found.advice:
            found = replace(found, advice=f"{runnable(command)} measures it")
        yield replace(found, line=line)


# -- the lines ---------------------------------------------------------------------------------------------------


def _library(facts: Facts) -> ChecklistLine | None:
    family = family_class(facts.device.family) if facts.device else None
    if family is None:
        return None
    name, floor = family.backend, family.least_library_version
    version = str(facts.worker.get(name, "unknown"))
    if not floor:
        library = f"{name} {version}" if version != "unknown" else name
        return ChecklistLine(verdict="does not apply", evidence=f"{library}: 2.18 is a version of another library")
    if not numbers(version):
        return None
    evidence, advice = f"{name} {version}, {floor} asked for", f"install {name} {floor} or newer"
    return _answer(numbers(version) >= numbers(floor), evidence, advice)


def _flash(facts: Facts) -> ChecklistLine | None:
    flash = [case for case in facts.training if _set(case, "attention") == "flash"]
    if not flash:
        return None
    evidence = f"{plural(len(flash), 'case')} with attention=flash"
    pairs = _twins(facts.training, flash, ("attention",), lambda other: _set(other, "attention") == "math")
    if not pairs:
        return ChecklistLine(verdict="yes", evidence=evidence)
    case, other = min(pairs, key=lambda pair: _gain(*pair))
    evidence += f"; at least {_ratio(case, other)} times the samples/s of attention=math ({_token(case)})"
    return _answer(not _is_slower(case, other), evidence, "set attention=math for such lengths")


def _precision(facts: Facts) -> ChecklistLine | None:
    cases = [case for case in facts.training if case.settings.get("dtype") in (*_WIDE, *_HALF)]
    half = [case for case in cases if case.settings["dtype"] in _HALF]
    if not cases:
        return None
    evidence = f"{len(half)} of {plural(len(cases), 'training case')} in bf16 or fp16"
    if not half:
        return _answer(False, evidence, "train in dtype=bf16 (fp16 scales the loss) if it is native")
    pairs = _twins(cases, half, ("dtype", "options"), lambda other: other.settings["dtype"] in _WIDE)
    if not pairs:
        return ChecklistLine(verdict="yes", evidence=evidence)
    case, other = max(pairs, key=lambda pair: _gain(*pair))
    dtypes = f"{case.settings['dtype']} has {_ratio(case, other)} times the samples/s of {other.settings['dtype']}"
    evidence += f"; {dtypes} ({_token(case)})"
    advice = "16 bits gain nothing: perfsuite platforms says if they are native"
    return _answer(not _is_slower(case, other), evidence, advice)


def _checkpointing(facts: Facts) -> ChecklistLine | None:
    on = [case for case in facts.training if _set(case, "checkpointing") != "none"]
    if not on:
        return None
    evidence = f"{plural(len(on), 'case')} with checkpointing"
    name = "checkpointing"
    for case, other in _twins(facts.training, on, (name,), lambda other: _set(other, name) == "none"):
        peaks = [one.values.get("peak_gib") for one in (case, other)]
        if peaks[0] and peaks[1]:
            memory = f"{_set(case, name)}: {significant(peaks[0] / peaks[1], 3)} of the peak memory"
            evidence += f"; {memory} and {_ratio(case, other)} times the samples/s ({_token(case)})"
            break
    return ChecklistLine(verdict="yes", evidence=evidence)


def _batch(facts: Facts) -> ChecklistLine | None:
    if not facts.training:
        return None
    shares, beyond = [], []
    for case in facts.cases:
        largest = case.values.get("largest_local_batch_samples")
        alike = [other for other in facts.training if largest and _same_memory(case, other)]
        if largest and alike:
            used = max(float(other.settings.get("local_batch_size", 0)) for other in alike)
            if used > largest:  # it was looked for within a budget, --perf-memory-budget
                beyond.append(f"{_token(case)}: {used:g} samples ran, {largest:g} fit the budget of the search")
            else:
                shares.append((used / largest, f"{_token(case)}: {used:g} of {largest:g} samples that fit"))
    within, ranged = _in_range(facts.training)
    if not shares:
        return ChecklistLine(verdict="not measured", evidence="; ".join([*beyond[:1], ranged]))
    share, nearest = min(shares)
    evidence = f"{nearest}; at least {LEAST_BATCH:.0%} asked for; {ranged}"
    if share < LEAST_BATCH:
        return _answer(False, evidence, "raise micro_batch_size towards the largest that fits")
    return _answer(within, evidence, "choose global_batch_size within that range")


def _in_range(training: Sequence[TableCase]) -> tuple[bool, str]:

    def size(case: TableCase) -> float:
        samples = float(case.settings.get("global_batch_size", 0))
        return samples * float(case.settings.get("sequence_length", 1)) if "vocabulary" in case.settings else samples

    language = [case for case in training if "vocabulary" in case.settings]
    case = max(language or training, key=size)
    (low, high), unit = (BATCH_TOKENS, "tokens") if language else (BATCH_SAMPLES, "samples")
    text = f"largest global batch {size(case):,.0f} {unit} ({_token(case)}), {low:,} to {high:,} asked for"
    return low <= size(case) <= high, text


def _same_memory(largest: TableCase, other: TableCase) -> bool:
    names = ("model", "ranks", "strategy", "dtype", "checkpointing")
    return all(largest.settings.get(name) == other.settings.get(name) for name in names)


def _overlap(facts: Facts) -> ChecklistLine | None:
    def overlaps(case: TableCase) -> object:
        options = case.parameters.get("options")
        return options.get("overlap") if isinstance(options, Mapping) else None

    on = [case for case in facts.training if overlaps(case) is True]
    pairs = _twins(facts.training, on, ("options",), lambda other: overlaps(other) is False)
    if not pairs:
        return None
    case, other = pairs[0]
    evidence = f"{_ratio(case, other)} times the samples/s of overlap=False ({_token(case)})"
    if (by_vendor := facts.worker.get("fsdp2_overlap")) is not None:
        evidence += f"; FSDP: {by_vendor}"
    advice = "overlap gains nothing here: look at the trace (--perf-trace) and at the size of the buckets"
    return _answer(not _is_slower(case, other), evidence, advice)


def _network(facts: Facts) -> ChecklistLine | None:
    reached = [(case.values["busbw_gb_per_s"], case) for case in facts.cases if "busbw_gb_per_s" in case.values]
    between = [(busbw, case) for busbw, case in reached if (case.settings.get("nodes") or 1) > 1]
    if not reached:
        return None
    busbw, case = max(between or reached, key=lambda pair: pair[0])
    evidence = f"{significant(busbw, 3)} GB/s bus bandwidth ({_token(case)}, {plural(case.ranks, 'rank')})"
    if not between:
        advice = "start the suite on every host (perfsuite docs clusters)"
        return ChecklistLine(verdict="not measured", evidence=f"within one host alone: {evidence}", advice=advice)
    evidence = f"between {case.settings['nodes']} hosts: {evidence}"
    peak = facts.device.network if facts.device else None
    if peak is None:
        return ChecklistLine(verdict="yes", evidence=f"{evidence}; no peak of a node's network is published here")
    share = busbw / peak.value
    evidence += f", {share:.0%} of the {peak.value:g} GB/s of a node's network"
    evidence += f"; {LEAST_LINK:.0%} asked for" * (share < LEAST_LINK)
    advice = "larger messages (1GiB), the topology (perfsuite env) and the library's settings (-k library_setting)"
    return _answer(share >= LEAST_LINK, evidence, advice)


def _utilisation(facts: Facts) -> ChecklistLine | None:
    name = "device_utilisation_percent"
    shares = [(case.values[name], case) for case in facts.training if name in case.values]
    if shares:
        advice = "larger batches, loader processes (-k loaders), compiled blocks (-k compiled)"
        unit = "% utilisation"
        return _worst(shares, LEAST_UTILISATION_PERCENT, below=False, unit=unit, advice=advice)
    reasons = {case.reasons[name] for case in facts.training if name in case.reasons}
    command = runnable(f"{_PERF} -k 'ddp or fsdp'")
    advice = f"pip install 'perfsuite[telemetry]'; {command} measures it on an accelerator"
    evidence = "; ".join(sorted(reasons))
    return ChecklistLine(verdict="not measured", evidence=evidence, advice=advice) if reasons else None


def _communication(facts: Facts) -> ChecklistLine | None:
    several = [case for case in facts.training if case.ranks > 1 and "communication_share" in case.values]
    shares = [(100 * case.values["communication_share"], case) for case in several]
    if not shares:
        return None
    advice = "overlap, larger buckets or batches, compressed gradients (-k 'overlap or bucket or compression')"
    unit = "% of the step exposed to communication"
    return _worst(shares, 100 * MOST_COMMUNICATION, below=True, unit=unit, advice=advice)


_LINES: tuple[tuple[str, str, Callable[[Facts], ChecklistLine | None]], ...] = (
    ("the communication library is new enough (2.18)", f"{_PERF}/test_collectives.py -k all_reduce", _library),
    ("flash attention is on", f"{_PERF}/test_long_sequences.py -k attention", _flash),
    ("mixed precision is on", f"{_PERF} -k llama2", _precision),
    ("gradient checkpointing is set up", f"{_PERF}/test_options.py -k checkpointing", _checkpointing),
    ("the batch is near the largest that fits", f"{_PERF} -k 'largest_batch or checkpointing or overlap'", _batch),
    ("communication overlaps with computation", f"{_PERF}/test_options.py -k overlap", _overlap),
    ("the network's bandwidth was tested", f"{_PERF}/test_collectives.py -k all_reduce", _network),
    ("device utilisation is above 80 %", f"{_PERF} -k 'ddp or fsdp'", _utilisation),
    ("communication takes less than 30 %", f"{_PERF} -k 'ddp or fsdp'", _communication),
)
"""Lines in the report's order: text, command that measures it, function that answers it."""


# -- comparing ---------------------------------------------------------------------------------------------------


def _twins(
    cases: Sequence[TableCase],
    chosen: Sequence[TableCase],
    differs: tuple[str, ...],
    is_other: Callable[[TableCase], bool],
) -> list[tuple[TableCase, TableCase]]:
    """Each chosen case with one that is set up alike but for the parameters in ``differs``."""

    def key(case: TableCase) -> tuple[object, ...]:
        kept = sorted((name, repr(value)) for name, value in case.parameters.items() if name not in differs)
        return (case.fingerprint, case.case.partition("[")[0], case.ranks, tuple(kept))

    others = {key(case): case for case in cases if is_other(case)}
    return [(case, others[key(case)]) for case in chosen if key(case) in others]


def _set(case: TableCase, name: str) -> str:
    return str(case.settings.get(name, "none"))


def _gain(case: TableCase, other: TableCase) -> float:
    return case.values["samples_per_s"] / other.values["samples_per_s"]


def _is_slower(case: TableCase, other: TableCase) -> bool:
    return _gain(case, other) < 1 - _NOISE


def _token(case: TableCase) -> str:
    return token_of(case.case, case.platform)


def _ratio(case: TableCase, other: TableCase) -> str:
    return significant(_gain(case, other), 3)


def _worst(
    shares: Sequence[tuple[float, TableCase]], limit: float, *, below: bool, unit: str, advice: str
) -> ChecklistLine:
    wrong = [value for value, _ in shares if (value >= limit if below else value <= limit)]
    value, case = max(shares, key=lambda pair: pair[0]) if below else min(shares, key=lambda pair: pair[0])
    evidence = f"{significant(value, 3)} {unit} at worst ({_token(case)}, {plural(case.ranks, 'rank')})"
    evidence += f"; {len(shares) - len(wrong)} of {plural(len(shares), 'case')} within {limit:g} %"
    return _answer(not wrong, evidence, advice)


def _answer(good: bool, evidence: str, advice: str) -> ChecklistLine:
    return ChecklistLine(verdict="yes" if good else "no", evidence=evidence, advice="" if good else advice)
