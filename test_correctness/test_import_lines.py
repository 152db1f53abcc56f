"""Prefixes of launchers, containers and CI services are removed from the lines of any log; text that is none stays."""

from __future__ import annotations

import contextlib
import re

import pytest

from perfsuite.base.errors import ImportFailed
from perfsuite.imports.lines import labelled_lines, plain_lines
from test_correctness.helpers.import_samples import SAMPLES, read

ROW = "     8192          2048     float     sum      -1    35.15    0.23    0.23       0"


@pytest.mark.parametrize(
    ("prefix", "label"),
    [
        (" 0: ", "0"),
        ("12: ", "12"),
        ("[3] ", "3"),
        ("[1,0]<stdout>:", "0"),
        ("[1,0]<stdout>: ", "0"),
        ("[prterun-node-a-77@1,3]<stdout>: ", "3"),
        ("Thu Jan 01 12:00:00 2026[1,0]<stdout>: ", "0"),
        ("[rank1]:", "1"),
        ("[default0]:", "0"),
        ("2026-03-11T10:26:41.123456789Z ", ""),
        ("2026-03-11T10:26:41Z stdout F ", ""),
        ("2026-03-11T10:26:41.123456Z 00O ", ""),
        ("[2026-03-11T10:26:41.123Z] ", ""),
        ("[2026-03-11 10:26:41,123] [INFO] [logging.py:96:log_dist] [Rank 0] ", "0"),
        ("2026-03-11 10:26:41,123 - root - INFO - ", ""),
        ("10:26:41  ", ""),
        ("test\tRun it\t2026-03-11T10:26:41.1234567Z ", ""),
        ("[pod/bench-0/nccl] ", ""),
        ("(RayTrainWorker pid=1, ip=10.0.0.1) ", ""),
        ("\x1b[32m", ""),
        ("[32m", ""),
        ("^[[32m", ""),
        ("\\x1b[32m", ""),
        ("\u241b[32m", ""),
        ("2026-03-11T10:26:41Z stdout F [1,0]<stdout>: ", "0"),
        ("> ", ""),
        ("(worker1, rank=1, pid=33870, ip=192.168.0.15) [1,0]<stdout>:", "0"),
        ("node-a1: ", "node-a1"),
        ("worker-1  | ", "worker-1"),
    ],
)
def test_prefixes_are_removed_and_name_their_rank(prefix, label):
    lines = labelled_lines([f"{prefix}{ROW}", f"{prefix}# Rank", f"{prefix}# x", f"{prefix}"])
    assert [label] * 3 == [line.label for line in lines[:3]]
    assert (ROW.split(), "# Rank") == (lines[0].text.split(), lines[1].text)
    assert [1, 2, 3, 4] == [line.number for line in lines]


@pytest.mark.parametrize(
    "line",
    [
        ROW,
        "node-a:195:195 [0] NCCL INFO Launch mode Parallel",
        "iteration 10: loss 3.2",
        "elapsed [30m 2s]",
        "12:30 left",
        "8:1.5 2.5",
        "step1: 3.2 ms",
        "world size:                    1",
    ],
)
def test_text_that_is_no_prefix_stays(line):
    assert [(1, line), (2, "other"), (3, line)] == plain_lines(f"{line}\nother\r\n{line}")


@pytest.mark.parametrize("sample", sorted(path for path in SAMPLES.glob("*/*") if path.is_file()), ids=lambda p: p.name)
def test_a_number_of_thousands_of_digits_costs_its_line(tmp_path, sample):
    text, path = sample.read_text(), tmp_path / sample.name
    numbers = list(re.finditer(r"\d+", text))
    for number in numbers[:: max(1, len(numbers) // 12)]:
        path.write_text(f"{text[: number.start()]}{'9' * 5000}{text[number.end() :]}")
        with contextlib.suppress(ImportFailed):
            read(path)
