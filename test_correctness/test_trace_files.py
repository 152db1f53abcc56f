"""Files of timelines and the journal that keeps them: unique names, whole files, errors that say what to do."""

import dataclasses
import errno
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.record.journal import read_journal
from perfsuite.reports.timelines.files import check_timeline, file_stem, write_case
from perfsuite.schedules import SCHEDULES, make_schedule
from test_correctness.helpers.pipelines import measured, result_of, simulated
from test_correctness.helpers.runs import journal_of

CASE = "test_perf/test_pipeline.py::test_step[cpu-ws4-1f1b-m8]"


@given(st.lists(st.text(max_size=300), min_size=2, max_size=8, unique=True))
def test_every_case_has_files_of_its_own_that_any_system_takes(cases):
    stems = [file_stem(case) for case in cases]
    assert len({stem.lower() for stem in stems}) == len(cases)
    for stem in stems:
        assert re.fullmatch(r"[\w.=+-]+", stem, re.ASCII)
        assert len(f"{stem}.simulated.trace.json") < 200
        assert not stem.startswith(".")


def test_trace_and_picture_are_written_whole_and_nothing_else(tmp_path):
    folder = tmp_path / "deep" / "traces"
    timeline = measured(make_schedule("1f1b", ranks=4, num_micro_batches=8))
    for _ in range(2):  # the second time over the first
        trace, picture = write_case(CASE, timeline, folder)
    assert sorted(folder.iterdir()) == sorted([trace, picture])
    assert trace.name.startswith("test_step-cpu-ws4-1f1b-m8-")
    assert json.loads(trace.read_text())["otherData"]["source"] == "measured"
    assert "test_step[cpu-ws4-1f1b-m8]: measured, bubble_ratio" in picture.read_text(encoding="utf-8")


def test_a_full_disk_is_named_and_leaves_the_files_of_the_earlier_run(tmp_path, monkeypatch):
    before = [path.read_bytes() for path in write_case(CASE, simulated("1f1b"), tmp_path)]
    write = os.write

    def full(descriptor, data):
        write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("perfsuite.base.writing.os.write", full)
    with pytest.raises(
        ConfigurationError, match=r"\.trace\.json cannot be written: No space left on device; the file is unchanged"
    ):
        write_case(CASE, simulated("1f1b"), tmp_path)
    stem = tmp_path / f"{file_stem(CASE)}.simulated"
    assert before == [Path(f"{stem}.trace.json").read_bytes(), Path(f"{stem}.svg").read_bytes()]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, "has a forward of stage 0 on rank 4; its ranks are 0 to 3"),
        ({"rank": -1}, "on rank -1"),
        ({"end_s": math.nan}, "from 0.0 s to nan s; record finite times in order"),
        ({"start_s": -math.inf}, "from -inf s to"),
        ({"end_s": -1.0}, "from 0.0 s to -1.0 s"),
    ],
)
def test_a_damaged_timeline_is_refused_before_anything_is_written(tmp_path, change, message):
    timeline = simulated("1f1b")
    broken = dataclasses.replace(timeline.events[0], **change)
    damaged = dataclasses.replace(timeline, events=(broken, *timeline.events[1:]))
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        write_case(CASE, damaged, tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
    check_timeline(timeline)


def test_a_journal_gives_timelines_back_to_the_bit(tmp_path):
    schedules = [make_schedule(name, ranks=4, num_micro_batches=8) for name in SCHEDULES]
    timelines = {each.name: measured(each, seed=seed) for seed, each in enumerate(schedules)}
    timelines |= {"messages": simulated("dualpipev"), "none": None}
    assert {event.kind for event in timelines["messages"].events} >= {"send", "receive", "wait"}
    results = {name: result_of(name, timeline) for name, timeline in timelines.items()}
    assert read_journal(journal_of(tmp_path / "j.jsonl", *results.values())).results == results
