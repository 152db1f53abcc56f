"""Shipped rows hold to peaks and siblings; only an equal key matches; verdicts at their limits; rows that are wrong."""

import importlib
import itertools
import pkgutil

import pytest

import perfsuite.workloads
from perfsuite.base.errors import ConfigurationError
from perfsuite.expectations.judge import answer_lines, judge_one, software_of, unused_line, verdict_of
from perfsuite.expectations.rows import AtLeast, load_expectations, shipped_rows
from perfsuite.metrics import REGISTRY
from perfsuite.platforms import load_catalog
from perfsuite.record.result import Metric
from test_correctness.helpers.measurements import measurement_of, rank_facts, result_of

MODULES = [
    importlib.import_module(f"perfsuite.workloads.{found.name}")
    for found in pkgutil.iter_modules(perfsuite.workloads.__path__)
    if found.name != "training"
]
WORKLOADS = {name: one for module in MODULES for name, one in vars(module).items() if isinstance(one, type)}
MODELS = load_catalog().models
SHARED_UPLINK = ("a100_40gb", "HostDeviceCopy", 8)
ONE_LINK_OF_SEVEN = ("mi300x", "AllReduce", 2)
"""Figures that are true and below a quarter of the peak."""

ROW = """
[[expectation]]
platform = "h200"
workload = "AllReduce"
parameters = { message_bytes = "3GiB", dtype = "fp32" }
ranks_per_node = 8
metric = "busbw_gb_per_s"
unit = "GB/s"
kind = "measured"
low = 441.8
high = 466.3
date = "2026-07"
source = "a page"
"""
WHOLE = tuple(line for line in ROW.splitlines() if "=" in line)


def peak_of(row):
    model = MODELS[row.platform]
    if row.metric == "tflops":
        return model.tflops[row.parameters.get("dtype", "fp8")]
    if row.metric == "busbw_gb_per_s":
        return model.link
    return model.host_link if row.workload == "HostDeviceCopy" else model.memory_bandwidth


def read(tmp_path, text):
    file = tmp_path / "own.toml"
    file.write_text(text)
    return load_expectations([file], MODELS)[len(shipped_rows()) :]


def valued(value, metric="busbw_gb_per_s", **changes):
    """A result with the key of ROW."""
    return result(parameters={"message_bytes": 3 << 30, "dtype": "fp32"}, values={metric: value}, **changes)


def result(workload="perfsuite.workloads.collective:AllReduce", *, ranks=8, hosts=1, platform="h200", **changes):
    values = changes.pop("values", {"busbw_gb_per_s": 450.0})
    of_ranks = [rank_facts(rank, host=f"node{rank * hosts // ranks}", device=f"cuda:{rank}") for rank in range(ranks)]
    metrics = [
        Metric(name=name, value=value, unit=REGISTRY[name].unit, better=REGISTRY[name].better)
        for name, value in values.items()
    ]
    facts = {"workload": workload, "platform": platform, "parameters": {"message_bytes": 1 << 30, "dtype": "fp32"}}
    return result_of(measurement_of([1.0], of_ranks), f"test_it[{platform}]", metrics=metrics, **{**facts, **changes})


# -- the shipped rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", shipped_rows(), ids=lambda row: row.place.rpartition(" ")[2])
def test_a_shipped_row_is_a_case_that_can_be_measured_at_a_rate_that_is_possible(row):
    fields = {name: value.count if isinstance(value, AtLeast) else value for name, value in row.parameters.items()}
    workload = WORKLOADS[row.workload](**fields)
    assert row.metric in workload.metrics
    peak = peak_of(row)
    if peak is None or peak.kind == "nominal":
        return
    most = 1.25 if row.workload == "AllReduce" else 1.05  # switches that add send less than the ring that busbw counts
    least = 0.25 if row.nodes == 1 and known(row) not in (SHARED_UPLINK, ONE_LINK_OF_SEVEN) else 0.05
    assert least <= row.low / peak.value
    assert row.highest / peak.value <= most


def known(row):
    return (row.platform, row.workload, row.ranks_per_node)


def test_shipped_shares_of_the_peak_of_like_rows_are_within_a_factor_of_two():
    """As between siblings: a unit, a factor of 8 devices or both directions together would show."""
    like = {}
    for row in shipped_rows():
        peak = peak_of(row)
        exceptional = row.nodes > 1 or known(row) in (SHARED_UPLINK, ONE_LINK_OF_SEVEN)  # a network has other peaks
        if peak is not None and row.kind == "measured" and not exceptional:
            size = tuple(str(value) for name, value in row.parameters.items() if name.endswith("_bytes"))
            group = (row.workload, row.parameters.get("dtype"), size, row.metric)
            like.setdefault(group, []).append((row.low / peak.value, row.place))
    apart = {group: (min(shares), max(shares)) for group, shares in like.items() if min(shares)[0] * 2 < max(shares)[0]}
    assert {} == apart
    assert any(len(shares) > 5 for shares in like.values())


def test_a_floor_is_below_every_measured_row_of_the_device_at_the_same_work():
    for row, other in itertools.permutations(shipped_rows(), 2):
        if row.kind == "floor" and other.kind == "measured" and row.key == other.key:
            assert row.low <= other.low, f"{row.place} and {other.place}"


def test_platforms_without_a_public_figure_have_none():
    assert {row.platform for row in shipped_rows()}.isdisjoint({"s4000", "s5000", "s80", "s3000", "ascend910b"})


# -- matching ----------------------------------------------------------------------------------------------------


def test_an_equal_key_is_judged():
    (entry,) = judge_one(result(), shipped_rows())
    assert ("pass", 463.58) == (entry.verdict, entry.low)
    assert entry.speed == pytest.approx(450 / 463.58)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ranks": 4}, "message_bytes 8GiB instead of 1GiB"),
        ({"ranks": 16, "hosts": 2}, "nodes 1 instead of 2"),
        ({"parameters": {"message_bytes": 1 << 29, "dtype": "fp32"}}, "instead of 512MiB"),
        ({"parameters": {"message_bytes": 1 << 30, "dtype": "bf16"}}, "dtype fp32 instead of bf16"),
        ({"platform": "s4000"}, "no expectation for s4000 AllReduce"),
        ({"outcome": "out_of_memory"}, "out of memory"),
        ({"simulated": True}, "no expectation for h200 AllReduce"),
    ],
)
def test_another_key_is_not_judged_and_the_nearest_row_is_named(changes, told):
    (entry,) = judge_one(result(**changes), shipped_rows())
    assert "not judged" == entry.verdict
    assert told in entry.reason
    assert () == entry.rows


def test_defaults_are_part_of_the_key():
    copy = "perfsuite.workloads.memory_bandwidth:HostDeviceCopy"
    given = {"parameters": {"buffer_bytes": 1 << 30}, "values": {"gb_per_s": 55.0}, "ranks": 1}
    defaults = {"direction": "host_to_device", "pinned": True}
    assert "pass" == judge_one(result(copy, defaults=defaults, **given), shipped_rows())[0].verdict
    given["parameters"]["pinned"] = False
    (entry,) = judge_one(result(copy, defaults=defaults, **given), shipped_rows())
    assert ("not judged", True) == (entry.verdict, "pinned True instead of False" in entry.reason)


def test_a_result_on_several_nodes_matches_only_under_a_declared_network():
    network = "3200 Gb/s EFA per node"
    there = {"ranks": 16, "hosts": 2, "platform": "h100"}
    assert "not judged" == judge_one(result(**there), shipped_rows())[0].verdict
    declared = {"declared": {"network_class": network}}
    (entry,) = judge_one(result(environment=declared, **there), shipped_rows())
    assert ("pass", 313.29, 436.95) == (entry.verdict, entry.low, entry.high)


# -- verdicts ----------------------------------------------------------------------------------------------------


MEASURED = ROW.replace("441.8", "100").replace("466.3", "110")
OWN = ROW.replace('"measured"', '"own"').replace("441.8", "100").replace("466.3", "100") + "spread = 0.01\n"


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        (MEASURED, {95: "pass", 94.9: "look", 80: "look", 79.9: "below", 121: "pass", 121.1: "look", 0: "below"}),
        (MEASURED.replace("busbw_gb_per_s", "latency_us"), {105: "pass", 126: "look", 140: "below", 90: "look"}),
        (OWN, {94.3: "pass", 94.0: "below"}),
        (OWN.replace("0.01", "0.001"), {97.2: "pass", 97.0: "below"}),  # three per cent
        (OWN.replace("0.01", "0.05"), {80: "pass"}),
    ],
    ids=["measured", "of a time more is worse", "own", "own of a small spread", "own of a large spread"],
)
def test_limits_of_a_row(tmp_path, text, verdicts):
    metric, unit = ("latency_us", "us") if "latency_us" in text else ("busbw_gb_per_s", "GB/s")
    rows = read(tmp_path, text.replace('"GB/s"', f'"{unit}"'))
    assert verdicts == {value: judge_one(valued(value, metric), rows)[0].verdict for value in verdicts}


def test_a_floor_only_fails(tmp_path):
    floor = ROW.replace('"measured"', '"floor"').replace("high = 466.3\n", "")
    rows = read(tmp_path, floor)
    above, below = (judge_one(valued(value), rows)[0] for value in (441.9, 441.7))
    assert ("not judged", "below") == (above.verdict, below.verdict)
    assert "does not show that the device is healthy" in above.reason
    assert "FAIL: no result was judged by an expectation" == verdict_of([above])


def test_an_own_row_of_other_software_asks_at_most_for_a_look(tmp_path):
    rows = read(tmp_path, OWN + 'software = "driver 1, torch 2.7.1"\n')
    same, other = ({"driver": {"driver": version}, "packages": {"torch": "2.7.1"}} for version in "12")
    assert "driver 1, torch 2.7.1" == software_of(same)
    verdicts = [judge_one(valued(50.0, environment=each), rows)[0].verdict for each in (same, other)]
    assert ["below", "look"] == verdicts


def test_the_worst_of_several_rows_counts(tmp_path):
    rows = [*shipped_rows(), *read(tmp_path, OWN.replace("= 100", "= 300").replace("3GiB", "1GiB"))]
    (entry,) = judge_one(result(values={"busbw_gb_per_s": 300.0}), rows)
    assert "below" == entry.verdict, "an own row of a slow fleet does not cover a shipped one"


# -- text --------------------------------------------------------------------------------------------------------


def test_a_line_per_question_has_best_expected_range_share_and_verdict():
    smaller = result(parameters={"message_bytes": 1 << 28, "dtype": "fp32"}, values={"busbw_gb_per_s": 200.0})
    judged = [*judge_one(result(), shipped_rows()), *judge_one(smaller, shipped_rows())]
    judged += judge_one(result(ranks=4), shipped_rows())
    lines = [line.text for line in answer_lines(judged)]
    assert 4 == len(lines)
    assert "AllReduce fp32 8 ranks 450 GB/s (1GiB) 436.1 GB/s (256MiB) 0.46 LOW" == " ".join(lines[1].split())
    assert "0.46 of the slowest known result" in lines[2]
    narrow = [line.text for line in answer_lines(judged, 60)]
    assert (["question", "AllReduce fp32 8 ranks"], "  best  ") == (narrow[0:4:2], narrow[1][:8])
    assert lines[3].startswith("not judged: 1 question: AllReduce fp32 4 ranks (nearest row: ")


def test_nothing_judged_and_anything_withheld_is_not_pass():
    (good,) = judge_one(result(), shipped_rows())
    assert "PASS: 1 judged result, 0 not judged" == verdict_of([good])
    assert "FAIL: 2 cases failed" == verdict_of([good], ["2 cases failed"])
    assert verdict_of([]).startswith("FAIL")


def test_an_own_row_that_matched_nothing_is_named(tmp_path):
    rows = read(tmp_path, OWN)
    assert "" == unused_line(rows, judge_one(valued(99.0), rows), "h200")
    assert "1 own row matched no result: AllReduce busbw_gb_per_s" in unused_line(rows, [], "h200")


# -- rows that are wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("unit", 'unit = "MB/s"'), "unit is 'MB/s'; busbw_gb_per_s is in GB/s"),
        (("unit", ""), "unit is missing"),
        (("metric", 'metric = "busbw"'), "metric is 'busbw'; did you mean"),
        (("kind", 'kind = "guess"'), "choose from measured, floor, own"),
        (("low", "low = 0"), "low is 0; write a number above 0"),
        (("low", "low = 500"), "high is 466.3, below low = 500"),
        (("low", "low = true"), "low is True; write a number above 0"),
        (("date", 'date = "July"'), "write YYYY, YYYY-MM or YYYY-MM-DD"),
        (("source", 'source = " "'), "source is ' '; write a text"),
        (("ranks_per_node", "ranks_per_node = 0"), "write a whole number from 1"),
        (("ranks_per_node", "ranks = 8"), "ranks is unknown; did you mean"),
        (("ranks_per_node", "nodes = 2"), "network is missing for more than one node"),
        (("parameters", 'parameters = "1GiB"'), "parameters is '1GiB'; write a table"),
        (("parameters", 'parameters = { message_bytes = "1 gig" }'), "has message_bytes = '1 gig'"),
        (("parameters", "parameters = { message_bytes = -1 }"), "has message_bytes = -1; write bytes"),
        (("parameters", "parameters = { message_bytes = true }"), "has message_bytes = True; write bytes"),
        (("parameters", "parameters = { dtype = [1] }"), "has dtype = [1]; write a text, a number, true or false"),
        (("parameters", "parameters = { dtype = nan }"), "has dtype = nan; write a text, a number, true or false"),
        (("platform", 'platform = "h2000"'), "platform 'h2000' is unknown; did you mean"),
        (("kind", 'kind = "own"'), "spread is missing"),
        (("kind", 'kind = "floor"'), "high has no meaning for a floor"),
    ],
)
def test_a_wrong_row_gives_one_line_with_its_place(tmp_path, change, told):
    key, line = change
    text = "\n".join(["[[expectation]]", *(line if old.startswith(f"{key} =") else old for old in WHOLE)])
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, "\n" + text)
    assert told in str(caught.value)
    assert "own.toml, line 2: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "second",
    [
        ROW.replace("441.8", "4418").replace("466.3", "4663"),
        ROW.replace('"measured"', '"floor"').replace("441.8", "470").replace("high = 466.3\n", ""),
        OWN + OWN,
    ],
    ids=["ten times", "floor above measured", "two own rows"],
)
def test_rows_of_one_key_that_contradict_each_other_are_refused(tmp_path, second):
    with pytest.raises(ConfigurationError, match=r"contradict each other, h200 AllReduce busbw_gb_per_s: .*own\.toml"):
        read(tmp_path, ROW + second)


def test_the_own_row_of_a_later_file_replaces_one_of_its_key(tmp_path):
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for file, low in zip(files, (150, 160), strict=True):
        file.write_text(OWN.replace("= 100", f"= {low}"))
    own = [row for row in load_expectations(files, MODELS) if row.kind == "own"]
    assert [160] == [row.low for row in own]


def test_a_user_file_of_platforms_may_hold_rows_and_both_are_read(tmp_path):
    file = tmp_path / "platforms.toml"
    file.write_text('[platform.mine]\ntitle = "Mine"\nfamily = "cuda"\n' + ROW.replace('"h200"', '"mine"'))
    catalog = load_catalog([file])
    assert "mine" in [row.platform for row in load_expectations([file], catalog.models)]
