"""A whole journal, every text in it replaced by one that attacks whoever shows it, and every command that reads one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfsuite.base.errors import PerfsuiteError
from perfsuite.cli import main as cli
from perfsuite.record.journal import read_journal
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import Peak, Peaks
from perfsuite.record.run import GateRecord, Header, Revision, RunEnd
from test_correctness.helpers.pages import everything
from test_correctness.helpers.runs import verdict

TEXT = (
    "\r\n::error file=x::pwned ##[error]pwned ##vso[task.setvariable variable=x]y"
    "\x1b]52;c;aGk=\x07\x1b]8;;http://evil\x07\x1b[2J\x9b31m\x00\x7f\u202edcba\u2066\u200b\u2028\ud800"
    "|<script>alert(1)</script><img src=x onerror=alert(1)>\"'>[x](javascript:x)![y](http://evil)`z`,=cmd\n::error::pwned"
)
ACTIVE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]"
)
COMMAND = re.compile(r"^[ \t]*::(?!:)|##\[|##vso\[", re.MULTILINE)


def journal(path: Path) -> Path:
    """A journal that has every kind of line, of a run on devices that are not here."""
    results = everything()
    header = Header(
        session="s1",
        fingerprint=results[0].fingerprint,
        platform="a100",
        started_at="2026-01-01T00:00:00+00:00",
        versions={"torch": "2.13.0", "python": "3.11.4"},
        revision=Revision(commit="c" * 40, branch="main", subject="a subject"),
        arguments=("-k", "all_reduce"),
    )
    writer = JournalWriter(path, header)
    environment = {"hostname": "node1", "variables": {"NCCL_ALGO": "Ring"}, "notes": ["a note"], "kernel": "6.1"}
    for one in results:
        object.__setattr__(one, "environment", environment)
        writer.result(one)
    writer.peaks(Peaks(tflops={"fp32": Peak(value=100.0, unit="TFLOPS", source="here", kind="measured")}))
    writer.failure("t.py::test_failed", "rank 1 died\nwith a second line")
    writer.interrupted("t.py::test_stopped", "SIGTERM")
    writer.skip("t.py::test_skipped", "needs a device")
    verdicts = (dataclasses.replace(verdict(results[0].case), reasons=("a reason",), flags=("a flag",)),)
    writer.judged(
        GateRecord(gate=True, fail_on=("regressed",), verdicts=verdicts, suite_line="slower", banner=("noisy",))
    )
    writer.ended(
        RunEnd(
            at="2026-01-01T00:05:00+00:00",
            took_s=300.0,
            exit_status=1,
            warnings=("w",),
            failed={"t.py::f": "m"},
            verdict="FAIL: 7 of 8 devices",
            remarks=("SLOW: cuda:3 takes 20 % longer",),
        )
    )
    writer.close()
    return path


Place = tuple[Any, ...]
"""Keys and indexes from a line to a value; a key in a tuple of its own is that key and not its value."""


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every value in a JSON value, and every key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if isinstance(value, dict):
            yield (*at, (key,))
        yield (*at, key)
        yield from places(inner, (*at, key))


def alike(place: Place) -> Place:
    """What places in other lines and other elements of a list have in common with this one."""
    return tuple(0 if isinstance(key, int) else key for key in place)


def put(value: Any, place: Place, new: Any) -> Any:
    """A copy with something else at that place."""
    if not place:
        return new
    key, *rest = place
    if isinstance(key, tuple):
        return {(new if name == key[0] else name): inner for name, inner in value.items()}
    changed = copy.copy(value)
    changed[key] = put(value[key], tuple(rest), new)
    return changed


def at(value: Any, place: Place) -> Any:
    for key in place:
        value = key[0] if isinstance(key, tuple) else value[key]
    return value


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    return path


def is_read(path: Path) -> bool:
    try:
        for result in read_journal(path).results.values():
            _ = result.metrics, result.measurement
    except PerfsuiteError:
        return False
    return True


STOPPERS = ("name", "platform", "started_at")
"""Fields by which most commands find their way: with other values they only say that they do not know them."""


def hostile_journal(path: Path, *, keys: bool = False, only: str = "") -> Path:
    """The journal with every text but those of STOPPERS replaced that a reader takes in another form.

    ``keys``: the keys of objects instead; ``only``: the texts of one field instead.
    """
    lines = lines_of(journal(path))
    tried: dict[Place, bool] = {}
    for number, line in enumerate(lines):
        for place in sorted(places(line), key=len, reverse=True):
            if len(place) < 2 or not isinstance(at(line, place), str) or isinstance(place[-1], tuple) is not keys:
                continue
            if not keys and (place[-1] != only if only else place[-1] in STOPPERS):
                continue
            text = f"{number}{place[-1]}{TEXT}" if isinstance(place[-1], tuple) or place[-1] in ("case",) else TEXT
            changed = put(line, place, text)
            kind = (next(iter(line)), *alike(place))
            if kind not in tried:
                tried[kind] = is_read(write(path, [*lines[:number], changed, *lines[number + 1 :]]))
            if tried[kind]:
                lines[number] = changed
    return write(path, lines)


def commands(path: Path, out: Path) -> Iterator[list[str]]:
    """Every command line that reads a journal."""
    yield ["show", str(path)]
    for how in ("summary", "tables", "cases"):
        yield ["show", str(path), "--show", how]
    yield ["report", str(path)]
    for style in ("opensora", "latte", "flagperf", "oneflow", "methods"):
        yield ["report", str(path), "--style", style, "--out", str(out / f"{style}.md")]
    yield ["report", str(path), "--html", str(out / "page.html")]
    yield ["report", str(path), "--html", str(out / "two.html"), "--base", str(path), "--show-hosts"]
    for form in ("json", "csv", "openmetrics", "bencher", "github-action-benchmark", "otava"):
        yield ["export", str(path), "--format", form]
        yield ["export", str(path), "--format", form, "--out", str(out / f"{form}.txt")]
    yield ["checklist", str(path)]
    yield ["checklist", str(path), "--json"]
    yield ["calibrate", str(path), "--out", str(out / "calibration.json")]
    yield ["calibrate", str(path), "--json", "--out", str(out / "calibration.json")]
    yield ["trace", str(path), "--out", str(out / "traces")]
    yield ["history", "add", str(path), "--history", str(out / "h.jsonl")]
    yield ["history", "list", str(out / "h.jsonl")]
    yield ["history", "show", str(out / "h.jsonl"), "--html", str(out / "history.html")]
    yield ["export", str(out / "h.jsonl"), "--format", "otava"]


def printed(command: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; whatever but a PerfsuiteError it raises, this raises."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(command)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()
