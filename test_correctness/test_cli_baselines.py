"""``perfsuite baselines`` on real files: what it prints, what it changes, what it refuses."""

import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Hardware
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.cli import main as cli

HARDWARE = Hardware(platform="cpu", fingerprint="cpu-test", key={"cpu_model": "Test CPU", "cores": 2})


def run(session, days_old=0.0, median_s=0.01):
    time = datetime.now(timezone.utc) - timedelta(days=days_old)
    spread = (0.98, 0.99, 1.0, 1.01, 1.02)
    return RunSummary(
        session=session,
        time=time.isoformat(timespec="seconds"),
        quantiles_s=tuple(median_s * factor for factor in spread),
        location=-4.6,
        samples=30,
        clean=30,
    )


def offer(folder, name, *runs, world_size=1):
    case = CaseIdentity(node=f"t.py::{name}", world_size=world_size, backend="gloo", parameters={}, workload="t:W")
    store.update(folder, HARDWARE, [NewRuns(case=case, runs=runs, verdict="pass")], mode="append")
    return store.path_of(folder, HARDWARE)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = offer(Path("baselines"), "old", run("a", days_old=90), run("b"))
    offer(Path("baselines"), "new", run("b"))
    return path


def printed(capsys, *arguments, code=0):
    assert cli.main(["baselines", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_list_and_show(file, capsys):
    assert printed(capsys, "list") == f"{file}: 2 cases, 3 runs, newest today\n"
    shown = printed(capsys, "show", "--case", "old")
    assert "cpu_model: Test CPU" in shown
    assert (
        "t.py::old  2 runs of 2 sessions, newest today: 10 ms, runs within 0.0%; reference 10 ms (2 runs of 2 sess"
        in shown
    )
    assert "t.py::new" not in shown
    assert json.loads(printed(capsys, "list", "--json"))[0]["cases"] == 2


def test_a_project_inside_a_folder_examples_has_its_files(file, tmp_path, capsys):
    project = tmp_path / "examples" / "project"
    shutil.copytree(file.parent.parent, project / "baselines" / "examples" / "cpu")
    shutil.copytree(file.parent.parent, project / "baselines", dirs_exist_ok=True)
    own = project / "baselines" / file.relative_to("baselines")
    assert printed(capsys, "list", project / "baselines") == f"{own}: 2 cases, 3 runs, newest today\n"
    assert printed(capsys, "verify", project / "baselines" / "examples") == "1 of 1 files are sound\n"


def test_verify_names_a_damaged_file_and_leaves_it_alone(file, capsys):
    assert printed(capsys, "verify") == "1 of 1 files are sound\n"
    file.write_text(file.read_text()[:-40])
    damaged = file.read_bytes()
    told = printed(capsys, "verify", code=1)
    assert f"{file}:" in told
    assert "0 of 1 files are sound" in told
    assert file.read_bytes() == damaged


def test_merge_is_the_union(file, tmp_path, capsys):
    other = tmp_path / "other.json"
    shutil.copy(file, other)
    offer(Path("baselines"), "third", run("c"))
    assert printed(capsys, "merge", other, file) == f"{other}: 3 cases, 4 runs\n"
    assert set(store.read(other).by_node) == {"t.py::old", "t.py::new", "t.py::third"}


def test_prune_drops_what_was_named_and_nothing_in_a_dry_run(file, capsys):
    offer(Path("baselines"), "aged", run("a", days_old=90))
    before = file.read_bytes()
    assert "would drop: t.py::aged: 1 of 1 run dropped" in printed(
        capsys, "prune", file, "--older-than", 60, "--dry-run"
    )
    assert file.read_bytes() == before
    assert "t.py::aged: 1 of 1 run dropped" in printed(capsys, "prune", file, "--older-than", 60)
    assert set(store.read(file).by_node) == {"t.py::old", "t.py::new"}, "what is left keeps its reference"
    printed(capsys, "prune", file, "--case", "*::new")
    assert set(store.read(file).by_node) == {"t.py::old"}
    assert printed(capsys, "prune", file, "--superseded") == "nothing to drop\n"


def test_a_folder_without_files_is_no_sound_one(tmp_path, capsys):
    told = f"no baseline file in {tmp_path}; a run with --perf-update=append stores one\n"
    assert cli.main(["baselines", "list", str(tmp_path)]) == 0
    assert told == capsys.readouterr().out
    assert cli.main(["baselines", "verify", str(tmp_path)]) == 4
    assert f"perfsuite: error: {told}" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "nowhere"], "nowhere does not exist; give a baseline file or a folder of them"),
        (["prune", "baselines/cpu/cpu-test.json"], "prune has nothing to drop"),
        *(
            (["prune", "baselines/cpu/cpu-test.json", f"--older-than={days}"], "days is not between 0 and 36500")
            for days in ("nan", "inf", "1e12", "-5")
        ),
        (["show", "broken.json"], "broken.json:1:"),
    ],
)
def test_wrong_usage_is_one_line(file, capsys, arguments, message):
    Path("broken.json").write_text("not JSON")
    assert cli.main(["baselines", *arguments]) == 4
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]
