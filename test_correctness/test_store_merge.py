"""Baseline files: merged as a union in any order, pruned, and the reference that a level is judged against."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import BaselineError
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Acceptance, Hardware, machine_sessions, merge, newest, prune
from perfsuite.baselines.document import dumps, loads
from perfsuite.baselines.draft import Draft, NewRuns
from perfsuite.baselines.runs import moment
from perfsuite.platforms.host import Host, boot_of
from test_correctness.helpers.stored_files import (
    HARDWARE,
    NOW,
    OUT_OF_MEMORY,
    baseline_of,
    case,
    entry_in,
    entry_of,
    offer,
    run_of,
    sessions_in,
)
from test_correctness.test_git import run_git as git


@st.composite
def files_of_one_machine(draw):
    pool = [run_of(f"s{index}", days_old=40 - index, number=index % 2) for index in range(18)]
    entries = []
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        kept = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=14, unique_by=lambda run: run.key))
        accepted = draw(st.none() | st.sampled_from(kept))
        reason = Acceptance(reason="r", session=accepted.session, time=accepted.time) if accepted else None
        if accepted:
            kept = [run for run in kept if moment(run.time) >= moment(accepted.time)]
        entries.append(entry_of(*newest(kept), case=case(name), accepted=reason))
    return baseline_of(*entries)


@settings(max_examples=100, deadline=None)
@given(files_of_one_machine(), files_of_one_machine(), files_of_one_machine())
def test_merging_is_a_union_in_any_order(one, two, three):
    require_union(one, two, three)


def require_union(one, two, three):
    assert merge(one, one) == one
    assert merge(one, two) == merge(two, one)
    assert merge(merge(one, two), three) == merge(one, merge(two, three))


def test_files_of_different_hardware_or_changed_runs_are_not_merged(tmp_path):
    first = offer(tmp_path / "a", run_of("s0")).path
    more = Hardware(platform="cpu", fingerprint="cpu-more", key={"cpu_model": "Test CPU", "cores": 4})
    other = offer(tmp_path / "b", run_of("s0"), hardware=more).path
    before = first.read_bytes()
    with pytest.raises(BaselineError, match=r"differ in hardware \(cores 4, stored 2\)"):
        store.merge_files(first, [other])
    changed = offer(tmp_path / "c", run_of("s0", median_s=0.02)).path
    with pytest.raises(BaselineError, match="one of them was changed after it was measured"):
        store.merge_files(first, [changed])
    assert first.read_bytes() == before


def test_prune_drops_by_age_by_name_and_what_was_superseded():
    aged = run_of("s0", 200)
    old = entry_of(aged, run_of("s1", 10), reference=(run_of("s1", 10),))
    larger = case("a", parameters={"message_bytes": 2048})
    other = entry_of(aged, case=case("b"))
    whole = baseline_of(old, entry_of(run_of("s2", 5), case=larger), other)
    kept, said = prune(whole, now=NOW, older_than_days=120)
    assert [len(entry.runs) for entry in kept.entries.values()] == [1, 1]
    assert len(said) == 2
    kept, said = prune(whole, now=NOW, superseded=True)
    assert set(kept.entries) == {larger.key, other.case.key}
    assert "superseded (dtype=absent, stored fp32; message_bytes=2048, stored 1024)" in said[0]
    kept, _ = prune(whole, now=NOW, case="*test_b*")
    assert other.case.key not in kept.entries


def test_prune_never_drops_the_reference_of_a_case_that_stays():
    runs = tuple(run_of(f"s{index}", 200 - index) for index in range(10))
    entry = entry_of(*runs, run_of("new", 5))
    kept, said = prune(baseline_of(entry), now=NOW, older_than_days=60)
    (left,) = kept.entries.values()
    assert left.reference == entry.reference == runs[:8]
    assert left.runs == (*runs[:8], run_of("new", 5))
    assert said == (f"{case().node}: 2 of 11 runs dropped, too old",)
    assert prune(kept, now=NOW, older_than_days=1)[0].entries == {}


@pytest.fixture
def branches(tmp_path):
    """A repository whose baselines git merges by the driver; gives what adds a session's run on a branch."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "config", "merge.perfsuite.driver", f"{sys.executable} -m perfsuite baselines merge-driver %O %A %B")
    (tmp_path / ".gitattributes").write_text("baselines/**/*.json merge=perfsuite\n")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")

    def add(branch, session, days_old=1, *switch):
        git(tmp_path, "switch", "--quiet", *switch, branch)
        path = offer(tmp_path / "baselines", run_of(session, days_old)).path
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "--message", branch)
        return path

    return add


def test_git_merges_the_runs_of_two_branches_by_the_driver(tmp_path, branches):
    offer(tmp_path / "baselines", run_of("s0", 3), name="dropped")
    branches("main", "s0", 3)
    branches("side", "s1", 2, "--create")
    path = branches("main", "s2", 1)
    store.prune_file(path, now=NOW, case="*dropped*")
    git(tmp_path, "commit", "--quiet", "--all", "--message", "pruned")
    git(tmp_path, "merge", "--quiet", "--no-edit", "side")
    merged = store.read(path)
    assert {case().node} == set(merged.by_node)
    assert ["s0", "s1", "s2"] == [run.session for run in merged.by_node[case().node][0].runs]


def test_files_that_two_branches_add_are_merged_and_damaged_ones_are_a_conflict(tmp_path, branches):
    branches("side", "s1", 2, "--create")
    path = branches("main", "s2", 1)
    git(tmp_path, "merge", "--quiet", "--no-edit", "side")
    assert ["s1", "s2"] == [run.session for run in store.read(path).by_node[case().node][0].runs]
    path.write_text(path.read_text() + "x")
    git(tmp_path, "commit", "--quiet", "--all", "--message", "damaged")
    branches("side", "s3")
    git(tmp_path, "switch", "--quiet", "main")
    with pytest.raises(AssertionError, match="the file was not changed"):
        git(tmp_path, "merge", "--no-edit", "side")
    assert path.read_text().endswith("x")


HOUR = 1 / 24


def names(runs):
    return [run.session for run in runs]


# -- sessions of the machine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ({"days_old": 9 * HOUR}, "first"),
        ({"days_old": 8.9 * HOUR}, "later"),
        ({"days_old": 9.5 * HOUR, "boot": "b"}, "later"),
        ({"days_old": 9.5 * HOUR, "commit": "c"}, "later"),
    ],
)
def test_a_session_of_the_machine_ends_with_its_boot_its_commit_or_a_pause_of_an_hour(later, expected):
    runs = [run_of("first", 10 * HOUR), run_of("later", **later)]
    assert machine_sessions(runs) == {"first": "first", "later": expected}


def test_a_pause_is_counted_from_the_last_run_of_any_case_in_the_file(tmp_path):
    offer(tmp_path, run_of("first", 10 * HOUR), run_of("later", 8.5 * HOUR))
    assert len(set(store.load(tmp_path, HARDWARE).machine_session.values())) == 2
    offer(tmp_path, run_of("first", 9 * HOUR, number=1), name="b")
    assert store.load(tmp_path, HARDWARE).machine_session == {"first": "first", "later": "first"}


def test_two_machines_of_one_kind_do_not_end_each_others_sessions():
    runs = [run_of(f"s{index}", 1 - index * HOUR / 2, boot="ab"[index % 2]) for index in range(6)]
    assert set(machine_sessions(runs).values()) == {"s0", "s1"}


def test_the_boot_is_read_where_linux_tells_it(tmp_path):
    assert boot_of(Host(root=tmp_path)) == ""
    file = tmp_path / "proc/sys/kernel/random/boot_id"
    file.parent.mkdir(parents=True)
    file.write_text("6f0f4d3e-2c1b-4a59-8e47-d60a7b1c2d3e\n")
    assert boot_of(Host(root=tmp_path)) == "6f0f4d3e2c1b"


# -- the reference -------------------------------------------------------------------------------------------------


def test_a_reference_fills_and_then_stays(tmp_path):
    for index in range(30):
        offer(tmp_path, run_of(f"s{index:02d}", 40 - index))
        assert names(entry_in(tmp_path).reference) == [f"s{number:02d}" for number in range(min(index + 1, 8))]
    assert sessions_in(tmp_path) == [f"s{index:02d}" for index in range(18, 30)]


def test_runs_of_few_sessions_fill_it_up_to_twelve(tmp_path):
    for index in range(4):
        offer(tmp_path, *(run_of(f"s{index}", 9 - index, number=number) for number in range(6)), session_runs=6)
    assert names(entry_in(tmp_path).reference) == ["s0"] * 6 + ["s1"] * 6


def test_sessions_within_the_hour_count_once(tmp_path):
    for index in range(14):
        offer(tmp_path, run_of(f"s{index:02d}", 2 - index * HOUR / 2))
    assert len(entry_in(tmp_path).reference) == 12


def test_runs_out_of_memory_are_part_of_it(tmp_path):
    offer(tmp_path, run_of("s0", 3, **OUT_OF_MEMORY), run_of("s1", 2, **OUT_OF_MEMORY))
    assert names(entry_in(tmp_path).reference) == ["s0", "s1"]


def test_a_run_of_both_lists_is_one_line_and_keeps_its_line(tmp_path):
    path = offer(tmp_path, *(run_of(f"s{index:02d}", 40 - index) for index in range(12)), session_runs=12).path
    before = path.read_text().splitlines()
    offer(tmp_path, run_of("s12", 1))
    after = path.read_text().splitlines()
    assert sum('"quantiles_s"' in line for line in after) == 13
    kept, still = ([line for line in lines if '"reference":true' in line] for lines in (before, after))
    assert kept == still
    for index in range(13, 22):
        offer(tmp_path, run_of(f"s{index:02d}", 0.9 - index / 100))
    assert sum('"quantiles_s"' in line for line in path.read_text().splitlines()) == 20


# -- merged files --------------------------------------------------------------------------------------------------


def test_a_merge_of_one_epoch_takes_the_older_reference_runs(tmp_path):
    first = baseline_of(entry_of(*(run_of(f"a{index}", 40 - index) for index in range(10))))
    second = baseline_of(entry_of(*(run_of(f"b{index}", 35.5 - index) for index in range(10))))
    (entry,) = merge(first, second).entries.values()
    assert names(entry.reference) == ["a0", "a1", "a2", "a3", "a4", "b0", "a5", "b1"]
    assert merge(second, first) == merge(first, second)


def test_a_merge_of_two_epochs_takes_the_newer_ones_reference():
    runs = tuple(run_of(f"s{index}", 40 - index) for index in range(10))
    accepted = Acceptance(reason="new driver", session="n", time=run_of("n", 20).time, kind="environment")
    first = baseline_of(entry_of(*runs, reference=runs[:8]))
    second = baseline_of(entry_of(run_of("n", 20), run_of("m", 19), accepted=accepted))
    third = baseline_of(entry_of(*runs, run_of("late", 18), reference=runs[:8]))
    for whole in (merge(merge(first, second), third), merge(third, merge(second, first)), merge(second, third)):
        (entry,) = whole.entries.values()
        assert entry.accepted == accepted
        assert names(entry.reference) == ["n", "m"]
        assert names(entry.runs) == ["n", "m", "late"]


@st.composite
def appended(draw):
    """The same case in a file that took in any sessions, one after the other."""
    entry = None
    for index in sorted(draw(st.sets(st.integers(0, 39), min_size=1, max_size=20))):
        runs = tuple(run_of(f"s{index:02d}", 40 - index, number=number) for number in range(1 + index % 3))
        draft = Draft(mode="append", reason="", session_runs=4)
        entries = {case().key: entry} if entry else {}
        entry = draft.apply(entries, [NewRuns(case=case(), runs=runs, verdict="pass")])[case().key]
    return baseline_of(entry)


@settings(max_examples=60, deadline=None)
@given(appended(), appended(), appended())
def test_any_order_of_merging_gives_the_same_reference(one, two, three):
    require_union(one, two, three)
    whole = merge(one, two)
    assert loads(dumps(whole).encode()) == whole
