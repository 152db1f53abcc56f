"""Baseline files: merged as a union in any order, pruned by age, name and what came after."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import BaselineError
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Acceptance, Baseline, Entry, Hardware, merge, newest, prune
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.runs import moment
from test_correctness.helpers.stored_files import HARDWARE, NOW, case, offer, run_of


@st.composite
def files_of_one_machine(draw):
    pool = [run_of(f"s{index}", days_old=40 - index, number=index % 2) for index in range(18)]
    entries = {}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        kept = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=14, unique_by=lambda run: run.key))
        accepted = draw(st.none() | st.sampled_from(kept))
        reason = Acceptance(reason="r", session=accepted.session, time=accepted.time) if accepted else None
        if accepted:
            kept = [run for run in kept if moment(run.time) >= moment(accepted.time)]
        entries[case(name).key] = Entry(case=case(name), runs=newest(kept), accepted=reason)
    return Baseline(hardware=HARDWARE, entries=entries)


@settings(max_examples=100, deadline=None)
@given(files_of_one_machine(), files_of_one_machine(), files_of_one_machine())
def test_merging_is_a_union_in_any_order(one, two, three):
    assert merge(one, one) == one
    assert merge(one, two) == merge(two, one)
    assert merge(merge(one, two), three) == merge(one, merge(two, three))


def test_merged_files_hold_every_run(tmp_path):
    first = offer(tmp_path / "a", run_of("s0", 3), run_of("s1", 2)).path
    second = offer(tmp_path / "b", run_of("s1", 2), run_of("s2", 1)).path
    offer(tmp_path / "b", run_of("s9"), name="only-b")
    target = tmp_path / "merged.json"
    whole = store.merge_files(target, [first, second])
    assert store.read(target) == whole
    assert [run.session for run in whole.by_node[case().node][0].runs] == ["s0", "s1", "s2"]
    assert store.merge_files(target, [second]) == whole


def test_files_of_different_hardware_or_changed_runs_are_not_merged(tmp_path):
    first = offer(tmp_path / "a", run_of("s0")).path
    new = NewRuns(case=case(), runs=(run_of("s0"),))
    more = Hardware(platform="cpu", fingerprint="cpu-more", key={"cpu_model": "Test CPU", "cores": 4})
    other = store.update(tmp_path / "b", more, [new], mode="append").path
    before = first.read_bytes()
    with pytest.raises(BaselineError, match=r"differ in hardware \(cores 4, stored 2\)"):
        store.merge_files(first, [other])
    changed = offer(tmp_path / "c", run_of("s0", median_s=0.02)).path
    with pytest.raises(BaselineError, match="one of them was changed after it was measured"):
        store.merge_files(first, [changed])
    assert first.read_bytes() == before


def test_prune_drops_by_age_by_name_and_what_was_superseded():
    aged = run_of("s0", 200)
    old = Entry(case=case("a"), runs=(aged, run_of("s1", 10)), reference=(run_of("s1", 10),))
    larger = case("a", parameters={"message_bytes": 2048})
    new = Entry(case=larger, runs=(run_of("s2", 5),))
    other = Entry(case=case("b"), runs=(aged,))
    whole = Baseline(hardware=HARDWARE, entries={each.case.key: each for each in (old, new, other)})
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
    entry = Entry(case=case(), runs=(*runs, run_of("new", 5)))
    kept, said = prune(Baseline(hardware=HARDWARE, entries={case().key: entry}), now=NOW, older_than_days=60)
    (left,) = kept.entries.values()
    assert left.reference == entry.reference == runs[:8]
    assert left.runs == (*runs[:8], run_of("new", 5))
    assert said == (f"{case().node}: 2 of 11 runs dropped, too old",)
    assert prune(kept, now=NOW, older_than_days=1)[0].entries == {}


def git(root, *arguments):
    names = ("-c", "user.name=n", "-c", "user.email=e")
    subprocess.run(["git", "-C", str(root), *names, *arguments], check=True, capture_output=True)


@pytest.fixture
def branches(tmp_path):
    """A repository on ``main`` whose baselines git merges by the driver; gives what switches and commits."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "config", "merge.perfsuite.driver", f"{sys.executable} -m perfsuite baselines merge-driver %O %A %B")
    (tmp_path / ".gitattributes").write_text("baselines/**/*.json merge=perfsuite\n")

    def commit(branch):
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "--message", branch)

    return commit


def test_git_merges_the_runs_of_two_branches_by_the_driver(tmp_path, branches):
    offer(tmp_path / "baselines", run_of("s0", 3))
    offer(tmp_path / "baselines", run_of("s0", 3), name="dropped")
    branches("main")
    git(tmp_path, "switch", "--quiet", "--create", "side")
    offer(tmp_path / "baselines", run_of("s1", 2))
    branches("side")
    git(tmp_path, "switch", "--quiet", "main")
    path = offer(tmp_path / "baselines", run_of("s2", 1)).path
    store.prune_file(path, now=NOW, case="*dropped*")
    branches("main")
    git(tmp_path, "merge", "--quiet", "--no-edit", "side")
    merged = store.read(path)
    assert {case().node} == set(merged.by_node)
    assert ["s0", "s1", "s2"] == [run.session for run in merged.by_node[case().node][0].runs]


def test_files_that_two_branches_add_are_merged_and_damaged_ones_are_a_conflict(tmp_path, branches):
    branches("main")
    git(tmp_path, "switch", "--quiet", "--create", "side")
    offer(tmp_path / "baselines", run_of("s1", 2))
    branches("side")
    git(tmp_path, "switch", "--quiet", "main")
    path = offer(tmp_path / "baselines", run_of("s2", 1)).path
    branches("main")
    git(tmp_path, "merge", "--quiet", "--no-edit", "side")
    assert ["s1", "s2"] == [run.session for run in store.read(path).by_node[case().node][0].runs]
    path.write_text(path.read_text() + "x")
    branches("main")
    git(tmp_path, "switch", "--quiet", "side")
    offer(tmp_path / "baselines", run_of("s3"))
    branches("side")
    git(tmp_path, "switch", "--quiet", "main")
    with pytest.raises(subprocess.CalledProcessError) as conflict:
        git(tmp_path, "merge", "--no-edit", "side")
    assert b"the file was not changed" in conflict.value.stderr
    assert path.read_text().endswith("x")
