"""Machines of the reports: what they state is what the reports print, and projections are of their network."""

import dataclasses
import json
import re

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.mesh import MeshShape
from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Calibration, CollectiveLine, write_calibration
from perfsuite.published.lookup import shipped
from perfsuite.published.recipes import find, recipes
from perfsuite.published.recipes.recipe import MACHINES
from perfsuite.record.codec import to_json
from perfsuite.reports.tables.published import recipe_of_case
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.command_line import as_json, printed, refused
from test_correctness.helpers.scripted_driver import repository

CATALOG = load_catalog()
MESH = MeshShape.of(tp=32)
NETWORKS = [
    ("mccx-d800", "002", 7, 50),
    ("oneflow-4x8-v100", "003", 10, 12.5),
    ("004-4x8-a100", "004", 39, 25),
    ("004-8x8-h100", "004", 47, 50),
]
STEP = ("--model", "gpt-3072x32", "--layout", "tp32", "--global-batch", "16", "--micro-batch", "16", "--dtype", "fp16")
OWN = """
[machine.two]
title = "two hosts"
platform = "v100"
inside = "NVLink"
nodes = { value = 2, unit = "nodes", source = "counted" }
devices_per_node = { value = 4, unit = "devices", source = "counted" }
"""
NETWORK = 'network = { value = 25, unit = "GB/s", source = "ibstat" }\n'


# -- what the machines state ---------------------------------------------------------------------------------------


def printed_gbit(report, line):
    """Gb/s of a line of a report: adapters times the rate of each."""
    tables = [table for known in shipped() if known.report == report for table in known.tables]
    rows = [row for table in tables if table.kind == "environment" for row in table.rows]
    cells = [str(row.cells[1]) for row in rows if row.line == line]
    (found,) = (match for cell in cells if (match := re.search(r"(?:(\d)x)?(\d+) ?(?:Gb/s|Gb/sec|Gbps)", cell)))
    return int(found[1] or 1) * int(found[2])


@pytest.mark.parametrize(("name", "report", "line", "rate"), NETWORKS)
def test_a_network_is_what_its_line_of_the_report_prints(name, report, line, rate):
    network = CATALOG.machines[name].network
    assert network.source.startswith(f"report {report}, line {line}: ")
    assert rate == network.value == printed_gbit(report, line) / 8


def test_every_machine_has_a_row_sources_and_its_reports_recipes():
    assert {name for names in MACHINES.values() for name in names} == set(CATALOG.machines)
    for machine in CATALOG.machines.values():
        assert machine.platform in CATALOG.models
        known = (machine.nodes, machine.devices_per_node, machine.network)
        assert all(peak.source.startswith("report 00") for peak in known if peak)
    assert (32, 8, 8, 32, 64) == tuple(
        CATALOG.machines[name].devices
        for name in ("oneflow-4x8-v100", "mccx-d800", "004-1x8-a100", "004-4x8-a100", "004-8x8-h100")
    )


def test_the_row_of_s4000_has_the_network_of_its_report():
    row = CATALOG.find("s4000")
    assert (50, 8) == (row.network.value, row.devices_per_node.value)
    assert "report 002" in row.network.source
    assert "001" not in row.devices_per_node.source


@pytest.mark.parametrize(
    ("recipe", "platform", "machine"),
    [
        ("002-llama2_7b-bf16-1x8", "s4000", "mccx-d800"),
        ("003-DP_1x1x1_2_1536x16", "v100", "oneflow-4x8-v100"),
        ("003-MP_1x32x1_16_3072x32", "v100", "oneflow-4x8-v100"),
        ("003-MP_1x32x1_16_3072x32", "s4000", None),
        ("004-gpt2-xl-ddp-b32-1x8", "a100", "004-1x8-a100"),
        ("004-gpt2-xl-ddp-b32-2x8", "a100", "004-4x8-a100"),
        ("004-gpt2-xl-ddp-b32-8x8", "a100", "004-4x8-a100"),
        ("004-gpt2-xl-ddp-b32-8x8", "h100", "004-8x8-h100"),
        ("000-opensora-1x8", "s4000", None),
    ],
)
def test_a_recipe_names_the_smallest_machine_of_its_report_that_has_the_devices(recipe, platform, machine):
    found = find(recipe).machine(CATALOG, platform)
    assert machine == (found and found.name)


def test_a_published_run_is_found_by_its_case():
    for recipe in recipes():
        printed = find(recipe.beside) if recipe.beside else recipe
        assert printed is recipe_of_case(recipe.case("s4000"))
        assert recipe.machine(CATALOG, "cpu") is None


# -- files of the user's -------------------------------------------------------------------------------------------


def test_a_file_adds_a_machine_and_changes_one(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN + NETWORK + f"[machine.oneflow-4x8-v100]\n{NETWORK}")
    found = load_catalog([path]).machines
    assert (8, 25) == (found["two"].devices, found["two"].network.value)
    changed = found["oneflow-4x8-v100"]
    assert ("v100", 25, "ibstat") == (changed.platform, changed.network.value, changed.network.source)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OWN, r"line 2: \[machine.two\] network is missing for a machine of several nodes"),
        (OWN.replace('"v100"', '"v1000"') + NETWORK, r"line 4: .*platform is 'v1000', which has no row; did you mean"),
        (OWN.replace("value = 2,", "value = 2.5,") + NETWORK, r"line 6: .*nodes has value 2.5; write the whole number"),
        (OWN.replace('unit = "devices", ', "") + NETWORK, r"line 7: .*devices_per_node has unit None"),
        (OWN.replace('inside = "NVLink"\n', "") + NETWORK, r"line 2: .*inside is missing or not a text; write"),
        (OWN + NETWORK.replace("network", "networks"), r"line 8: .*networks is unknown; choose from title, platform"),
        (OWN.replace("machine.two", "machine.TWO"), r"line 2: .*has name 'TWO'; use small letters"),
        ("[machine]\ntwo = 3\n", r"line 2: \[machine\] two is 3; write a table \[machine.two\]"),
        ('[machine.new]\ntitle = "x"\nplatform = "v100"\ninside = "y"\n', r"line 1: .*nodes is None; write nodes ="),
    ],
)
def test_a_mistake_in_a_machine_is_one_line(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_catalog([path])
    assert "\n" not in str(caught.value)


# -- perfsuite project ---------------------------------------------------------------------------------------------


def projected(capsys, *arguments):
    return as_json(capsys, "project", *STEP, *arguments)


def test_a_projection_on_a_machine_is_of_its_network_and_says_so(capsys):
    there = projected(capsys, "--machine", "oneflow-4x8-v100")
    makers = projected(capsys, "--platform", "v100")
    four = 50 / 12.5
    assert there["by_resource"]["network"] == pytest.approx(four * makers["by_resource"]["network"], rel=0.02)
    flags = {flag["name"]: flag["text"] for flag in there["flags"]}
    assert flags["machine"].startswith("oneflow-4x8-v100: 4 x 8 v100, 12.5 GB/s between nodes (report 003, line 10")
    assert "machine" not in {flag["name"] for flag in makers["flags"]}


def test_a_recipe_is_projected_on_its_reports_machine_beside_what_is_published(capsys):
    name = "003-MP_1x32x1_16_3072x32"
    by_recipe = as_json(capsys, "project", "--recipe", name)
    training = TrainStep(**find(name).parameters).work(MESH).training
    assert by_recipe["training"] == json.loads(json.dumps(to_json(training)))
    flags = {flag["name"]: flag["text"] for flag in by_recipe["flags"]}
    assert flags["machine"].startswith("oneflow-4x8-v100: ")
    last = printed(capsys, "project", "--recipe", name).splitlines()[-1]
    assert last.startswith("published 9505.83 ms [M: ")
    inside = by_recipe["low_s"] <= 9.50583 <= by_recipe["high_s"]
    ratio = by_recipe["step_time_s"] / 9.50583
    assert last.endswith(f"{'in' if inside else 'outside'} the band, projected/published {ratio:.2f}")


def test_a_recipe_on_another_platform_takes_its_row(capsys):
    found = as_json(capsys, "project", "--recipe", "003-MP_1x32x1_16_3072x32", "--platform", "s4000")
    assert ("s4000", 32) == (found["platform"], found["world_size"])
    assert "machine" not in {flag["name"] for flag in found["flags"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (STEP, "no platform and no machine is given"),
        ((*STEP, "--machine", "oneflow-4x8-v10"), "did you mean oneflow-4x8-v100"),
        ((*STEP, "--machine", "oneflow-4x8-v100", "--platform", "a100"), "has devices of v100, not of a100"),
        ((*STEP, "--machine", "004-1x8-a100"), "more than the 8 of a node of a100, and no figure of its network"),
        (("--recipe", "003-MP_1x32"), "did you mean 003-MP_1x32x1_16_3072x32"),
        (("--recipe", "001-latte-l-b1-w16-1x8"), "describes no machine; give --platform"),
        (("--recipe", "004-routing-b32-1x8"), "of workload moe_layer; only train_step is projected"),
        (("--recipe", "003-MP_1x32x1_16_3072x32", "--layout", "tp8"), "leave --layout out"),
        (("--recipe", "003-MP_1x32x1_16_3072x32", "--micro-batch", "2"), "leave --micro-batch out"),
        (("--platform", "s4000", "--model", "llama2-7b"), "give --model and --global-batch, or --recipe"),
    ],
)
def test_a_wrong_machine_or_recipe_is_one_line(capsys, arguments, said):
    assert said in refused(capsys, "project", *arguments)


def test_a_machine_replaces_what_a_calibration_measured_between_nodes(capsys, tmp_path):
    row = Calibration.from_platform(CATALOG.find("v100"))
    across = CollectiveLine(collective="all_reduce", ranks=32, nodes=4, alpha_us=1.0, beta_gb_per_s=1000.0)
    write_calibration(dataclasses.replace(row, collectives=(across,)), tmp_path / "c.json")
    by_file = ("--calibration", str(tmp_path / "c.json"))
    alone = projected(capsys, "--platform", "v100", *by_file)
    there = projected(capsys, "--machine", "oneflow-4x8-v100", *by_file)
    given = projected(capsys, "--platform", "v100", "--network", "12.5", *by_file)
    assert alone["by_resource"]["network"] < 0.1 * there["by_resource"]["network"]
    assert there["by_resource"]["network"] == pytest.approx(given["by_resource"]["network"])


# -- pytest --perf-project -----------------------------------------------------------------------------------------

CASES = """
import pytest
from perfsuite import workloads
from perfsuite.published.recipes import find

RECIPE = find("003-MP_1x32x1_16_3072x32")

@pytest.mark.parametrize("case", [RECIPE.words])
def test_oneflow(perf, case):
    perf(workloads.TrainStep(**RECIPE.parameters), on=32)

@pytest.mark.parametrize("case", ["other"])
def test_other(perf, case):
    perf(workloads.TrainStep(**RECIPE.parameters), on=32)
"""


@pytest.mark.parametrize("declared", [False, True])
def test_a_published_run_is_projected_on_its_reports_machine(pytester, monkeypatch, declared):
    """Another case is projected on the machine that the platform file declares, else in the maker's own node."""
    repo = repository(pytester, monkeypatch, CASES)
    (pytester.path / "test_oneflow.py").write_text((pytester.path / "test_it.py").read_text())
    if declared:
        (pytester.path / "mine.toml").write_text(f'{OWN}{NETWORK}[environment]\nmachine = "two"\n')
        with (pytester.path / "tox.ini").open("a") as ini:
            ini.write("\nperf_platforms = mine.toml\n")
    result = repo.run("-k", "v100 and not v100_32gb", "test_oneflow.py", "--perf-journal=j.jsonl", "--perf-project")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["  1 case: machine: oneflow-4x8-v100: 4 x 8 v100, 12.5 GB/s between nodes*"])
    other = "machine: two: 2 x 4 v100, 25 GB/s between nodes (ibstat); 32 devices are more than its 8: more such nodes"
    assert declared == (f"  1 case: {other}" in result.outlines)
