"""``perfsuite fleet`` over journals of nodes that never met: who is named, who is absent, what is refused."""

import dataclasses
import re

import pytest

from perfsuite.cli.main import main
from perfsuite.fleet.lines import own_rows
from perfsuite.fleet.nodes import read_nodes
from perfsuite.fleet.standing import judge_fleet
from perfsuite.platforms.catalog import tomllib
from perfsuite.record.journal import read_journal
from perfsuite.reports.page.sections.fleet import fleet_sections
from test_correctness.helpers.fleets import (
    ALL_REDUCE,
    CASES,
    MATMUL,
    answer,
    case_of,
    fleet,
    slower,
    standings,
    write_node,
)

# -- who is named ------------------------------------------------------------------------------------------------


def test_equal_nodes_pass(tmp_path, capsys):
    fleet(tmp_path)
    code, told = answer(capsys, tmp_path)
    assert (0, True, {}) == (code, told["passes"], standings(told))
    assert 16 == len(told["nodes"])


def test_a_slow_device_a_slow_node_and_a_slow_collective_are_named_and_nobody_else(tmp_path, capsys):
    fleet(tmp_path, wrong={3: slower(MATMUL, 0.15, 5), 6: slower(MATMUL, 0.15), 9: slower(ALL_REDUCE, 0.15)})
    code, told = answer(capsys, tmp_path)
    assert (1, dict.fromkeys(("gpu03", "gpu06", "gpu09"), "slow")) == (code, standings(told))
    (found,) = told["nodes"]["gpu03"]["slow"]
    assert (case_of(MATMUL), "cuda:5", "GPU-gpu03-5") == (found["case"], found["device"], found["uuid"])
    assert found["slower"] == pytest.approx(0.15, abs=0.04)
    assert [""] == [found["device"] for found in told["nodes"]["gpu06"]["slow"]]
    assert ["look"] == [entry["verdict"] for entry in told["nodes"]["gpu09"]["look"]]


def test_of_few_nodes_none_is_called_slow_as_a_whole(tmp_path, capsys):
    fleet(tmp_path, 4, wrong={1: slower(ALL_REDUCE, 0.04), 2: slower(MATMUL, 0.3, 0)})
    code = main(["fleet", str(tmp_path)])
    said = capsys.readouterr().out
    assert 1 == code
    assert "too few equal nodes, it takes 8: test_all_reduce[h200-ws8] (4 nodes)" in said
    assert "SLOW         gpu02 cuda:0 GPU-gpu02-0: test_matmul_everywhere[h200-ws8] +3" in said
    assert "gpu01" not in said


def test_below_expectation_on_one_node_is_that_nodes_and_on_all_nodes_is_software(tmp_path, capsys):
    fleet(tmp_path, 6, wrong={2: slower(ALL_REDUCE, 0.5)})
    _, told = answer(capsys, tmp_path)
    assert ({"gpu02": "below"}, []) == (standings(told), told["every_node_alike"])
    everywhere = tmp_path / "everywhere"
    everywhere.mkdir()
    fleet(everywhere, 6, **slower(ALL_REDUCE, 0.5))
    code, told = answer(capsys, everywhere)
    assert (1, {}) == (code, standings(told))
    assert [(6, 6)] == [(entry["nodes"], entry["of"]) for entry in told["every_node_alike"]]
    main(["fleet", str(everywhere)])
    said = capsys.readouterr().out
    assert "BELOW        all 6 nodes: AllReduce fp32 8 ranks 1GiB" in said
    assert "every node alike: software, not a device" in said
    assert "FAIL: 1 question below expectation on all nodes" in said


def test_a_transient_is_cleared_by_a_second_look_and_a_defect_is_not(tmp_path, capsys):
    fleet(tmp_path, wrong={3: slower(MATMUL, 0.2, 5), 4: slower(MATMUL, 0.2, 1)})
    assert {"gpu03": "slow", "gpu04": "slow"} == standings(answer(capsys, tmp_path)[1])
    for run in (1, 2, 3):
        write_node(tmp_path, "gpu03", run=run)
        write_node(tmp_path, "gpu04", run=run, **slower(MATMUL, 0.2, 1))
    code, told = answer(capsys, tmp_path)
    assert (1, {"gpu04": "slow"}) == (code, standings(told))
    assert any(note.startswith("gpu03 has 4 journals") for note in told["notes"])


def test_populations_are_compared_apart_and_what_differs_is_listed(tmp_path, capsys):
    """30 % of the nodes are 8 % slower by another driver: mixed, a defect among the others is hidden."""
    other = {"environment": {"driver": {"driver": "550.54"}}, **slower(MATMUL, 0.08)}
    wrong = dict.fromkeys(range(11, 16), other)
    fleet(tmp_path, wrong={**wrong, 3: slower(MATMUL, 0.15, 5)})
    code, told = answer(capsys, tmp_path)
    assert (1, {"gpu03": "slow"}) == (code, standings(told))
    assert [11, 5] == [len(population["nodes"]) for population in told["populations"]]
    main(["fleet", str(tmp_path)])
    said = capsys.readouterr().out
    assert "populations  2, compared apart; they differ in software:" in said
    assert "5 nodes (gpu11, gpu12, gpu13 and 2 more): software driver 550.54, torch 2.9.1" in said


@pytest.mark.parametrize(
    "change",
    [{"power_caps": ["500.00 W"] * 8}, {"devices": ["NVIDIA H200 MIG 1g.18gb, 16 GiB, GPU-x"] * 8}],
    ids=["power cap", "partition"],
)
def test_power_cap_and_partition_make_populations(tmp_path, capsys, change):
    fleet(tmp_path, 6, wrong={number: {"environment": change} for number in (4, 5)})
    assert 2 == len(answer(capsys, tmp_path)[1]["populations"])


def test_two_groups_that_nothing_recorded_explains_are_told(tmp_path, capsys):
    fleet(tmp_path, 64, wrong={number: slower(MATMUL, 0.08) for number in range(20)}, samples=1)
    _, told = answer(capsys, tmp_path)
    assert any("20 of 64 nodes are" in sentence and MATMUL in sentence for sentence in told["two_groups"])


def test_a_slow_rack_is_told_as_a_rack_and_its_nodes_are_not(tmp_path, capsys):
    fleet(tmp_path, 24, wrong={number: slower(MATMUL, 0.15) for number in range(4)})
    racks = tmp_path / "racks.csv"
    racks.write_text("node,group\n" + "".join(f"gpu{number:02},rack{number // 4}\n" for number in range(24)))
    code, told = answer(capsys, tmp_path, "--group", racks)
    assert (1, {}) == (code, standings(told))
    assert [("rack0", case_of(MATMUL))] == [(found["group"], found["case"]) for found in told["slow_groups"]]


# -- who is absent -----------------------------------------------------------------------------------------------


def test_nodes_without_a_journal_or_with_a_broken_one_are_absent(tmp_path, capsys):
    fleet(tmp_path, 4, wrong={1: {"ends": False}})
    broken = tmp_path / "gpu07" / "journal.jsonl"
    broken.parent.mkdir()
    broken.write_text("no journal\n")
    names = tmp_path / "nodes.txt"
    names.write_text("gpu00\ngpu01  # spare\ngpu02\ngpu03\ngpu07\ngpu09\n\n")
    bad, good = tmp_path / "bad.txt", tmp_path / "good.txt"
    code, told = answer(capsys, tmp_path, "--nodes", names, "--good", good, "--bad", bad)
    assert (1, {"gpu01": "absent", "gpu07": "absent", "gpu09": "absent"}) == (code, standings(told))
    reasons = [told["nodes"][name]["reason"] for name in ("gpu01", "gpu09")]
    assert ["journal without end: its run was killed", "no journal"] == reasons
    assert "gpu00\ngpu02\ngpu03\n" == good.read_text()
    assert "gpu01\ngpu07\ngpu09\n" == bad.read_text()


def test_a_number_of_nodes_counts_those_that_are_missing_and_a_node_that_is_not_expected_is_told(tmp_path, capsys):
    fleet(tmp_path, 4)
    assert 1 == main(["fleet", str(tmp_path), "--nodes", "6"])
    said = capsys.readouterr().out
    assert "4 of 6 nodes, NVIDIA H200, 139.8 GiB; absent: 2 nodes without a journal" in said
    assert "FAIL: 2 absent" in said
    names = tmp_path / "nodes.txt"
    names.write_text("gpu00\ngpu01\ngpu02\n")
    _, told = answer(capsys, tmp_path, "--nodes", names)
    assert ["gpu03 is not among the expected nodes"] == told["notes"]


def test_a_missing_device_and_a_missing_case_are_incomplete(tmp_path, capsys):
    fewer = {name: case for name, case in CASES.items() if name != ALL_REDUCE}
    failed = {case_of(ALL_REDUCE): "rank 3 died"}
    fleet(tmp_path, 8, wrong={1: {"devices": 7}, 2: {"cases": fewer}, 3: {"cases": fewer, "failed": failed}})
    code, told = answer(capsys, tmp_path)
    assert (1, {f"gpu0{number}": "incomplete" for number in (1, 2, 3)}) == (code, standings(told))
    reasons = [told["nodes"][f"gpu0{number}"]["reason"] for number in (1, 2, 3)]
    assert "7 of 8 devices" == reasons[0]
    assert f"1 of 4 cases without a result, as {case_of(ALL_REDUCE)}: not run" == reasons[1]
    assert f"1 of 4 cases without a result, as {case_of(ALL_REDUCE)}: failed: rank 3 died" == reasons[2]


def test_a_lone_node_of_an_unknown_platform_is_not_judged_and_does_not_pass(tmp_path, capsys):
    write_node(tmp_path, "gpu00", platform="s4000", devices=2)
    code, told = answer(capsys, tmp_path)
    assert (1, {"gpu00": "not judged"}) == (code, standings(told))


# -- which node a journal is of ----------------------------------------------------------------------------------


def test_a_journal_says_which_host_and_boot_it_is_of(pytester, monkeypatch):
    from test_correctness.helpers.scripted_driver import repository

    repository(pytester, monkeypatch, "def test_it(perf): perf(step)\n").run("--perf-journal=j.jsonl")
    record = read_journal(pytester.path / "j.jsonl")
    assert record.host
    assert len(record.boot) in (0, 12)


def test_equal_host_names_of_two_nodes_are_kept_apart_by_their_devices(tmp_path, capsys):
    for number in range(3):
        devices = [f"NVIDIA H200, 139.8 GiB, GPU-{number}{device}" for device in range(8)]
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        write_node(folder, "localhost", file="journal.jsonl", environment={"devices": devices})
    _, told = answer(capsys, tmp_path)
    assert {f"localhost (node{number}/journal.jsonl)" for number in range(3)} == set(told["nodes"])
    assert 3 == sum("host name localhost repeats" in note for note in told["notes"])


def test_without_any_identity_equal_names_are_never_merged(tmp_path, capsys):
    for run in (0, 1):
        write_node(tmp_path, "gpu00", run=run, uuids=False, header={"boot": ""})
    _, told = answer(capsys, tmp_path)
    assert 2 == len(told["nodes"])


# -- what is refused ---------------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    assert 4 == main(["fleet", *map(str, arguments)])
    said = capsys.readouterr().err
    assert 1 == said.count("\n")
    return said


def test_bad_input_gives_one_line(tmp_path, capsys):
    fleet(tmp_path, 4)
    journal, lacking, twice, wrong = (tmp_path / name for name in ("gpu00.jsonl", "racks.csv", "twice", "wrong.csv"))
    empty = tmp_path / "empty"
    empty.mkdir()
    lacking.write_text("gpu00,a\ngpu01,a\n")
    twice.write_text("gpu00\ngpu00\n")
    wrong.write_text("gpu00;a\n")
    assert "has no journal (*.jsonl)" in refused(capsys, empty)
    assert "is given twice; give every journal once" in refused(capsys, journal, journal)
    assert "racks.csv lacks gpu02, gpu03; add a line node,group" in refused(capsys, tmp_path, "--group", lacking)
    assert "line 1: 'gpu00;a' is not node,group" in refused(capsys, tmp_path, "--group", wrong)
    wrong.write_text("# racks\n\ngpu00,a\ngpu00,b\n")
    assert "line 4: gpu00 is in two groups" in refused(capsys, tmp_path, "--group", wrong)
    assert "has gpu00 twice" in refused(capsys, tmp_path, "--nodes", twice)
    assert "cannot be read" in refused(capsys, tmp_path, "--nodes", tmp_path / "none")


def test_journals_of_another_suite_or_scale_are_refused(tmp_path, capsys):
    fleet(tmp_path, 4)
    small = {f"{name}_small": case for name, case in CASES.items()}
    write_node(tmp_path, "gpu09", cases=small)
    said = refused(capsys, tmp_path)
    assert "gpu09.jsonl shares none of the 4 cases of most nodes" in said
    assert "journals of different suites or scales are mixed" in said


# -- own expectations --------------------------------------------------------------------------------------------


def test_own_expectations_of_a_fleet_name_a_later_lone_node(tmp_path, capsys):
    fleet(tmp_path, 8)
    own = tmp_path / "own.toml"
    assert 0 == main(["fleet", str(tmp_path), "--write-expectations", str(own)])
    rows = tomllib.loads(own.read_text())["expectation"]
    assert {"Matmul", "MemoryTriad", "HostDeviceCopy", "AllReduce"} == {row["workload"] for row in rows}
    assert all(row["kind"] == "own" and 0.001 < row["spread"] < 0.02 for row in rows)
    later = tmp_path / "later"
    later.mkdir()
    write_node(later, "gpu99", **slower(ALL_REDUCE, 0.08))
    capsys.readouterr()
    code, told = answer(capsys, later, "--platform-file", own)
    assert (1, {"gpu99": "below"}) == (code, standings(told))
    assert "exists and is not overwritten; give another file" in refused(capsys, tmp_path, "--write-expectations", own)


def test_own_expectations_are_toml_whatever_software_and_parameters_are_called(tmp_path):
    fleet(tmp_path, 8)
    found = read_nodes([tmp_path], [])
    case = next(name for name, quantity in found.quantities.items() if quantity.workload == "Matmul")
    odd = dataclasses.replace(found.quantities[case], parameters={"options": {"overlap": False}})
    standings = judge_fleet(found, [])
    (key, members), *others = standings.populations
    odd_key = {**key, "software": 'nccl "2.26"\n\\ \x7f'}
    named = dataclasses.replace(standings, populations=((odd_key, members), *others))
    lines = own_rows(named, dataclasses.replace(found, quantities={**found.quantities, case: odd}), "2026-11")
    rows = tomllib.loads("\n".join(lines))["expectation"]
    assert {row["software"] for row in rows} == {'nccl "2.26"\n\\ \x7f'}
    assert "Matmul" not in {row["workload"] for row in rows}
    assert f"# Left out: {case}: a row cannot have its options." in lines


def test_two_cases_of_one_key_are_one_own_expectation(tmp_path):
    """Two rows of one key would contradict each other, and the file could not be read."""
    fleet(tmp_path, 8)
    found = read_nodes([tmp_path], [])
    case, quantity = next(iter(found.quantities.items()))
    runs = {
        name: tuple(dataclasses.replace(run, values={**run.values, "again": run.values[case]}) for run in each)
        for name, each in found.nodes.items()
    }
    twice = dataclasses.replace(found, nodes=runs, quantities={**found.quantities, "again": quantity})
    lines = own_rows(judge_fleet(found, []), twice, "2026-11")
    assert "# Left out: again: another case has the same row." in lines
    assert len(tomllib.loads("\n".join(lines))["expectation"]) == len(found.quantities)


def test_no_expectations_are_made_of_a_fleet_that_is_slow_as_a_whole_or_of_three_nodes(tmp_path, capsys):
    fleet(tmp_path, 8, **slower(ALL_REDUCE, 0.5))
    said = refused(capsys, tmp_path, "--write-expectations", tmp_path / "own.toml")
    assert "8 of 8 nodes are below a known figure" in said
    few = tmp_path / "few"
    few.mkdir()
    fleet(few, 3)
    assert "it takes 4 to know their spread" in refused(capsys, few, "--write-expectations", tmp_path / "own.toml")
    assert not (tmp_path / "own.toml").exists()


# -- the page ----------------------------------------------------------------------------------------------------


def test_the_page_has_every_node_the_named_device_and_the_rows_used(tmp_path, capsys):
    pytest.importorskip("jinja2")
    fleet(tmp_path, 12, wrong={3: slower(MATMUL, 0.2, 5), 9: {"ends": False}})
    page = tmp_path / "fleet.html"
    assert 1 == main(["fleet", str(tmp_path), "--nodes", "13", "--html", str(page)])
    text = page.read_text()
    assert re.search(r"<title>Fleet: FAIL, 12 nodes - \d{4}-\d\d-\d\d</title>", text)
    assert all(f"gpu{number:02}" in text for number in range(12))
    assert "gpu03 cuda:5 GPU-gpu03-5" in text
    assert "journal without end: its run was killed" in text
    assert "stas00/ml-engineering @744d01e, network/README.md" in text
    told = capsys.readouterr().out
    main(["fleet", str(tmp_path), "--nodes", "13", "--html", str(page)])
    assert (text, told) == (page.read_text(), capsys.readouterr().out)


def test_the_map_of_nodes_has_a_cell_per_node_and_quantity(tmp_path):
    fleet(tmp_path, 9, wrong={3: slower(MATMUL, 0.2)})
    read = read_nodes([tmp_path], [])
    sections = {section.key: section for section in fleet_sections(judge_fleet(read, []), read)}
    (chart,) = sections["nodes"].blocks[0].charts
    layer = {(row["first"], row["second"]): row["away"] for row in chart.spec["data"]["values"]}
    assert 9 * len(CASES) == len(layer)
    assert layer["gpu03", "matmul_everywhere ws8"] == pytest.approx(0.2, abs=0.02)
    assert "gpu03" == chart.spec["encoding"]["y"]["sort"][0]
