"""Equal hardware does not make two hosts one: identity, baselines, the gate and history."""

import dataclasses
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.baselines import store
from perfsuite.baselines.hosts import HostIdentity, by_host, host_of
from perfsuite.cli.main import main
from perfsuite.gate.comparable import gate_case
from perfsuite.history import file
from perfsuite.history.file import line_of, read_line
from perfsuite.history.findings import searched
from perfsuite.history.git import Repository
from perfsuite.platforms.host import Host
from perfsuite.reports.beside_others import OverTime, history_grids
from test_correctness.helpers.histories import ScriptedRepository, drawn, session, written
from test_correctness.helpers.stored_files import HARDWARE, NOW, baseline_of, case, entry_of, offer, run_of


def on(name, *uuids):
    """The environment of a host."""
    return {"hostname": name, "devices": [f"NVIDIA H200, 139.8 GiB, {uuid}" for uuid in uuids]}


A0, A1, B0 = (f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "abc")


@pytest.mark.parametrize(
    ("one", "other", "is_other"),
    [
        ((on("a"), "1"), (on("b"), "2"), True),
        ((on("a"), "1"), (on("a"), "2"), False),
        ((on("3f2a9c"), "1"), (on("77be01"), "1"), False),
        ((on("3f2a9c", A0, A1), "1"), (on("77be01", A0, A1), "2"), False),
        ((on("localhost", A0, A1), "1"), (on("localhost", B0), "2"), True),
        ((on("a", A0), "1"), (on("a", A1), "1"), False),
        ((on("a", A0, A1), ""), (on("a", A1), ""), False),
        ((on(""), ""), (on("b"), "2"), False),
        (({}, ""), ({"hostname": 7, "devices": "x"}, ""), False),
    ],
    ids=[
        *("two hosts", "a reboot", "containers of one boot", "containers of one host after a reboot"),
        *("names that repeat", "other devices of one boot", "fewer devices", "unknown name", "nothing known"),
    ],
)
def test_when_two_runs_are_of_different_hosts(one, other, is_other):
    assert is_other == host_of(*one).is_other_than(host_of(*other)) == host_of(*other).is_other_than(host_of(*one))


def test_runs_are_grouped_by_host_and_unknown_hosts_are_no_host_of_their_own():
    places = ["a", "b", "", "a", "b"]
    runs = [run_of(f"s{index}", 9 - index, environment=on(name)) for index, name in enumerate(places)]
    assert [["s0", "s2", "s3"], ["s1", "s4"]] == [[run.session for run in host] for host in by_host(runs)]
    assert HostIdentity() == host_of({})


def compared(hosts, here, boot=""):
    runs = tuple(run_of(f"s{index:02}", 30 - index, environment=on(name)) for index, name in enumerate(hosts))
    baseline = baseline_of(entry_of(*runs, reference=runs))
    where = {"environment": on(here), "boot": boot, "hardware": HARDWARE, "folder": Path()}
    return gate_case(case(), baseline=baseline, now=NOW, **where)


def test_a_case_is_compared_with_the_runs_of_its_host_if_there_are_enough():
    found = compared("abababababa", "a")
    assert {"a"} == {run.environment["hostname"] for run in found.stored}
    assert (6, ()) == (len(found.stored), found.elsewhere)
    told = "stored runs are of 2 hosts of equal hardware, 6 of 11 of this host: only these are compared with"
    assert found.hosts == told


@pytest.mark.parametrize(
    ("hosts", "here"), [("aaaabbbb", "a"), ("aaaaaabb", "b"), ("aaaaaabb", "c"), ("rstuvwxyz", "q")]
)
def test_hosts_with_few_runs_share_the_baseline_and_that_is_said(hosts, here):
    found = compared(hosts, here)
    assert (len(hosts), ()) == (len(found.stored), found.elsewhere)
    assert f"stored runs are of {len(set(hosts))} hosts of equal hardware, " in found.hosts
    assert found.hosts.endswith("differences between hosts count as noise")


def test_runs_of_one_other_host_are_compared_with_and_the_host_is_named_as_a_cause():
    found = compared("aaaaaaaa", "b")
    assert 8 == len(found.stored)
    assert ("another host of equal hardware",) == found.elsewhere == found.changes
    assert found.hosts == "all stored runs are of another host of equal hardware"
    assert ("", ()) == (compared("aaaaaaaa", "a").hosts, compared("aaaaaaaa", "a").elsewhere)


def test_a_faster_host_begins_no_epoch_for_a_slower_one(tmp_path):
    offer(tmp_path, *(run_of(f"s{index}", 20 - index, environment=on("a")) for index in range(4)), session_runs=4)
    for index in range(3):
        fast = run_of(f"f{index}", 9 - index, 0.009, environment=on("b"), boot=str(index))
        report = offer(tmp_path, fast, verdict="improved", gains={"time": 0.03})
        told = "improved, on another host than that of the stored runs: no new epoch begins"
        assert report.notes == {case().node: told}
        assert "several hosts of equal hardware: a (4 runs), b (" in report.hosts
    (entry,) = store.read(report.path).entries.values()
    assert (None, {"a"}) == (entry.accepted, {run.environment["hostname"] for run in entry.reference})


def test_merged_baselines_of_several_hosts_are_listed_as_such(tmp_path, capsys):
    one = offer(tmp_path / "a", run_of("s0", environment=on("a"))).path
    other = offer(tmp_path / "b", run_of("s1", 0.5, environment=on("b"))).path
    said = "its runs are of several hosts of equal hardware: a (1 run), b (1 run); differences between hosts count"
    for command, several in ((("merge", one, other), True), (("list", one), True), (("list", other), False)):
        assert 0 == main(["baselines", *map(str, command)])
        shown = capsys.readouterr().out
        assert (several, several) == (said in shown, "several hosts" in shown)


# -- pytest runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch):
    """Name and boot of the host, which a test changes."""
    place = ["a", "1"]
    real = Host.read
    answers = {"proc/sys/kernel/hostname": lambda: place[0], "proc/sys/kernel/random/boot_id": lambda: place[1]}
    monkeypatch.setattr(Host, "read", lambda host, path: answers.get(path, lambda: real(host, path))())
    return place


@pytest.mark.extended
def test_the_gate_and_an_update_say_that_the_stored_runs_are_of_another_host(repo, machine, place):
    for index in range(6):
        place[1] = f"boot{index}"
        assert "several hosts" not in repo.run("--perf-update=append").stdout.str()
    place[:] = ["b", "other"]
    same = repo.run("--perf-gate", "--perf-show=tables")
    assert same.ret == 0
    same.stdout.fnmatch_lines(["* 3 cases: all stored runs are of another host of equal hardware"])
    machine.factors[1] = 2.04
    slower = repo.run("--perf-gate", "--perf-show=tables", "-k", "cpu-1")
    assert slower.ret == 1
    slower.stdout.fnmatch_lines(["*ENVIRONMENT +10*different from the stored runs: another host of equal hardware*"])
    machine.factors[1] = 1.0
    told = "*its runs are of several hosts of equal hardware: a (18 runs), b (3 runs)*"
    repo.run("--perf-update=append").stdout.fnmatch_lines([told])


# -- history -----------------------------------------------------------------------------------------------------


def hosted(count, name_of, step=0.0):
    """Sessions of which those on host b are slower by ``step``."""
    sessions = drawn(count, ["t.py::a"], lambda case, number: step * (name_of(number) == "b"), noise=0.002, host=0.0)
    placed = zip(sessions, map(name_of, range(count)), strict=True)
    return [dataclasses.replace(one, environment=on(name), boot=name) for one, name in placed]


def test_a_history_of_two_hosts_shows_one_and_no_change_between_them():
    sessions = hosted(30, lambda number: "b" if number >= 18 else "a", step=0.1)
    found = searched(sessions, ScriptedRepository(count=30))
    assert (18, ()) == (len(found.ordered.sessions), found.changes)
    assert {"on host b"} == {why for _, why in found.ordered.apart}
    assert found.ordered.notes == (
        "sessions are of several hosts of equal hardware: a (18 sessions), b (12 sessions); only a is searched "
        "(--host=NAME, --host=all)",
    )
    assert 12 == len(searched(sessions, ScriptedRepository(count=30), host="b").ordered.sessions)
    together = searched(sessions, ScriptedRepository(count=30), host="all")
    assert (30, 1) == (len(together.ordered.sessions), len(together.changes))
    with pytest.raises(ConfigurationError, match=r"--host 'c' has no session on this branch; hosts are a, b"):
        searched(sessions, ScriptedRepository(count=30), host="c")


def test_a_step_is_found_on_runners_that_live_for_one_session_beside_a_host_that_stays():
    slower = drawn(40, ["t.py::a"], lambda case, number: 0.05 * (number >= 20), noise=0.002, host=0.0)
    names = [f"runner-{number}" if number % 6 else "desk" for number in range(40)]
    sessions = [dataclasses.replace(one, environment=on(name)) for one, name in zip(slower, names, strict=True)]
    found = searched(sessions, ScriptedRepository(count=40))
    assert (40, 1) == (len(found.ordered.sessions), len(found.changes))
    assert found.ordered.notes[0].endswith("differences between hosts count as noise")
    assert "desk (7 sessions)" in found.ordered.notes[0]


def test_a_session_keeps_its_boot_and_lines_without_one_are_read(tmp_path, capsys):
    one = session(environment=on("a"), boot="b1")
    assert one == read_line(line_of(one).encode())
    assert read_line(line_of(session()).encode()).boot == ""
    containers = [session(index, environment=on(f"c{index}"), boot="b1") for index in range(8)]
    assert searched(containers, ScriptedRepository(count=8)).ordered.notes == ()
    path = written(tmp_path / "h.jsonl", *hosted(14, lambda number: "ab"[number % 2]))
    assert 0 == main(["history", "show", str(path), "--repository", str(tmp_path), "--host=b"])
    assert "a (7 sessions), b (7 sessions); only b is searched" in capsys.readouterr().out
    history = file.read(path)
    grids = history_grids(OverTime(history=history, findings=searched(history.sessions, Repository(root=tmp_path))))
    assert "host 1 (7 sessions), host 2 (7 sessions); only host 1 is searched" in " ".join(grids[0].notes)
