"""What the gate asks for and says where its time is limited, on clocks that only runs and starts of arms move."""

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.gate_simulation import HOSTS, Plan, Scene, settle_within
from perfsuite.base.errors import CaseStopped
from perfsuite.gate.budget import Costs, Spending
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.journal import read_journal
from perfsuite.record.verdict import FAILING, GateSettings
from perfsuite.run import settling
from perfsuite.run.arms import Arm, ArmFailed
from perfsuite.run.settling import Base, GateClock, Settling, rounds
from test_correctness.helpers.gate_runs import case_of, jitter, node_of, run_of, stored_runs
from test_correctness.helpers.gated_repository import ScriptedArms, commit_all

COSTS = Costs(start_s=8.0, usual_run_s=1.0)
ENDED = "the gate's budget of 100 s ended"
NAMES = "abcdefghi"


def within(budget_s, slower, *, stored_noise=None, cost=COSTS):
    """Nine cases, slower by what ``slower`` says, settled within a budget: gate, cases cut short, requests, time."""
    stored = {name: stored_runs() for name in NAMES}
    for place, name in enumerate(stored_noise or ()):  # no two cases alike: what they share is the host's
        noise = (0.0, 1.0, -0.7, 0.5, -0.9, 0.2, 0.8, -0.4)
        turned = noise[place % 8 :] + noise[: place % 8]
        stored[name] = stored_runs(tuple(stored_noise[name] * change for change in turned))
    given = [GateCase(case=case_of(name), specs=REGISTRY, stored=stored[name]) for name in NAMES]
    gate, spent_s, done = Gate(given, GateSettings(can_run_base=True)), 0.0, []
    new = {node_of(name): slower.get(name, 0.0) for name in NAMES}
    for node, change in new.items():
        gate.add(node, run_of(change + jitter(len(node))))
    while requests := gate.next_requests(None, Spending(whole_s=budget_s, left_s=budget_s - spent_s, costs=cost)):
        for turn in rounds(requests):
            spent_s += cost.of({turn[0].kind: {request.case: 1 for request in turn}})
            cost = cost if turn[0].kind == "run" else dataclasses.replace(cost, starts={})  # arms stay alive
            for request in turn:
                done.append(request)
                run = run_of(new[request.case] + jitter(len(done)), number=len(done))
                if request.kind == "run":
                    gate.add(request.case, run)
                else:
                    gate.add_pair(request.case, base=run_of(jitter(len(done) + 3)), new=run)
    return gate, gate.end(ENDED), done, spent_s


def test_with_time_for_all_the_same_is_asked_as_without_a_limit():
    slower = {"a": 0.2, "b": 0.05, "c": -0.1}
    free, limited = (within(budget_s, slower) for budget_s in (math.inf, 1e6))
    assert free[2] == limited[2]
    assert free[0].verdicts() == limited[0].verdicts()
    assert free[1] == ()
    assert {"run", "ab_pair"} == {request.kind for request in free[2]}


def test_what_is_not_measured_further_neither_passes_nor_fails_and_says_why():
    gate, cut, done, _ = within(3.0, {"a": 0.2, "b": 0.2})
    verdicts = gate.verdicts()
    assert sorted(cut) == [node_of("a"), node_of("b")]
    assert [] == [request for request in done if request.kind == "ab_pair"]
    for node in cut:
        assert verdicts[node].name == "inconclusive"
        assert verdicts[node].reasons[0] == f"{ENDED} before it was decided"
    assert all(verdict.name == "pass" for node, verdict in verdicts.items() if node not in cut)
    assert gate.next_requests() == []


def test_a_case_that_few_pairs_show_is_regressed_and_stays_so():
    # there is time for four of its six pairs
    gate, cut, done, spent_s = within(29.0, {"a": 0.3})
    pairs = [request for request in done if request.kind == "ab_pair"]
    assert 3 <= len(pairs) < 6
    assert spent_s <= 29.0
    assert cut == (node_of("a"),)
    verdict = gate.verdicts()[node_of("a")]
    assert verdict.name == "regressed"
    assert f"{ENDED} before all runs and pairs were made" in verdict.flags


def test_pairs_are_shared_out_so_that_most_cases_are_decided():
    needs = {"a": 3, "b": 5, "c": 99}

    def decides(node, count):
        return count >= needs[node]

    wanted = dict.fromkeys(needs, 6)
    shared = {
        left_s: Spending(whole_s=500.0, left_s=left_s, costs=COSTS).shared_out("ab_pair", wanted, decides)
        for left_s in (20.0, 24.0, 30.0, 37.0, 40.0)
    }
    assert shared == {
        20.0: {},
        24.0: {"a": 4},  # two arms take 16 s to start
        30.0: {"a": 6},
        37.0: {"a": 5, "b": 5},
        40.0: {"a": 6, "b": 6},
    }


def test_few_pairs_of_a_noisy_case_are_not_worth_their_time():
    # Three pairs can show 12 % of a quiet case; of one that scatters by 6 % they can show nothing.
    quiet = within(27.0, {"a": 0.12})
    noisy = within(27.0, {"a": 0.12}, stored_noise=dict.fromkeys(NAMES, 0.06))
    assert any(request.kind == "ab_pair" for request in quiet[2])
    assert not any(request.kind == "ab_pair" for request in noisy[2])
    assert noisy[1]


def test_screening_leaves_time_for_suspects():
    slow = Costs(start_s=1.0, usual_run_s=1.0)
    noisy = {name: 0.03 for name in NAMES if name != "a"}
    _, _, done, spent_s = within(60.0, {"a": 0.3}, stored_noise=noisy, cost=slow)
    assert spent_s <= 60.0
    first = next(place for place, request in enumerate(done) if request.why == "re-measurement")
    assert first <= 20  # a third of the budget
    assert any(request.kind == "ab_pair" for request in done)


def test_the_plan_is_an_upper_bound_of_what_is_asked():
    for slower in ({}, {"a": 0.2}, {"a": 0.05, "b": 0.3}):
        given = [GateCase(case=case_of(name), specs=REGISTRY, stored=stored_runs()) for name in NAMES]
        gate = Gate(given, GateSettings(can_run_base=True))
        for name in NAMES:
            gate.add(node_of(name), run_of(slower.get(name, 0.0)))
        most = {kind: sum(counts.values()) for kind, counts in gate.outlook().items()}
        _, _, done, _ = within(math.inf, slower)
        assert all(sum(request.kind == kind for request in done) <= count for kind, count in most.items())
    assert most["ab_pair"] > 0


@pytest.mark.parametrize("budget_s", [20.0, 60.0, 180.0])
def test_simulated_sessions_end_in_time_and_nothing_passes_that_needed_more(budget_s):
    plan = Plan(cases=9, budget_s=budget_s, run_s=1.0, start_s=4.0)
    seen = set()
    for seed, host in enumerate(("R1", "R3", "R4", "R4")):
        scene = Scene(HOSTS[host], seed, slowed={0: 0.1, 1: 0.3}, plan=plan)
        gate, index_of = plan_gate(scene, plan)
        settle_within(gate, scene, index_of, plan)
        assert scene.spent_s <= budget_s + 2 * (4.0 + 9.0)
        cut = gate.end("again")
        verdicts = gate.verdicts()
        assert not [node for node in cut if verdicts[node].name in ("pass", "improved")]
        assert not [node for node in list(index_of)[2:] if verdicts[node].name in FAILING]
        assert verdicts[next(iter(index_of))].name != "pass"
        seen |= set(cut)
    assert seen or budget_s > 60


@pytest.mark.parametrize(("start_s", "expected_s"), [(70.0, [80.0, 10.0]), (90.0, [80.0])])
def test_start_and_turn_of_an_arm_share_what_is_left_of_the_budget_and_a_minute(monkeypatch, start_s, expected_s):
    now_s, limits_s = [0.0], []

    class Slow:
        def __init__(self, arm, arguments, cases):
            self.serves, self.close = lambda cases: True, lambda: None

        def start(self, limit_s):
            limits_s.append(limit_s)
            now_s[0] += min(start_s, limit_s)
            if start_s > limit_s:
                raise ArmFailed("base did not start in time")

        def measure(self, cases, limit_s):
            limits_s.append(limit_s)
            now_s[0] += limit_s
            raise ArmFailed("base did not end in time")

    monkeypatch.setattr(settling, "LiveArm", Slow)
    base = Base(base=Arm(name="base", root=Path()), new=Arm(name="new", root=Path()), case_deadline_s=lambda _: 600.0)
    clock = GateClock(budget_s=20.0, now=lambda: now_s[0], began_s=0.0)
    gate = Gate([], GateSettings())
    settled = Settling(gate=gate, clock=clock, say=lambda *told: None, rerun=None, add=None, base=base)
    settled._expected = frozenset({"a", "b"})
    assert settled._arm(base.base, ["a"]) == {}
    assert limits_s == expected_s


def plan_gate(scene, plan):
    nodes = [f"test_{index}.py::test_{index}" for index in range(plan.cases)]
    cases = [
        GateCase(case=dataclasses.replace(case_of(), node=node), specs=REGISTRY, stored=tuple(runs))
        for node, runs in zip(nodes, scene.stored, strict=True)
    ]
    gate = Gate(cases, GateSettings(can_run_base=True))
    for index, node in enumerate(nodes):
        gate.add(node, scene.measure(index, "new"))
    return gate, {node: index for index, node in enumerate(nodes)}


class TestSessions:
    """Whole pytest runs; a scripted driver and scripted arms measure, and move the clock."""

    @pytest.fixture
    def clock(self, stored, machine, monkeypatch):
        commit_all("base")
        machine.factors[1] = 1.1
        clock = Ticking(machine)
        stored.driver.script = clock.run
        ScriptedArms(machine, monkeypatch, took=clock.arm, now=lambda: clock.now_s)
        return clock

    @pytest.mark.extended
    def test_the_plan_and_the_end_are_told_with_q_and_kept(self, stored, clock):
        done = stored.run("--perf-gate", "--perf-against=HEAD", "-q", "--perf-gate-budget=30", "--perf-journal=j.jsonl")
        done.stdout.fnmatch_lines(
            [
                "perfsuite: gate: * may need up to * runs, about * s; budget 30 s",
                "perfsuite: gate: the gate's budget of 30 s ended: 1 case needed more runs (--perf-gate-budget)*",
            ]
        )
        record = read_journal(Path("j.jsonl")).gate
        assert record.by_case["test_it.py::test_case[cpu-1]"].name == "inconclusive"
        assert record.banner[0].startswith("the gate's budget of 30 s ended")
        assert done.ret == 0

    def test_the_usual_budget_is_told_and_enough_for_few_cases(self, stored, clock):
        done = stored.run("--perf-gate", "--perf-against=HEAD", "-q")
        done.stdout.fnmatch_lines(["*; budget 180 s", "perfsuite: gate: settled by * runs, * s"])
        done.assert_outcomes(passed=2, failed=1)

    def test_none_is_no_limit(self, stored, clock):
        done = stored.run("--perf-gate", "--perf-against=HEAD", "-q", "-o", "perf_gate_budget=none")
        done.stdout.fnmatch_lines(["*; no budget"])
        done.assert_outcomes(passed=2, failed=1)

    @pytest.mark.parametrize(("stop", "name"), [(CaseStopped("SIGTERM"), "SIGTERM"), (KeyboardInterrupt(), "SIGINT")])
    def test_what_is_known_when_a_signal_ends_it_is_told_and_kept(self, stored, clock, stop, name):
        clock.stop = stop
        self.interrupted(stored, name, "-q")
        record = read_journal(Path("j.jsonl")).gate
        names = {case.partition("[")[2]: verdict.name for case, verdict in record.by_case.items()}
        assert names == {"cpu-0]": "pass", "cpu-1]": "inconclusive", "cpu-2]": "pass"}
        reasons = record.by_case["test_it.py::test_case[cpu-1]"].reasons
        assert reasons[0] == f"the gate was interrupted by {name} before it was decided"

    @pytest.mark.parametrize(("stop", "name"), [(CaseStopped("SIGTERM"), "SIGTERM"), (KeyboardInterrupt(), "SIGINT")])
    def test_a_case_that_is_settled_in_place_when_a_signal_comes_is_reported(self, stored, clock, stop, name):
        clock.stop = stop
        self.interrupted(stored, name, "-x", "-k", "cpu-1", "--junitxml=j.xml")
        (verdict,) = read_journal(Path("j.jsonl")).gate.verdicts
        assert verdict.reasons[0] == f"the gate was interrupted by {name} before it was decided"
        assert 'name="test_case[cpu-1]"' in Path("j.xml").read_text()

    @staticmethod
    def interrupted(stored, name, *arguments):
        """A gated run that a signal ends; pytester hands Ctrl-C on."""
        arguments = ("--perf-gate", "--perf-against=HEAD", "--perf-journal=j.jsonl", *arguments)
        if name == "SIGINT":
            with pytest.raises(KeyboardInterrupt):
                stored.run(*arguments)
        else:
            stored.run(*arguments)


class Ticking:
    """A clock that a run moves by a second and an arm by ten; a signal may come when the first arm is started."""

    def __init__(self, machine):
        self.machine, self.now_s, self.stop = machine, 0.0, None

    def run(self, job):
        self.now_s += 1.0
        return self.machine(job)

    def arm(self):
        self.now_s += 10.0
        if self.stop is not None:
            raise self.stop
