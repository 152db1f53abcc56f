"""``perfsuite baselines`` on real files: what it prints, what it changes, what it refuses."""

import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from perfsuite.baselines import store
from perfsuite.cli import main as cli
from test_correctness.helpers.stored_files import case, offer, run_of


def run(session, days_old=0.0, median_s=0.01):
    time = datetime.now(timezone.utc) - timedelta(days=days_old)
    quantiles_s = tuple(median_s * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02))
    return run_of(session, time=time.isoformat(timespec="seconds"), quantiles_s=quantiles_s)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offer(Path("baselines"), run("a", days_old=90), run("b"), name="old")
    return offer(Path("baselines"), run("b"), name="new").path


def printed(capsys, *arguments, code=0):
    assert cli.main(["baselines", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_list_and_show(file, capsys):
    assert printed(capsys, "list") == f"{file}: 2 cases, 3 runs, newest today\n"
    shown = printed(capsys, "show", "--case", "old")
    assert "cpu_model: Test CPU" in shown
    said = "2 runs of 2 sessions, newest today: 10 ms, runs within 0.0%; reference 10 ms (2 runs of 2 sess"
    assert f"{case('old').node}  {said}" in shown
    assert case("new").node not in shown
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
    offer(Path("baselines"), run("c"), name="third")
    assert printed(capsys, "merge", other, file) == f"{other}: 3 cases, 4 runs\n"
    assert set(store.read(other).by_node) == {case(name).node for name in ("old", "new", "third")}


def test_prune_drops_what_was_named_and_nothing_in_a_dry_run(file, capsys):
    offer(Path("baselines"), run("a", days_old=90), name="aged")
    before = file.read_bytes()
    prune, dropped = ("prune", file, "--older-than", 60), f"{case('aged').node}: 1 of 1 run dropped"
    assert f"would drop: {dropped}" in printed(capsys, *prune, "--dry-run")
    assert file.read_bytes() == before
    assert dropped in printed(capsys, *prune)
    assert set(store.read(file).by_node) == {case("old").node, case("new").node}, "what is left keeps its reference"
    printed(capsys, "prune", file, "--case", "*::test_new*")
    assert set(store.read(file).by_node) == {case("old").node}
    assert printed(capsys, "prune", file, "--superseded") == "nothing to drop\n"


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
