"""``perfsuite fleet`` over journals of nodes that never met: who is named, who is absent, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.cli.main import main
from perfsuite.expectations.rows import load_expectations
from perfsuite.fleet.lines import own_rows
from perfsuite.fleet.nodes import read_groups, read_names, read_nodes, several_hosts
from perfsuite.fleet.rounds import slow_in_pairs
from perfsuite.fleet.rule import DEVIATIONS, SLOWER_THAN, Position, compare, level_of
from perfsuite.fleet.standing import judge_fleet
from perfsuite.metrics import derive
from perfsuite.metrics.pairs import message_times_s, name_of
from perfsuite.platforms import load_catalog
from perfsuite.platforms.catalog import tomllib
from perfsuite.platforms.host import Host, boot_of
from perfsuite.record.journal import read_journal
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import Peaks, Result, Work
from perfsuite.record.run import Header, RunEnd, RunRecord
from perfsuite.record.step import Identity, SpanTotal
from perfsuite.record.workload import Budget
from perfsuite.reports.page.sections.fleet import fleet_sections
from perfsuite.runtime.driver import Job
from perfsuite.workloads.memory_bandwidth import MemoryCopy
from perfsuite.workloads.pair_rounds import PairRounds, tournament
from test_correctness.helpers.fleets import CASES, case_of, write_node
from test_correctness.helpers.local_driver import local_driver
from test_correctness.helpers.measurements import measurement_of, rank_facts

pytest_plugins = ["pytester"]
MATMUL, ALL_REDUCE = "test_matmul_everywhere", "test_all_reduce"


def fleet(folder, count=16, *, wrong=None, **changes):
    """Write ``count`` nodes; ``wrong`` gives what differs by number of the node."""
    for number in range(count):
        write_node(folder, f"gpu{number:02}", **{**changes, **(wrong or {}).get(number, {})})


def slower(title, share, *devices):
    return {"slower": lambda case, device: share if case == title and (device in devices or not devices) else 0.0}


def answer(capsys, *arguments):
    """Exit code and JSON of the command."""
    code = main(["fleet", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def standings(told, *, all_of=False):
    return {name: node["standing"] for name, node in told["nodes"].items() if all_of or node["standing"] != "pass"}


# -- who is named ------------------------------------------------------------------------------------------------


def test_equal_nodes_pass(tmp_path, capsys):
    fleet(tmp_path)
    code, told = answer(capsys, tmp_path)
    assert (0, True, {}) == (code, told["passes"], standings(told))
    assert 16 == len(told["nodes"])


def test_a_slow_device_is_named_by_node_and_uuid_and_nobody_else(tmp_path, capsys):
    fleet(tmp_path, wrong={3: slower(MATMUL, 0.15, 5)})
    code, told = answer(capsys, tmp_path)
    assert (1, {"gpu03": "slow"}) == (code, standings(told))
    (found,) = told["nodes"]["gpu03"]["slow"]
    assert (case_of(MATMUL), "cuda:5", "GPU-gpu03-5") == (found["case"], found["device"], found["uuid"])
    assert found["slower"] == pytest.approx(0.15, abs=0.04)


def test_a_node_slow_as_a_whole_is_one_finding(tmp_path, capsys):
    fleet(tmp_path, wrong={3: slower(MATMUL, 0.15)})
    _, told = answer(capsys, tmp_path)
    assert [""] == [found["device"] for found in told["nodes"]["gpu03"]["slow"]]


def test_a_collective_is_one_of_the_node(tmp_path, capsys):
    fleet(tmp_path, wrong={3: slower(ALL_REDUCE, 0.15)})
    _, told = answer(capsys, tmp_path)
    assert {"gpu03": "slow"} == standings(told)
    assert ["look"] == [entry["verdict"] for entry in told["nodes"]["gpu03"]["look"]]


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


def test_a_number_of_nodes_counts_those_that_are_missing(tmp_path, capsys):
    fleet(tmp_path, 4)
    assert 1 == main(["fleet", str(tmp_path), "--nodes", "6"])
    said = capsys.readouterr().out
    assert "4 of 6 nodes, NVIDIA H200, 139.8 GiB; absent: 2 nodes without a journal" in said
    assert "FAIL: 2 absent" in said


def test_a_node_that_is_not_expected_is_told(tmp_path, capsys):
    fleet(tmp_path, 4)
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
    assert "has gpu00 twice" in refused(capsys, tmp_path, "--nodes", twice)
    assert "cannot be read" in refused(capsys, tmp_path, "--nodes", tmp_path / "none")


def test_journals_of_another_suite_or_scale_are_refused(tmp_path, capsys):
    fleet(tmp_path, 4)
    small = {f"{name}_small": case for name, case in CASES.items()}
    write_node(tmp_path, "gpu09", cases=small)
    said = refused(capsys, tmp_path)
    assert "gpu09.jsonl shares none of the 4 cases of most nodes" in said
    assert "journals of different suites or scales are mixed" in said


def test_a_node_in_two_groups_is_refused(tmp_path):
    racks = tmp_path / "racks.csv"
    racks.write_text("# racks\n\ngpu00,a\ngpu00,b\n")
    with pytest.raises(ConfigurationError, match="line 4: gpu00 is in two groups"):
        read_groups(racks, ["gpu00"])
    assert 12 == read_names("12")


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
    assert "exists; name another file" in refused(capsys, tmp_path, "--write-expectations", own)


def test_own_expectations_are_toml_whatever_software_and_parameters_are_called(tmp_path):
    fleet(tmp_path, 8)
    found = read_nodes([tmp_path], [])
    case = next(name for name, quantity in found.quantities.items() if quantity.workload == "Matmul")
    odd = dataclasses.replace(found.quantities[case], parameters={"options": {"overlap": False}})
    standings = judge_fleet(found, [])
    (key, members), *others = standings.populations
    named = dataclasses.replace(
        standings, populations=(({**key, "software": 'nccl "2.26"\n\\ \x7f'}, members), *others)
    )
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


def test_no_expectations_are_made_of_a_fleet_that_is_slow_as_a_whole(tmp_path, capsys):
    fleet(tmp_path, 8, **slower(ALL_REDUCE, 0.5))
    said = refused(capsys, tmp_path, "--write-expectations", tmp_path / "own.toml")
    assert "8 of 8 nodes are below a known figure" in said
    assert not (tmp_path / "own.toml").exists()


def test_no_expectations_are_made_of_three_nodes(tmp_path, capsys):
    fleet(tmp_path, 3)
    assert "it takes 4 to know their spread" in refused(capsys, tmp_path, "--write-expectations", tmp_path / "own.toml")


# -- the rule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("away", "spread", "is_slow"),
    [(0.0299, 0.001, False), (0.0301, 0.001, True), (0.059, 0.01, False), (0.061, 0.01, True)],
)
def test_slow_is_three_per_cent_and_six_deviations(away, spread, is_slow):
    level = Position(middle=1.0, spread=spread, count=100)
    value = 1.0 + (math.log1p(away) if away < 0.05 else away)
    assert is_slow == level.is_slow(value)


@given(st.lists(st.floats(-0.1, 0.1), min_size=4, max_size=30), st.floats(-20, 20))
def test_nobody_is_slow_by_the_unit_of_time_or_by_being_fast(values, shift):
    level = level_of(values, prior=0.01)
    moved = level_of([value + shift for value in values], prior=0.01)
    assert moved.spread == pytest.approx(level.spread, abs=1e-9)
    assert not level.is_slow(level.middle)
    assert not level.is_slow(min(values) - 1)


def test_few_values_have_the_spread_of_the_prior():
    few, many = (level_of([0.0] * count, prior=0.01) for count in (2, 2000))
    assert few.spread > 0.008
    assert many.spread < 0.001
    assert few.smallest > many.smallest == SLOWER_THAN
    assert 6.0 == DEVIATIONS


def test_healthy_fleets_name_nobody_and_a_defect_is_found():
    """As benchmarks/fleet_truth.py at its full size: seeded, so that nothing here is chance."""
    named = found = 0
    for seed in range(20):
        draw = random.Random(seed)
        values = {str(node): {str(device): draw.gauss(0, 0.01) for device in range(8)} for node in range(64)}
        named += len(compare(values, prior=0.02).slow)
        values["5"]["3"] += 0.10
        slow = compare(values, prior=0.02).slow
        found += [("5", "3")] == [each.member for each in slow]
    assert (0, 20) == (named, found)


def test_an_own_row_gives_the_prior_of_small_fleets(tmp_path):
    fleet(tmp_path, 5, wrong={1: slower(ALL_REDUCE, 0.08)})
    own = tmp_path / "own.toml"
    own.write_text(
        '[[expectation]]\nplatform = "h200"\nworkload = "AllReduce"\n'
        'parameters = { message_bytes = "1GiB", dtype = "fp32" }\nranks_per_node = 8\nmetric = "busbw_gb_per_s"\n'
        'unit = "GB/s"\nkind = "own"\nlow = 464\nspread = 0.005\ndate = "2026"\nsource = "here"\n'
    )
    rows = load_expectations([own], load_catalog().models)
    found = {rows is not None: judge_fleet(read_nodes([tmp_path], each), each) for each in ([], rows)}
    (with_row,) = [one for one in found[True].judgements if ALL_REDUCE in one.quantity.case]
    assert [("gpu01", "")] == [slow.member for slow in with_row.slow]


# -- identity of ranks -------------------------------------------------------------------------------------------


def test_ranks_tell_their_boot_and_a_cpu_has_no_device(tmp_path):
    with local_driver(tmp_path) as driver:
        workload = MemoryCopy(buffer_bytes=4096)
        done = driver.run(Job(workload=workload, world_size=1, budget=Budget(max_time_s=0.01)))
    (rank,) = done.ranks
    assert rank.identity is not None
    assert (boot_of(Host()), "", None) == (rank.identity.boot, rank.identity.uuid, rank.identity.clock_mhz)


def test_facts_of_a_named_device_are_its_own(tmp_path, capsys):
    def told(device):
        clock = 1290.0 if device == 5 else 1755.0
        return Identity(uuid=f"own-{device}", clock_mhz=clock, max_clock_mhz=1755.0, temperature_c=71.0)

    fleet(tmp_path, wrong={3: {**slower(MATMUL, 0.2, 5), "identity": told}})
    main(["fleet", str(tmp_path)])
    said = capsys.readouterr().out
    assert "SLOW         gpu03 cuda:5 own-5: test_matmul_everywhere" in said
    assert "; 1290 of 1755 MHz, 71 C" in said


def test_power_caps_of_ranks_make_populations_and_a_dark_port_is_told(tmp_path, capsys):
    def capped(watts, count=4):
        ports = tuple(f"mlx5_{port} port 1: 400 Gb/sec" for port in range(count))
        return {"identity": lambda device: Identity(power_cap_w=watts, ports=ports if device == 0 else ())}

    fleet(tmp_path, 8, wrong={number: capped(500.0 if number > 5 else 700.0, 4 - (number == 2)) for number in range(8)})
    code, told = answer(capsys, tmp_path)
    assert [6, 2] == [len(population["nodes"]) for population in told["populations"]]
    assert (1, {"gpu02": "incomplete"}) == (code, standings(told))
    assert "lacks 1 of 4 network ports of most nodes, as mlx5_3 port 1: 400 Gb/sec" == told["nodes"]["gpu02"]["reason"]


def test_reports_and_checklists_of_several_equal_hosts_are_refused(tmp_path, capsys):
    paths = [write_node(tmp_path, name) for name in ("gpu00", "gpu01")]
    again = write_node(tmp_path, "gpu00", run=1)
    for command in ("report", "checklist"):
        assert 4 == main([command, *map(str, paths)])
        said = capsys.readouterr().err
        assert "these are results of several hosts (gpu00, gpu01)" in said
        assert 1 == said.count("\n")
    assert 0 == main(["checklist", str(paths[0]), str(again)])


@pytest.mark.parametrize(
    ("one", "other", "several"),
    [
        ({"host": "a"}, {"host": "b"}, True),
        ({"host": "a"}, {"host": "a"}, False),
        ({"host": "a", "boot": "1"}, {"host": "b", "boot": "1"}, False),
        ({"host": "a", "boot": "1"}, {"host": "a", "boot": "2"}, False),
        ({"host": ""}, {"host": "b"}, False),
        ({"host": "a"}, {"host": "b", "fingerprint": "other"}, False),
    ],
)
def test_when_two_runs_are_of_several_hosts(one, other, several):
    """Containers of one host have names of their own and its boot; a reboot keeps the name."""
    runs = [
        RunRecord(**{"name": "run", "platform": "cpu", "fingerprint": "f", "results": {}, **each})
        for each in (one, other)
    ]
    assert several == bool(several_hosts(runs))


# -- rounds of pairs between nodes -------------------------------------------------------------------------------


@given(st.integers(2, 40))
def test_a_tournament_has_every_pair_once_and_no_node_twice_in_a_round(nodes):
    rounds = tournament(nodes)
    assert nodes - 1 + nodes % 2 == len(rounds)
    assert sorted(itertools.combinations(range(nodes), 2)) == sorted(itertools.chain(*rounds))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in rounds)


def test_device_d_meets_device_d_of_other_nodes():
    workload = PairRounds(message_bytes=1024, ranks_per_node=8)
    schedule = workload.schedule(512)
    assert 4 == len(schedule)
    for one, other in itertools.chain(*schedule):
        assert (one % 8, True) == (other % 8, one // 8 != other // 8)
    assert 63 == len(PairRounds(message_bytes=1024, ranks_per_node=8, rounds="all").schedule(512))
    with pytest.raises(InvalidParameter, match="ranks_per_node=8 and 12 ranks are not several whole nodes"):
        workload.schedule(12)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rounds": "some"}, {"ranks_per_node": 0}, {"directions": "one"}])
def test_wrong_rounds_are_refused(wrong):
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        PairRounds(message_bytes=1024, **wrong)


def test_ranks_send_in_rounds_and_every_message_is_checked(tmp_path):
    with local_driver(tmp_path) as driver:
        workload = PairRounds(message_bytes=4096, rounds=2)
        done = driver.run(Job(workload=workload, world_size=4, budget=Budget(max_time_s=0.01)))
    times = message_times_s(done)
    assert {(a, b) for pair in workload.pairs(4) for a, b in (pair, pair[::-1])} == set(times)
    assert all(time_s > 0 for time_s in times.values())


def rounds_journal(folder, slow=(), nodes=8):
    """Write the journal of a launch over nodes of two ranks each; pairs of ``slow`` nodes take twice as long."""
    workload = PairRounds(message_bytes=1 << 20, ranks_per_node=2)
    draw = random.Random(1)
    ranks = [rank_facts(rank, host=f"gpu{rank // 2}", device=f"cuda:{rank % 2}") for rank in range(2 * nodes)]
    spans = []
    for pair in workload.pairs(2 * nodes):
        time_s = 1e-3 * (2 if {pair[0] // 2, pair[1] // 2} & set(slow) else 1) * (1 + draw.gauss(0, 0.004))
        name = name_of(pair, workload.messages, both=True)
        spans.append(SpanTotal(name=name, time_s=0.0, count=1, slowest_rank=0, slowest_s=time_s * workload.messages))
    measurement = measurement_of([0.1], ranks, spans=tuple(spans))
    work = Work(collective="pairs", message_bytes=float(1 << 20), dtype="fp32")
    path = folder / "launch.jsonl"
    writer = JournalWriter(path, Header(session="s", fingerprint="f", platform="h200", started_at="2026", host="gpu0"))
    writer.result(
        Result(
            case="test_perf/test_pairs.py::test_pair_rounds[h200-ws16-1MiB]",
            workload="perfsuite.workloads.pair_rounds:PairRounds",
            parameters=workload.parameters(),
            platform="h200",
            world_size=2 * nodes,
            outcome="measured",
            work=work,
            metrics=derive(workload.metrics, work=work, measurement=measurement, peaks=Peaks()),
            measurement=measurement,
        )
    )
    writer.ended(RunEnd(at="2026", took_s=1.0, exit_status=0))
    writer.close()
    return path


def test_a_node_that_is_slow_with_nearly_all_partners_is_named_and_its_partners_are_not(tmp_path, capsys):
    code, told = answer(capsys, rounds_journal(tmp_path, slow={3}), "--nodes", 8)
    assert (1, {"gpu3": "slow"}) == (code, standings(told))
    assert 8 == len(told["nodes"])
    (found,) = told["nodes"]["gpu3"]["slow"]
    assert found["slower"] == pytest.approx(1.0, abs=0.05)


def test_equal_nodes_in_rounds_pass(tmp_path, capsys):
    assert 0 == answer(capsys, rounds_journal(tmp_path))[0]


def test_one_slow_partner_or_one_congested_message_names_nobody():
    pairs = [pair for one in tournament(16)[:4] for pair in one]
    times = {(str(a), str(b)): 0.001 * (a % 3) for a, b in pairs}
    assert [] == slow_in_pairs(times)
    (first, *_) = times
    assert [] == slow_in_pairs({**times, first: 0.4})
    assert [] == slow_in_pairs({})


# -- the page ----------------------------------------------------------------------------------------------------


def test_the_page_has_every_node_the_named_device_and_the_rows_used(tmp_path, capsys):
    pytest.importorskip("jinja2")
    fleet(tmp_path, 12, wrong={3: slower(MATMUL, 0.2, 5), 9: {"ends": False}})
    page = tmp_path / "fleet.html"
    assert 1 == main(["fleet", str(tmp_path), "--nodes", "13", "--html", str(page)])
    text = page.read_text()
    assert "<title>Fleet: FAIL, 12 nodes</title>" in text
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
    assert layer["gpu03", "test_matmul_everywhere[h200-ws8]"] == pytest.approx(0.2, abs=0.02)
    assert "gpu03" == chart.spec["encoding"]["y"]["sort"][0]
