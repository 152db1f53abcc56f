"""The rules of a fleet without its command: levels, identity of ranks, rounds of pairs."""

import itertools
import math
import os
import random
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet_real import one_run
from perfsuite.base.errors import InvalidParameter
from perfsuite.cli.main import main
from perfsuite.expectations.rows import load_expectations
from perfsuite.fleet.nodes import read_nodes, several_hosts
from perfsuite.fleet.rule import DEVIATIONS, SLOWER_THAN, Position, compare, level_of, slow_in_pairs
from perfsuite.fleet.standing import judge_fleet
from perfsuite.metrics.pairs import message_times_s, name_again
from perfsuite.platforms import load_catalog
from perfsuite.platforms.host import Host, boot_of
from perfsuite.record.result import Record, Work
from perfsuite.record.run import Header, RunEnd, RunRecord
from perfsuite.record.step import Identity
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.workloads.memory_bandwidth import MemoryCopy
from perfsuite.workloads.pair_rounds import PairRounds, tournament
from test_correctness.helpers.fleets import ALL_REDUCE, MATMUL, answer, fleet, slower, standings, write_node
from test_correctness.helpers.local_driver import local_driver
from test_correctness.helpers.measurements import measurement_of, rank_facts, result_of
from test_correctness.helpers.runs import journal_of
from test_correctness.test_pairs import spans

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
        named += len(compare(values, prior=0.02)[0])
        values["5"]["3"] += 0.10
        slow, *_ = compare(values, prior=0.02)
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
        assert "the results are of several hosts (gpu00, gpu01)" in said
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


@pytest.mark.extended
def test_ranks_send_in_rounds_and_every_message_is_checked(tmp_path):
    with local_driver(tmp_path) as driver:
        workload = PairRounds(message_bytes=4096, rounds=2)
        done = driver.run(Job(workload=workload, world_size=4, budget=Budget(max_time_s=0.01)))
    times = message_times_s(done)
    assert {(a, b) for pair in workload.pairs(4) for a, b in (pair, pair[::-1])} == set(times)
    assert all(time_s > 0 for time_s in times.values())


def rounds_journal(folder, slow=(), *, nodes=8, rounds=4, links=None, again=None):
    """Write the journal of a launch over nodes of two ranks each; pairs of ``slow`` nodes take twice as long.

    ``links``: factor by pair of ranks; ``again``: the same of those that were tried again.
    """
    workload = PairRounds(message_bytes=1 << 20, ranks_per_node=2, rounds=rounds)
    draw = random.Random(1)
    ranks = [rank_facts(rank, host=f"gpu{rank // 2}", device=f"cuda:{rank % 2}") for rank in range(2 * nodes)]
    times_s = {
        pair: 1e-3 * (2 if {pair[0] // 2, pair[1] // 2} & set(slow) else 1) * (1 + draw.gauss(0, 0.004))
        for pair in workload.pairs(2 * nodes)
    }
    for pair, factor in (links or {}).items():
        times_s[pair] *= factor
    records = [
        Record(name=name_again(pair), value=1e-3 * factor, unit="s", reduce="max")
        for pair, factor in (again or {}).items()
    ]
    timed = spans(times_s, both=True, messages=workload.messages)
    measurement = measurement_of([0.1], ranks, spans=timed, records=tuple(records))
    work = Work(collective="pairs", message_bytes=float(1 << 20), dtype="fp32")
    result = result_of(
        measurement,
        "test_perf/test_pairs.py::test_pair_rounds[h200-ws16-1MiB]",
        workload="perfsuite.workloads.pair_rounds:PairRounds",
        parameters=workload.parameters(),
        platform="h200",
        work=work,
        metrics=workload.metrics,
    )
    header = Header(session="s", fingerprint="f", platform="h200", started_at="2026", host="gpu0")
    end = RunEnd(at="2026", took_s=1.0, exit_status=0)
    return journal_of(folder / "launch.jsonl", result, header=header, end=end)


def test_a_node_that_is_slow_with_nearly_all_partners_is_named_and_its_partners_are_not(tmp_path, capsys):
    code, told = answer(capsys, rounds_journal(tmp_path, slow={3}), "--nodes", 8)
    assert (1, {"gpu3": "slow"}) == (code, standings(told))
    assert 8 == len(told["nodes"])
    (found,) = told["nodes"]["gpu3"]["slow"]
    assert found["slower"] == pytest.approx(1.0, abs=0.05)


def test_one_slow_partner_or_one_congested_message_names_nobody():
    pairs = [pair for one in tournament(16)[:4] for pair in one]
    times = {(str(a), str(b)): 0.001 * (a % 3) for a, b in pairs}
    assert [] == slow_in_pairs(times)
    (first, *_) = times
    assert [] == slow_in_pairs({**times, first: 0.4})
    assert [] == slow_in_pairs({})


@pytest.mark.parametrize(
    ("links", "again", "named"),
    [
        ({(4, 10): 1.5}, {(4, 10): 1.5}, ["gpu2 cuda:0", "gpu5 cuda:0"]),
        ({(4, 10): 1.5}, {(4, 10): 1.02}, []),
        ({(4, 10): 1.5}, {}, []),
        ({}, {}, []),
    ],
    ids=["slow", "congested once", "of an older version, never tried again", "healthy"],
)
def test_a_link_that_stays_slow_is_named_and_no_node(tmp_path, capsys, links, again, named):
    path = rounds_journal(tmp_path, rounds="all", links=links, again=again)
    code, told = answer(capsys, path)
    assert (bool(named), {}) == (bool(code), standings(told))
    assert named == [end for link in told["slow_links"] for end in link["ends"]]
    if named:
        assert 1 == main(["fleet", str(path)])
        said = capsys.readouterr().out
        assert "SLOW         link gpu2 cuda:0 - gpu5 cuda:0: test_pair_rounds" in said
        assert re.search(r"\+(49|50)(\.\d)? % time, \+(49|50)(\.\d)? % when tried again", said)
        assert "FAIL: 1 link slow" in said


def test_a_slow_node_has_no_slow_links(tmp_path, capsys):
    again = {pair: 2.0 for pair in PairRounds(message_bytes=4, ranks_per_node=2).pairs(16) if 6 in pair or 7 in pair}
    code, told = answer(capsys, rounds_journal(tmp_path, slow={3}, again=again))
    assert (1, {"gpu3": "slow"}, []) == (code, standings(told), told["slow_links"])


class Looks:
    """Ranks whose message times are drawn; the runs of suspected rounds are counted."""

    def __init__(self, ranks, slow, *, transient=0.0, seed=1):
        self.ranks, self.slow, self.transient, self.draw = ranks, slow, transient, random.Random(seed)
        self.asked = []

    def __call__(self, workload, purpose):
        self.asked.append(workload.again)
        times_s = {}
        for pair in workload.pairs(self.ranks):
            time_s = 1e-3 * self.slow.get(pair, 1.0) * (1 + self.draw.gauss(0, 0.008))
            times_s[pair] = time_s * (1.3 if not workload.again and self.draw.random() < self.transient else 1)
        facts = [rank_facts(rank, host=f"gpu{rank}", device="cuda:0") for rank in range(self.ranks)]
        return measurement_of([0.1], facts, spans=spans(times_s, both=True, messages=workload.messages))


def test_the_rounds_of_suspected_links_are_tried_again_four_times():
    workload = PairRounds(message_bytes=1024, rounds="all")
    looks = Looks(16, {(2, 9): 1.3})
    settled, (record,) = workload.settle(looks)
    (round_of_it,) = [number for number, pairs in enumerate(workload.schedule(16)) if (2, 9) in pairs]
    assert (workload, [(), *[(round_of_it,)] * 4]) == (settled, looks.asked)
    assert ("rank 2 and 9 again", pytest.approx(1.3e-3, rel=0.02)) == (record.name, record.value)
    healthy = Looks(16, {})
    assert ((), [()]) == (workload.settle(healthy)[1], healthy.asked)


def test_links_congested_once_are_cleared_and_slow_ones_are_found():
    """Of 64 nodes 2 % of the links are congested at first: all are suspected, and cleared."""
    found = suspected = 0
    for seed in range(4):
        looks = Looks(64, {(5, 40): 1.1}, transient=0.02, seed=seed)
        _, records = PairRounds(message_bytes=1024, rounds="all").settle(looks)
        suspected += len(records)
        slow = [record for record in records if record.value > 1.05e-3]
        found += [record.name for record in slow] == ["rank 5 and 40 again"]
    assert 4 == found
    assert suspected > 80


# -- real processes on eight network namespaces -----------------------------------------------------------------------

NAMESPACE = f"probe{os.getpid()}"


def why_not():
    """Why no network namespaces can be made here; empty where they can."""
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    if os.geteuid():
        return "network namespaces need root"
    made = subprocess.run(["ip", "netns", "add", NAMESPACE], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


@pytest.mark.slow
def test_a_slow_link_a_held_rank_and_an_absent_node_are_named_and_nobody_else():
    if reason := why_not():
        pytest.skip(reason)
    expected, found = one_run(8, 0, 200.0)
    assert {"slow", "absent"} == set(expected.values())
    assert expected == found
