"""Equal ids, other settings: whatever compares two results says by name what differs, and compares nothing else."""

import dataclasses
import functools
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.baselines import store
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.runs import MetricMeaning
from perfsuite.baselines.summarise import case_of, changed_settings, summarise
from perfsuite.cli import ab
from perfsuite.gate.comparable import find
from perfsuite.history.file import have_equal_settings, line_of, read_line, session_of
from perfsuite.history.findings import findings_of
from perfsuite.history.order import OrderedSessions
from perfsuite.record.run import Revision
from perfsuite.record.workload import FunctionWorkload
from perfsuite.reports.changes import changes_between, joined, timed_result
from perfsuite.reports.material import material_of
from perfsuite.reports.page.sections.verdict import comparison, sentence
from perfsuite.reports.stored import Recording
from perfsuite.run import settling
from perfsuite.runtime.values import recorded_defaults
from perfsuite.workloads import AllReduce
from test_correctness.helpers.runs import record, result
from test_correctness.helpers.scripted_driver import repository
from test_correctness.helpers.stored_files import HARDWARE

NODE = "t.py::test_it[cpu]"
UNKNOWN = object()


def ran(median_s=0.5, *, n=None, defaults=None, **changes):
    parameters = {} if n is None else {"n": n}
    return result(NODE, median_s, parameters=parameters, defaults=defaults or {}, **changes)


def sessions(*results):
    made = []
    for number, one in enumerate(results):
        same = {"session": f"s{number}", "platform": "cpu", "fingerprint": "cpu-x", "revision": Revision()}
        own = dataclasses.replace(one, session=f"s{number}")
        made.append(session_of([own], time=f"2026-01-{number + 1:02}T00:00:00+00:00", **same))
    return tuple(made)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (ran(n=128), ran(n=256), "n: 128 -> 256"),
        (ran(defaults={"n": 128}), ran(defaults={"n": 256}), "n: 128 -> 256"),
        (ran(defaults={"n": 128}), ran(n=256, defaults={"n": 128}), "n: 128 -> 256"),
        (ran(defaults={"n": 128}), ran(n=128, defaults={"n": 256}), ""),
        (ran(), ran(n=128, defaults={"n": 128}), ""),
        (ran(n=128, defaults={"n": 128}), ran(), ""),
        (ran(), ran(n=128), "n: absent -> 128"),
        (ran(), ran(n=256, defaults={"n": 128}), "n: absent -> 256"),
        (ran(n=2, defaults={"n": 1}), ran(n=2, defaults={"n": 2}), ""),
        (ran(n=2, defaults={"n": 1}), ran(n=2), ""),
        (ran(world_size=2), ran(world_size=4), "world size: 2 -> 4"),
        (ran(workload="t:step"), ran(workload="suite.t:step"), ""),
        (ran(workload="m:AllReduce", n=1), ran(workload="m:AllGather", n=1), "workload: AllReduce -> AllGather"),
    ],
)
def test_what_differs_is_named_and_defaults_are_filled_in_by_two_results_and_by_a_history(before, after, told):
    assert changed_settings(before, after) == told
    pair = [read_line(line_of(session).encode()) for session in sessions(before, after)]
    for left, right in (pair, pair[::-1]):
        assert have_equal_settings(NODE, left, right) == (told == "")


def scale(rank, n=128, kind=UNKNOWN, *, dtype="fp32"):
    return lambda: None


def test_defaults_of_functions_and_workloads_are_recorded_as_far_as_they_can_be():
    assert recorded_defaults(FunctionWorkload(function=scale).defaults()) == {"n": 128, "dtype": "fp32"}
    assert "message_bytes" not in AllReduce(message_bytes=8).defaults()
    assert AllReduce(message_bytes=8).defaults()["dtype"] == AllReduce(message_bytes=8).dtype


# -- A/B -----------------------------------------------------------------------------------------------------------


def runs(monkeypatch, *sides):
    """Both arms of an A/B, which measure these results."""
    of = {name: {one.case: one for one in results} for name, results in zip("ab", sides, strict=True)}
    monkeypatch.setattr(ab, "run_arm", lambda arm, arguments, deadline_s: of[arm])
    return ab._Runs(arms=["a", "b"], arguments=[], deadline_s=1.0)


def test_an_ab_of_other_settings_alone_stops_after_a_pair(monkeypatch):
    measured = runs(monkeypatch, [ran(n=128)], [ran(2.0, n=256)])
    with pytest.raises(ConfigurationError, match=r"^no case can be compared: t.py::test_it\[cpu\]: n: 128 -> 256; cho"):
        ab.measure(measured, [6], 0.03)
    assert measured.pairs == 1


def test_an_ab_without_a_common_case_is_refused(monkeypatch):
    measured = runs(monkeypatch, [result("t.py::a")], [result("t.py::b"), ran(n=1)])
    with pytest.raises(ConfigurationError, match=r"no case can be compared: .*: not measured in every run; and 2 more"):
        ab.measure(measured, [3], 0.03)


def test_an_ab_compares_the_cases_whose_settings_are_equal(monkeypatch):
    equal = result("t.py::equal")
    measured = runs(monkeypatch, [ran(n=128), equal], [ran(2.0, n=256), equal])
    assert [one.case for one in ab.measure(measured, [3], 0.03)] == ["t.py::equal"]
    assert measured.changed() == {NODE: "n: 128 -> 256"}


# -- the gate and its stored runs ----------------------------------------------------------------------------------


def new_runs(one, number, **changes):
    """A run of session ``number`` as it is offered to the stored ones."""
    stamped = dataclasses.replace(one, session=f"s{number}", started_at=f"2026-01-0{number + 1}T00:00:00+00:00")
    run = dataclasses.replace(summarise(stamped), process="fresh")
    return NewRuns(case=dataclasses.replace(case_of(stamped), **changes), runs=(run,))


def stored_of(folder, *results):
    """What is stored of these results, a session each."""
    for number, one in enumerate(results):
        assert store.update(folder, HARDWARE, [new_runs(one, number)], mode="append").written
    return store.load(folder, HARDWARE)


def test_a_changed_default_is_not_compared_with_what_is_stored(tmp_path):
    kept = stored_of(tmp_path, ran(defaults={"n": 128}), ran(defaults={"n": 128}))
    match = find(case_of(ran(defaults={"n": 256})), baseline=kept, hardware=HARDWARE, folder=Path("none"))
    assert match == ("n=256, stored 128",)
    same = find(case_of(ran(defaults={"n": 128})), baseline=kept, hardware=HARDWARE, folder=Path("none"))
    assert len(same.runs) == 2


def test_runs_that_were_stored_without_defaults_or_before_a_parameter_was_added_go_on(tmp_path):
    kept = stored_of(tmp_path / "a", ran(), ran(defaults={"n": 128}), ran(n=128, defaults={"n": 128}))
    (entry,) = kept.entries.values()
    assert len(entry.runs) == 3
    apart = stored_of(tmp_path / "b", ran(defaults={"n": 128}), ran(defaults={"n": 256}))
    assert [len(entry.runs) for entry in apart.entries.values()] == [1, 1]


def test_a_metric_in_another_unit_is_another_case_until_it_is_accepted(tmp_path):
    def in_unit(unit, number):
        return new_runs(ran(n=1), number, metrics={"rate": MetricMeaning(unit=unit, better="higher")})

    old, new = in_unit("GB/s", 0), in_unit("MB/s", 1)
    assert new.case.differences(old.case) == ("unit of rate MB/s (higher), stored GB/s (higher)",)
    store.update(tmp_path, HARDWARE, [old], mode="append")
    refused = store.update(tmp_path, HARDWARE, [new], mode="append")
    assert "not comparable with the stored runs: unit of rate" in refused.refused[NODE]
    assert not refused.written
    store.update(tmp_path, HARDWARE, [new], mode="accept", reason="in MB/s now")
    (entry,) = store.load(tmp_path, HARDWARE).entries.values()
    assert (entry.case.metrics["rate"].unit, len(entry.runs)) == ("MB/s", 1)


@pytest.mark.extended
def test_a_base_that_runs_other_settings_is_no_base(stored, machine, monkeypatch):
    from test_correctness.helpers.gated_repository import ScriptedArms, Turns, commit_all

    commit_all("base")
    commit_all("new")
    arms = ScriptedArms(machine, monkeypatch)
    run = arms.run

    def with_another_number(arm, arguments, deadline_s):
        results = run(arm, arguments, deadline_s)
        if not arm.name.startswith("base"):
            return results
        return {case: dataclasses.replace(one, parameters={"number": 7}) for case, one in results.items()}

    monkeypatch.setattr(settling, "LiveArm", functools.partial(Turns, with_another_number))
    machine.factors[1] = 2.0
    done = stored.run("--perf-gate", "--perf-against=HEAD~1")
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["*unconfirmed: base (HEAD~1) ran it with other settings: number: 7 -> 1*"])


def edit_test(old, new):
    Path("test_it.py").write_text(Path("test_it.py").read_text().replace(old, new))


def test_a_resumed_run_measures_a_case_whose_default_changed_again(pytester, monkeypatch):
    test = "\ndef scaled(rank, n={}):\n    return lambda: None\n\ndef test_scaled(perf):\n    perf(scaled)\n"
    repo = repository(pytester, monkeypatch, test.format(1))
    repo.run("--perf-journal=first.jsonl")
    repo.run("--perf-journal=same.jsonl", "--perf-resume=first.jsonl")
    assert len(repo.driver.jobs) == 1
    edit_test("n=1", "n=2222")
    repo.run("--perf-journal=second.jsonl", "--perf-resume=first.jsonl")
    assert len(repo.driver.jobs) == 2


# -- pages and histories -------------------------------------------------------------------------------------------


def test_a_page_compares_no_case_with_other_settings():
    before, after = timed_result(ran(n=128)), timed_result(ran(2.0, n=256))
    (change,) = changes_between([before], [after])
    assert (change.effect, change.word, change.tone) == (None, "not comparable: n: 128 -> 256", "plain")
    assert joined(before, after)[1] == (2.0,)
    assert len(joined(before, timed_result(ran(0.6, n=128)))[1]) == 2


@pytest.mark.extended
def test_a_history_searches_the_newest_settings_and_says_how_many_it_leaves_out():
    pytest.importorskip("ruptures")
    kept = sessions(*[ran(0.01, n=128)] * 8, *[ran(0.04, n=256)] * 8)
    kept = tuple(read_line(line_of(session).encode()) for session in kept)
    ordered = OrderedSessions(branch="", sessions=kept, places=(None,) * 16, subjects={})
    found = findings_of(ordered)
    assert found.changes == ()
    assert found.ordered.notes == (
        "1 case ran with other parameters, ranks or backend up to 2026-01-08T00:00: those times are not compared with "
        f"the later ones, e.g. {NODE}",
    )
    unknown = [dataclasses.replace(one, cases={NODE: one.cases[NODE]._replace(settings="")}) for one in kept[:8]]
    mixed = dataclasses.replace(ordered, sessions=(*unknown, *kept[8:]))
    assert findings_of(mixed).changes  # lines of earlier versions say nothing of settings


def test_a_page_of_other_settings_alone_says_that_nothing_was_compared():
    runs = [Recording(run=record(one)) for one in (ran(n=128), ran(2.0, n=256))]
    material = material_of([runs[1]], runs[0])
    told, is_bad = sentence(material)
    assert told.startswith("Nothing was compared: 1 case ran with other settings than before and cannot be compared.")
    assert not is_bad
    (table,) = comparison(material).blocks
    assert table.grid.title == "Cases that were not compared"
    assert table.grid.rows[0][-1] == "not comparable: n: 128 -> 256"


# -- pytest-benchmark's own comparison -----------------------------------------------------------------------------

WITH_A_PARAMETER = "\ndef scaled(rank, n):\n    return lambda: None\n\ndef test_scaled(perf):\n    perf(scaled, n={})\n"


@pytest.mark.extended
@pytest.mark.parametrize("saved", [True, False])
def test_benchmark_compare_leaves_out_cases_with_other_settings(pytester, monkeypatch, saved):
    repo = repository(pytester, monkeypatch, WITH_A_PARAMETER.format(1))
    repo.run("--benchmark-save=first" if saved else "--perf-update=append")
    (file,) = (path.resolve() for path in Path(".benchmarks" if saved else "baselines").rglob("*.json"))
    fail = ["--benchmark-compare-fail=median:5%"]
    done = repo.run(f"--benchmark-compare={file}", *fail, "--perf-show=cases")
    assert done.ret == 0
    assert "not compared with" not in done.stdout.str()
    edit_test("n=1)", "n=2222)")
    done = repo.run(f"--benchmark-compare={file}", *fail, "--perf-show=cases")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stdout.fnmatch_lines(["not compared with *test_it.py::test_scaled*: n: 1 -> 2222", "*no case was compared*"])


def test_a_plain_benchmark_beside_a_changed_case_is_compared(pytester, monkeypatch):
    plain = "\ndef test_plain(benchmark):\n    benchmark.pedantic(len, ([],), rounds=3)\n"
    repo = repository(pytester, monkeypatch, WITH_A_PARAMETER.format(1) + plain)
    repo.run("--benchmark-save=first")
    (file,) = (path.resolve() for path in Path(".benchmarks").rglob("*.json"))
    edit_test("n=1)", "n=2222)")
    done = repo.run(f"--benchmark-compare={file}", "--benchmark-compare-fail=median:100000%")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["not compared with *test_it.py::test_scaled*: n: 1 -> 2222"])


def test_options_that_change_what_a_sample_is_are_settings():
    before, after = ran(n=1), ran(n=1, environment={"options": {"perf-cache-flush": "yes", "perf-pin": "numa"}})
    assert changed_settings(before, after) == "--perf-cache-flush: not given -> yes"
