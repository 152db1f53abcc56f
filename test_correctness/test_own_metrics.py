"""Metrics of one's own: what a record may say, how it is combined, kept, shown and judged."""

import dataclasses
import fnmatch
import json
import math
from datetime import datetime, timezone

import pytest

from perfsuite.base.errors import CaseError, InvalidParameter
from perfsuite.baselines.baseline import Baseline
from perfsuite.baselines.document import dumps, loads
from perfsuite.baselines.draft import Draft, NewRuns
from perfsuite.baselines.runs import MetricMeaning
from perfsuite.gate.comparable import gate_case
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.gate.quantity import rule_for
from perfsuite.history.file import line_of, read_line
from perfsuite.metrics import REGISTRY, derive
from perfsuite.plugin.benchmark import extra_info
from perfsuite.record.codec import from_json, to_json
from perfsuite.record.describe import describe, headline, word
from perfsuite.record.own_metrics import RESERVED, OwnMetric, registered
from perfsuite.record.result import Peaks, Record, Work
from test_correctness.helpers.gate_runs import WOBBLE, case_of, jitter, node_of, run_of, settle, stored_runs
from test_correctness.helpers.histories import session
from test_correctness.helpers.report_runs import gpt
from test_correctness.helpers.stored_files import HARDWARE
from test_correctness.test_runtime_parts import put_together, report_of

MEMORY = OwnMetric(name="memory", unit="GiB", better="lower")
BANDWIDTH = OwnMetric(name="bandwidth", unit="GB/s", better="higher")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": " a"}, "without spaces at the ends"),
        ({"name": "a\nb"}, "printable"),
        ({"name": "x" * 101}, "1 to 100"),
        ({"name": 3}, "name is 3"),
        ({"name": "time"}, "a name of perfsuite's own records"),
        ({"name": "backend"}, "a name of perfsuite's own records"),
        ({"name": "a", "unit": 3}, "unit of a is 3"),
        ({"name": "a", "better": "smaller"}, "use higher, lower, neither"),
        ({"name": "a", "reduce": "median"}, "use max, min, mean, sum, equal, only"),
        ({"name": "a", "over": "first"}, "use last, mean, max, min, sum"),
        ({"name": "a", "better": "lower", "tolerance": 5}, "0.05 for 5 %"),
        ({"name": "a", "better": "lower", "tolerance": math.nan}, "0.05 for 5 %"),
        ({"name": "a", "better": "lower", "tolerance": "5%"}, "0.05 for 5 %"),
        ({"name": "a", "tolerance": 0.1}, "needs a direction"),
        ({"name": "a", "better": "lower", "floor": 1.0}, "is for exact metrics"),
        ({"name": "a", "exact": True, "floor": -1.0}, "at least 0"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_rule(fields, told):
    with pytest.raises(InvalidParameter) as refused:
        OwnMetric(**fields)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "name", ["memory", "memory/max_reserved(GiB)", "throughput(tps)", "val loss", "mfu(%)", "Speicher-Größe", "内存"]
)
def test_names_as_other_tools_have_them_are_names_here(name):
    assert OwnMetric(name=name).name == name


def test_the_worst_rank_counts_where_nothing_else_is_said():
    assert ("min", "max", "max") == (BANDWIDTH.reduce, MEMORY.reduce, OwnMetric(name="a").reduce)


def test_what_a_plugin_registers_is_metrics_each_name_once():
    assert (MEMORY, BANDWIDTH) == registered([[MEMORY], (BANDWIDTH, MEMORY), []])
    with pytest.raises(InvalidParameter, match="registers memory twice"):
        registered([[MEMORY], [dataclasses.replace(MEMORY, unit="MiB")]])
    for wrong in ({"memory": "GiB"}, "memory", None):
        with pytest.raises(InvalidParameter, match=r"return a list of perfsuite\.OwnMetric"):
            registered([wrong])


def reports(*values, **fields):
    metric = OwnMetric(name="a", **fields)
    plain = dataclasses.asdict(metric)
    return [
        report_of(rank, records={} if value is None else {"a": [value, metric.unit, metric.reduce, plain]})
        for rank, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"better": "lower"}, 3.0),
        ({"better": "higher"}, 1.0),
        ({"reduce": "mean"}, 2.0),
        ({"reduce": "sum"}, 4.0),
        ({"reduce": "min"}, 1.0),
    ],
)
def test_ranks_are_combined(fields, expected):
    (record,) = put_together(*reports(1.0, None, 3.0, **fields)).records
    assert record.value == expected
    assert record.metric == OwnMetric(name="a", **fields)


def test_ranks_that_mean_two_things_fail_the_case():
    both = [*reports(1.0, unit="GiB"), *reports(1.0, 1.0, unit="MB")[1:]]
    with pytest.raises(CaseError, match=r"ranks 0 and 1 record a in two ways: unit 'GiB'.*unit 'MB'"):
        put_together(*both)


def test_metrics_of_one_s_own_follow_those_of_the_case():
    measurement = put_together(*reports(2.0, 3.0, unit="GiB", better="lower", over="mean"))
    time, own = derive(("latency_us",), work=Work(), measurement=measurement, peaks=Peaks())
    assert time.name == "latency_us"
    assert (own.name, own.value, own.unit, own.better) == ("a", 3.0, "GiB", "lower")
    assert own.convention == "max over ranks, mean over iterations"


def test_no_name_of_pytest_benchmark_s_extra_info_is_overwritten():
    assert set(extra_info(gpt("a", 2, 1e-3))) - {metric.name for metric in gpt("a", 2, 1e-3).metrics} <= RESERVED


def runs_with(values):
    """Stored runs with these metrics; each value moves with the run by half a per cent."""
    return tuple(
        dataclasses.replace(run, metrics={name: value * (1 + wobble) for name, value in values.items()})
        for run, wobble in zip(stored_runs(), reversed(WOBBLE), strict=True)
    )


def meanings(*metrics):
    return {metric.name: MetricMeaning(unit=metric.unit, better=metric.better, own=metric) for metric in metrics}


def case_with(then, *metrics, name="a", known=None, **fields):
    """A case with stored runs of these metrics; ``known``: those that are recorded now."""
    case = case_of(name, metrics=meanings(*(metrics if known is None else known)))
    stored = {"stored": runs_with(then), "stored_metrics": meanings(*metrics)}
    return GateCase(case=case, specs=REGISTRY, **{**stored, **fields})


def settled(given, now):
    """The gate's verdicts on cases whose time is as stored, whose metrics are ``now``, in their order."""
    gate = Gate(given)

    def new(name, number):
        metrics = {name: value * (1 + jitter(number + 2)) for name, value in now.items()}
        return run_of(jitter(number), number=number, metrics=metrics)

    for number, case in enumerate(given):
        gate.add(case.case.node, new("", number))
    settle(gate, new)
    return list(gate.verdicts().values())


THEN = {"memory": 2.1, "bandwidth": 40.1}
MORE = {**THEN, "memory": 2.1 * 1.12}


def gated(now, *metrics, then=THEN, **fields):
    metrics = metrics or (MEMORY, BANDWIDTH)
    known = [metric for metric in metrics if metric.name in now]
    (verdict,) = settled([case_with(then, *metrics, known=known, **fields)], now)
    return verdict


@pytest.mark.parametrize(
    ("now", "headlines", "words"),
    [
        (MORE, ("REGRESSED memory 2.1", "GiB, +12"), ("regressed +12", " memory")),
        ({**THEN, "bandwidth": 40.1 * 0.75}, ("REGRESSED bandwidth 40", "GB/s, -2"), ("regressed -2", " bandwidth")),
    ],
    ids=["more memory", "less bandwidth"],
)
def test_a_worse_metric_in_the_same_time_is_a_regression_with_its_words(now, headlines, words):
    verdict = gated(now)
    assert verdict.name == "regressed"
    assert verdict.decisive.quantity == words[1].strip()
    assert headline(verdict).startswith(headlines[0])
    assert headlines[1] in headline(verdict)
    assert word(verdict).startswith(words[0])
    assert word(verdict).endswith(words[1])


def test_the_effect_on_a_bandwidth_is_of_the_bandwidth_itself():
    verdict = gated({**THEN, "bandwidth": 40.1 * 0.75})
    assert 0.24 < verdict.decisive.effect < 0.26
    assert "level -2" in describe(verdict)


def test_memory_in_another_environment_is_worse_and_not_slower():
    changes = ("packages.torch 2.13.0, stored 2.12.0",)
    verdict = gated({"memory": MORE["memory"]}, MEMORY, environment_changes=changes, stored_metrics={})
    assert verdict.name == "environment"
    assert verdict.reasons[0].startswith("worse than stored; no base was run; different from the stored runs: packages")


@pytest.mark.parametrize("now", [THEN, {"memory": 1.8, "bandwidth": 50.0}], ids=["nothing changed", "all better"])
def test_nothing_is_said_where_nothing_changed_or_all_is_better(now):
    verdict = gated(now)
    assert verdict.name == "pass"
    assert [finding.quantity for finding in verdict.findings] == ["time"]
    assert not [flag for flag in verdict.flags if "memory" in flag or "bandwidth" in flag]


def test_the_marker_and_the_registration_say_what_is_accepted():
    loose = dataclasses.replace(MEMORY, tolerance=0.2)
    assert gated(MORE, loose, BANDWIDTH).name == "pass"
    assert gated(MORE, metric_tolerances={"memory": 0.2}).name == "pass"
    assert gated(MORE, loose, BANDWIDTH, metric_tolerances={"memory": 0.05}).fails


RETRIES = OwnMetric(name="retries", better="lower")
COUNTED = dataclasses.replace(RETRIES, exact=True, floor=2.0)
VERDICTS = {
    "no longer recorded": (
        ({"bandwidth": 40.1}, THEN, MEMORY, BANDWIDTH),
        "inconclusive",
        "*memory was 2.1 GiB in the newest stored run and was not recorded now: not compared*",
    ),
    "new": (
        (THEN, {"memory": 2.1}, MEMORY, BANDWIDTH),
        "pass",
        "bandwidth is not judged yet: 0 of the 5 stored runs that a comparison needs have it",
    ),
    "no direction": (
        ({"memory": 3.0}, {"memory": 2.1}, OwnMetric(name="memory", unit="GiB")),
        "pass",
        "memory is not judged: it has no better direction; give better='lower' or 'higher'",
    ),
    "bandwidth of nothing": (
        ({**THEN, "bandwidth": 0.0}, THEN, MEMORY, BANDWIDTH),
        "regressed",
        "bandwidth is 0, stored 40.12 GB/s: it fell to 0 or below",
    ),
    "memory of nothing was not measured": (({**THEN, "memory": 0.0}, THEN, MEMORY, BANDWIDTH), "inconclusive", ""),
    "as many as none": (
        ({"retries": 0.0}, {"retries": 0.0}, RETRIES),
        "pass",
        "*retries is judged by its range alone*",
    ),
    "more than none": (
        ({"retries": 7.0}, {"retries": 0.0}, RETRIES),
        "inconclusive",
        "*stored 0: values of 0 and below have no relative change*",
    ),
    "exact up to its floor": (({"retries": 2.0}, {"retries": 0.0}, COUNTED), "pass", ""),
    "exact above its floor": (({"retries": 3.0}, {"retries": 0.0}, COUNTED), "regressed", ""),
    "bytes scatter unless they are exact": (
        ({"sent": 1.01e6}, {"sent": 1e6}, OwnMetric(name="sent", unit="bytes", better="lower")),
        "pass",
        "",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_says_what_became_of_a_metric(name):
    (now, then, *metrics), expected, said = VERDICTS[name]
    verdict = gated(now, *metrics, then=then)
    assert verdict.name == expected
    lines = {"pass": verdict.flags, "inconclusive": verdict.reasons[:1]}.get(expected, verdict.reasons)
    assert not said or fnmatch.filter(lines, said)


def test_an_exact_metric_is_judged_by_one_run():
    sent = OwnMetric(name="sent", unit="bytes", better="lower", exact=True)
    stored = tuple(dataclasses.replace(run, metrics={"sent": 1000.0}) for run in stored_runs()[:2])
    for value, expected in ((1000.0, "learning"), (1001.0, "regressed")):
        gate = Gate([case_with({}, sent, stored=stored)])
        gate.add(node_of(), run_of(metrics={"sent": value}))
        assert gate.verdict(node_of()).name == expected


@pytest.mark.parametrize(("sessions", "now", "expected"), [(0.0, 0.12, "regressed"), (0.03, 0.04, "inconclusive")])
def test_all_cases_with_more_memory_are_no_host_unless_sessions_move_so_far(sessions, now, expected):
    moved = [sessions * sign for sign in (1, -1, 0.5, -0.5, 1, -1, 0.5, -0.5)]
    stored = tuple(
        dataclasses.replace(run, metrics={"memory": run.metrics["memory"] * (1 + shift)})
        for run, shift in zip(runs_with({"memory": 2.1}), moved, strict=True)
    )
    given = [case_with({}, MEMORY, name=f"c{index}", stored=stored) for index in range(10)]
    assert {expected} == {verdict.name for verdict in settled(given, {"memory": 2.1 * (1 + now)})}


NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)


def stored_with(*metrics):
    """A file with a case that has these metrics, as it is read again."""
    draft = Draft(mode="append", reason="", session_runs=4)
    new = NewRuns(case=case_of(metrics=meanings(*metrics)), runs=runs_with({"memory": 2.1})[:5])
    baseline = Baseline(hardware=HARDWARE, entries=draft.apply({}, [new]))
    return loads(dumps(baseline).encode())


def offer(stored, *metrics, mode="append"):
    draft = Draft(mode=mode, reason="a smaller unit", session_runs=4)
    new = NewRuns(case=case_of(metrics=meanings(*metrics)), runs=(run_of(metrics={"memory": 2150.0}),))
    return draft, draft.apply(stored.entries, [new])


def test_a_file_says_which_metrics_are_one_s_own():
    (entry,) = stored_with(MEMORY).entries.values()
    assert entry.case.metrics["memory"].own == MEMORY


def test_another_unit_is_not_compared_and_not_stored_beside(tmp_path):
    stored = stored_with(MEMORY)
    case = case_of(metrics=meanings(dataclasses.replace(MEMORY, unit="MiB")))
    given = gate_case(case, environment={}, baseline=stored, hardware=HARDWARE, folder=tmp_path, now=NOW)
    assert given.refusal is None  # the time is compared all the same
    gate = Gate([dataclasses.replace(given, flags=())])
    gate.add(node_of(), run_of(metrics={"memory": 2150.0}))
    verdict = gate.verdict(node_of())
    assert verdict.name == "inconclusive"
    assert "memory is in MiB (lower is better) now, stored in GiB (lower is better): not compared" in describe(verdict)
    draft, entries = offer(stored, dataclasses.replace(MEMORY, unit="MiB"))
    assert "memory is in MiB" in draft.refused[node_of()]
    assert entries == stored.entries
    _, entries = offer(stored, dataclasses.replace(MEMORY, unit="MiB"), mode="accept")
    (entry,) = entries.values()
    assert [{"memory": 2150.0}] == [dict(run.metrics) for run in entry.kept]


def test_a_damaged_record_is_a_value_error_as_every_damage_is():
    plain = to_json(Record(name="memory", value=2.1, unit="GiB", reduce="max", metric=MEMORY))
    assert from_json(Record, plain).metric == MEMORY
    for field, wrong in (("name", "a\x1b[2J"), ("better", "smaller"), ("tolerance", -1.0), ("unit", 3)):
        with pytest.raises(ValueError, match="Record"):
            from_json(Record, {**plain, "metric": {**plain["metric"], field: wrong}})


def test_an_older_record_is_no_metric():
    assert Record(name="loss", value=1.0, unit="", reduce="mean").metric is None
    assert "memory" not in REGISTRY


def test_a_history_keeps_unit_and_direction():
    one = session(own={"memory": MetricMeaning(unit="GiB", better="lower")})
    assert read_line(line_of(one).encode()).own == one.own
    plain = json.loads(line_of(one))
    for wrong in (["GiB"], "GiB", ["GiB", "smaller"], [3, "lower"]):
        with pytest.raises(ValueError, match=r"HistorySession\.own\.memory"):
            read_line(json.dumps({**plain, "own": {"memory": wrong}}).encode())
    del plain["own"]
    assert read_line(json.dumps(plain).encode()).own == {}  # a line of an earlier version


FORMULAS_OF_THE_TIME = {
    *("tflops", "tflops_per_device", "gb_per_s", "latency_us", "algbw_gb_per_s", "busbw_gb_per_s", "step_time_s"),
    *("samples_per_s", "samples_per_s_per_device", "tokens_per_s", "tokens_per_s_per_device"),
    *("six_n_tflops_per_device", "palm_tflops_per_device", "megatron_tflops_per_device"),
    *("colossalai_tflops_per_device", "mfu_percent", "hfu_percent"),
}


def test_every_metric_of_perfsuite_is_judged_or_says_why_not():
    """Each is a formula of the time, exact, judged beside the time, or observed with its reason in docs metrics."""
    judged = {name for name, spec in REGISTRY.items() if not spec.observed}
    meaning = {name: MetricMeaning(unit=REGISTRY[name].unit, better="lower") for name in judged}
    exact = {name for name in judged if rule_for(name, meaning[name], REGISTRY)}
    beside = {"pair_us", "slowest_pair_us", "pair_gb_per_s", "slowest_pair_gb_per_s"}
    assert beside == judged - exact - FORMULAS_OF_THE_TIME
    assert {"communication_bytes", "final_loss", "peak_memory_gib"} <= exact


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "pass"), (1.6, "regressed")])
def test_a_pair_that_got_slow_while_the_round_did_not_is_found(factor, expected):
    meaning = {"slowest_pair_us": MetricMeaning(unit="us", better="lower")}
    given = GateCase(case=case_of(metrics=meaning), specs=REGISTRY, stored=runs_with({"slowest_pair_us": 50.0}))
    (verdict,) = settled([given], {"slowest_pair_us": 50.0 * factor})
    assert verdict.name == expected
