"""Damaged baseline files, several writers at once, and writers that die."""

import fcntl
import json
import os
import random
import re

import pytest

from benchmarks.store_torture import DAMAGES, HARDWARE, case_of, judge, make_file, run_of, several_writers
from perfsuite.base.errors import BaselineError
from perfsuite.baselines import store
from perfsuite.baselines.document import check_of
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.store import locked


@pytest.fixture
def file(tmp_path):
    return make_file(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_kind_of_damage_is_refused_and_left_alone(file, damage):
    data, original = file.read_bytes(), store.read(file)
    rng = random.Random(11)
    outcomes = {judge(file, damage(rng, data), original) for _ in range(8)}
    assert outcomes <= {"refused", "same"}
    assert "refused" in outcomes


def message_of(path):
    with pytest.raises(BaselineError) as caught:
        store.read(path)
    return str(caught.value)


def edited(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=1))


CHECK = "was changed by hand after perfsuite wrote it: its check does not match"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["benchmarks"][1]["runs"][2].update(clean=-1), CHECK),
        (lambda d: d["benchmarks"][0]["runs"].append(d["benchmarks"][0]["runs"][0]), CHECK),
        (lambda d: d["benchmarks"][0]["stats"].update(median=1.0), CHECK),
        (lambda d: d["benchmarks"][0]["stats"].update(median=float("nan")), "NaN is not a number"),
        (lambda d: d["benchmarks"][0].pop("check"), "another form than perfsuite writes (KeyError('check'))"),
        (lambda d: d["benchmarks"].append(d["benchmarks"][0]), "the header has cases=5, the file has 6"),
        (lambda d: d["benchmarks"].pop(), "the header has cases=5, the file has 4"),
        (lambda d: d["benchmarks"].__setitem__(1, d["benchmarks"][0]), "occurs twice"),
        (lambda d: d["benchmarks"].__setitem__(1, 5), "another form than perfsuite writes"),
        (lambda d: d["perfsuite"]["hardware"].update(cores=64), "the header was changed by hand"),
        (lambda d: d["perfsuite"].update(schema=1), "schema 1 is older than 2, the only one that this perfsuite reads"),
        (lambda d: d["perfsuite"].update(schema=7), "schema 7 is newer than 2, the newest that this perfsuite knows"),
        (
            lambda d: d.pop("perfsuite"),
            'has no "perfsuite" object, so another program wrote the file (pytest-benchmark\'s own)',
        ),
        (lambda d: d.pop("unmeasured"), "another form than perfsuite writes (KeyError('unmeasured'))"),
    ],
)
def test_a_changed_field_is_refused_with_the_line_of_its_part(file, change, reason):
    edited(file, change)
    told = message_of(file)
    assert reason in told
    assert re.match(rf"{re.escape(str(file))}:\d+: ", told)
    assert told.endswith("the file was not changed: repair it, restore it from version control or move it")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda case: case["runs"][0].update(location="x"), "RunSummary.location is 'x', not a float"),
        (lambda case: case["runs"][0].update(time="noon"), "Invalid isoformat string: 'noon'"),
        (lambda case: case["runs"][0].update(quantiles_s=[3, 2, 1, 1, 1]), "samples that contradict each other"),
        (lambda case: case["runs"][0].update(clean=41), "samples that contradict each other"),
        (lambda case: case["runs"][0].update(colour=1), "RunSummary has unknown fields colour"),
        (lambda case: case["runs"][0].update(session="0" * 12), "another form than perfsuite writes (KeyError("),
        (lambda case: case["runs"].append({**case["runs"][0], "samples": 41}), "two different runs are both number 0"),
        (
            lambda case: case["runs"].append(case["runs"][0]),
            "7 runs, with equal ones or too many; a case has at most 12 runs",
        ),
        (lambda case: case["runs"].clear(), "0 runs, with equal ones or too many; a case has at most 12 runs"),
        (lambda case: case["extra_info"].update(accepted={}), "Acceptance: Acceptance.__init__() missing"),
    ],
)
def test_a_wrong_field_with_its_check_is_named(file, change, reason):
    def damage(document):
        case = document["benchmarks"][0]
        change(case)
        case["check"] = check_of(case)

    edited(file, damage)
    assert reason in message_of(file)


def test_the_line_is_the_one_of_the_case(file):
    lines = file.read_text().splitlines()
    place = [index for index, line in enumerate(lines) if '"check":' in line][1]
    lines[place + 1] = lines[place + 1].replace("gloo", "nccl")
    file.write_text("\n".join(lines))
    assert message_of(file).startswith(f"{file}:{place + 1}: test_perf/test_sum.py::test_sum[cpu-ws2-2KiB] was changed")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", ":1: the file is empty"),
        (b"[]", ":1: the file holds JSON that is not an object"),
        (b'{"a": 1', ":1: the file ends inside a value"),
        (b'{"a":\n\n 1 2}', ":3: not JSON"),
        (b'{"a": "\xff"}', ":1: byte 0xff is not UTF-8"),
        (b'{\n"a": NaN}', ":1: NaN is not a number"),
        (b'{\n<<<<<<< HEAD\n"a": 1}', ":2: a git conflict marker"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{\n"a": -' + b"9" * 400 + b"}", ":1: -99999999999... of 401 digits is not a number"),
        (
            b'{"perfsuite": {"schema": 2, "cases": 0, "check": ""},\n"benchmarks": [], "unmeasured": [], "a": 1e400}',
            ":1: ",
        ),
        (b'{"a": 1,\n"b": {"a": 2},\n"\\u0061": 3}', ':1: the key "a" occurs twice in one object'),
    ],
)
def test_what_is_no_json_object_is_named_with_its_line(tmp_path, data, reason):
    path = tmp_path / "file.json"
    path.write_bytes(data)
    assert reason in message_of(path)
    assert path.read_bytes() == data


def test_a_file_that_is_not_there_or_a_folder_is_an_error_of_one_line(tmp_path):
    path = tmp_path / "none.json"
    remedy = "give a file that perfsuite wrote"
    assert message_of(path) == f"{path}: cannot be read: No such file or directory; {remedy}"
    assert "cannot be read" in message_of(tmp_path)


def test_several_writers_at_once_lose_nothing():
    written, found = several_writers(writers=3, count=6)
    assert (written, found) == (18, 18)


def test_a_lock_left_by_a_dead_writer_stops_nobody(file):
    side = file.with_name(f".{file.name}.lock")
    side.write_text("")  # its owner was killed: the name is there, nobody holds it
    new = NewRuns(case=case_of(1), runs=(run_of("later", 27),))
    assert store.update(file.parent.parent, HARDWARE, [new], mode="append").written
    assert not side.exists()


def test_a_lock_that_is_held_ends_in_an_error(file):
    side = file.with_name(f".{file.name}.lock")
    descriptor = os.open(side, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(BaselineError, match="locked by another process for too long"), locked(file, deadline_s=0.1):
            pass
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(file):
    file.parent.chmod(0o500)
    try:
        with pytest.raises(BaselineError, match="needs a folder that can be written"), locked(file):
            pass
    finally:
        file.parent.chmod(0o700)


def test_a_path_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "cpu").write_text("a file")
    new = NewRuns(case=case_of(1), runs=(run_of("s", 1),))
    with pytest.raises(BaselineError, match="cannot be locked"):
        store.update(tmp_path, HARDWARE, [new], mode="append")


def test_a_value_that_json_cannot_hold_leaves_the_file_as_it_was(file):
    before = file.read_bytes()
    odd = run_of("later", 27)
    odd = type(odd)(session=odd.session, time=odd.time, outcome="out_of_memory", environment={"clock": float("inf")})
    with pytest.raises(BaselineError, match="a value that JSON cannot hold"):
        store.update(file.parent.parent, HARDWARE, [NewRuns(case=case_of(1), runs=(odd,))], mode="append")
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == [file.name]
