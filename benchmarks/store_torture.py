"""Damaged baseline files and several writers at once.

    python benchmarks/store_torture.py                     # 1,000 damaged variants, 8 writers x 20 runs
    python benchmarks/store_torture.py --variants 5000

Every variant of a file that says something else than the original must be refused with file, line and reason, by
reading and by updating, and its bytes must stay as they are.  A variant that says the same (other white space) must be
read as the same.  Every run of every writer must be in the file at the end.  Exit code 1 when anything of this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.errors import BaselineError
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Hardware
from perfsuite.baselines.draft import NewRuns
from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary

HARDWARE = Hardware(platform="cpu", fingerprint="cpu-torture", key={"cpu_model": "Example", "cores": 2})
METRICS = {"latency_us": MetricMeaning(unit="us", better="lower")}


def case_of(index: int) -> CaseIdentity:
    node = f"test_perf/test_sum.py::test_sum[cpu-ws2-{index}KiB]"
    parameters = {"message_bytes": 1024 * index, "dtype": "fp32"}
    return CaseIdentity(
        node=node, world_size=2, backend="gloo", parameters=parameters, workload="m:Sum", metrics=METRICS
    )


def run_of(session: str, number: int, environment: str = "2.13.0") -> RunSummary:
    middle_s = 0.001 * (1 + number / 1000)
    return RunSummary(
        session=session,
        time=f"2026-01-{1 + number % 28:02d}T{number // 28:02d}:00:00+00:00",
        quantiles_s=tuple(round(middle_s * factor, 7) for factor in (0.96, 0.98, 1.0, 1.02, 1.04)),
        location=round(-6.9 + number / 1000, 5),
        yardstick=-7.1,
        samples=40,
        clean=30,
        metrics={"latency_us": round(1000 + number, 3)},
        environment={"torch": environment, "kernel": "6.1"},
    )


def make_file(folder: Path, cases: int = 4, runs: int = 6) -> Path:
    offered = [
        NewRuns(case=case_of(index), runs=tuple(run_of(f"s{number}", number) for number in range(runs)))
        for index in range(1, cases + 1)
    ]
    out_of_memory = RunSummary(session="s0", time="2026-01-01T00:00:00+00:00", outcome="out_of_memory")
    offered.append(NewRuns(case=case_of(99), runs=(out_of_memory,)))
    store.update(folder, HARDWARE, offered, mode="append", session_runs=runs)
    later = tuple(run_of(f"s{number}", number) for number in range(runs, runs + 16))
    grown = NewRuns(case=case_of(cases), runs=later[:8]), NewRuns(case=case_of(cases), runs=later[8:])
    for new in grown:  # the reference is then older than the newest runs
        path = store.update(folder, HARDWARE, [new], mode="append", session_runs=8).path
    return path


# -- ways to damage a file ---------------------------------------------------------------


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) - 2)]


def flip(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def delete_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    del lines[rng.randrange(len(lines) - 1)]
    return b"\n".join(lines)


def repeat_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    place = rng.randrange(len(lines) - 1)
    return b"\n".join([*lines[: place + 1], *lines[place:]])


def change_digit(rng: random.Random, data: bytes) -> bytes:
    places = [match.start() for match in re.finditer(rb"\d", data)]
    place = rng.choice(places)
    digit = (data[place] - ord("0") + rng.randint(1, 9)) % 10
    return data[:place] + str(digit).encode() + data[place + 1 :]


def conflict(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    place = rng.randrange(1, len(lines) - 1)
    return b"\n".join([*lines[:place], b"<<<<<<< HEAD", lines[place], b"=======", *lines[place:]])


def zero_block(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    length = rng.randint(1, 512)
    return data[:place] + b"\0" * len(data[place : place + length]) + data[place + length :]


def foreign(rng: random.Random, data: bytes) -> bytes:
    document = json.loads(data)
    del document["perfsuite"]
    return json.dumps(document, indent=4).encode()


def newer(rng: random.Random, data: bytes) -> bytes:
    document = json.loads(data)
    document["perfsuite"]["schema"] += rng.randint(1, 9)
    return json.dumps(document).encode()


def edit_value(rng: random.Random, data: bytes) -> bytes:
    """Put something else where some value is."""
    document = json.loads(data)
    holder, key = rng.choice(list(_places(document)))
    holder[key] = rng.choice([None, -1, 0, 1.5, "x", [], {}, True, 1e9, [1, 2], {"a": 1}, "2026-13-45"])
    return json.dumps(document, indent=1).encode()


def drop_value(rng: random.Random, data: bytes) -> bytes:
    document = json.loads(data)
    holder, key = rng.choice(list(_places(document)))
    del holder[key]
    return json.dumps(document, indent=1).encode()


def add_value(rng: random.Random, data: bytes) -> bytes:
    document = json.loads(data)
    holders = [holder for holder, _ in _places(document) if isinstance(holder, dict)]
    rng.choice(holders)[f"extra_{rng.randint(0, 9)}"] = rng.choice([1, "x", None, 1.5])
    return json.dumps(document).encode()


def no_number(rng: random.Random, data: bytes) -> bytes:
    places = list(re.finditer(rb"-?\d+\.\d+", data))
    match = rng.choice(places)
    value = rng.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000])
    return data[: match.start()] + value + data[match.end() :]


def garbage(rng: random.Random, data: bytes) -> bytes:
    return rng.choice([b"", b"   \n", b"null", b"[]", b'"text"', b"{}", rng.randbytes(300), b"\xff\xfe" + data[:100]])


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    truncate,
    flip,
    delete_line,
    repeat_line,
    change_digit,
    conflict,
    zero_block,
    foreign,
    newer,
    edit_value,
    drop_value,
    add_value,
    no_number,
    garbage,
)


def judge(path: Path, data: bytes, original: Baseline) -> str:
    """``refused``, ``same`` for a variant that says the same, or what went wrong."""
    path.write_bytes(data)
    new = NewRuns(case=case_of(1), runs=(run_of("later", 27),))
    try:
        found = store.read(path)
    except BaselineError as error:
        with contextlib.suppress(BaselineError):
            store.update(path.parent.parent, HARDWARE, [new], mode="append")
            return "an update wrote over a file that cannot be read"
        if path.read_bytes() != data:
            return "the bytes of a damaged file changed"
        if not re.match(rf"{re.escape(str(path))}:[1-9]\d*: \S", str(error)):
            return f"the error names no file, line and reason: {error}"
        return "refused" if "\n" not in str(error) else "the error is more than one line"
    return "same" if found == original else "a changed file was read as if nothing had happened"


def damaged_files(variants: int, seed: int) -> Counter[str]:
    """How many variants of each damage came out how."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = make_file(Path(folder))
        data, original = path.read_bytes(), store.read(path)
        rng = random.Random(seed)
        while counts["refused"] < variants:
            damage = DAMAGES[sum(counts.values()) % len(DAMAGES)]
            outcome = judge(path, damage(rng, data), original)
            counts[outcome if outcome in ("refused", "same") else f"{damage.__name__}: {outcome}"] += 1
    return counts


# -- several writers ---------------------------------------------------------------------


def write_runs(folder: str, writer: int, count: int) -> None:
    for number in range(count):
        case = case_of(1 + (writer * count + number) // 10)
        run = run_of(f"w{writer}", writer * count + number)
        store.update(Path(folder), HARDWARE, [NewRuns(case=case, runs=(run,))], mode="append")


def several_writers(writers: int, count: int) -> tuple[int, int]:
    """(runs written, runs found) of processes that update one file at the same time."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=write_runs, args=(folder, writer, count)) for writer in range(writers)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=300)
        path = store.path_of(Path(folder), HARDWARE)
        found = {run.key for entry in store.read(path).entries.values() for run in entry.runs}
        assert [file.name for file in path.parent.iterdir()] == [path.name], "a lock or a temporary file was left"
    return writers * count, len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=1000)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=20, help="runs per writer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts = damaged_files(options.variants, options.seed)
    for outcome, count in counts.most_common():
        print(f"{count:6} {outcome}")
    written, found = several_writers(options.writers, options.runs)
    print(f"{options.writers} writers at once: {written} runs written, {found} in the file")
    return 0 if set(counts) <= {"refused", "same"} and written == found else 1


if __name__ == "__main__":
    raise SystemExit(main())
