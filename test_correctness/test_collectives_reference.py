"""Every collective against NumPy on real gloo ranks, over random sizes, dtypes and world sizes; and every check against
results that are wrong."""

import json
import select
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfsuite.record.workload import ITEM_BYTES

ROOT = Path(__file__).parent.parent
RANKS = 5
DEADLINE_S = 300
"""The first answer waits for torch's import, which takes more than a minute on a machine that twenty others use."""
DTYPES = [name for name in ITEM_BYTES if name != "tf32"]
DIVIDED = ["AllGather", "ReduceScatter", "AllToAll", "AllToAllUneven", "Gather", "Scatter"]
WHOLE = ["AllReduce", "Broadcast", "Reduce", "SendRecv", "RingShift", "OneDirection"]
PAIRED = ["SendRecv", "OneDirection"]
SUMMED = ["AllReduce", "ReduceScatter", "Reduce"]


class Pool:
    """Forked once for this module; ``ask`` sends one command to all ranks."""

    def __init__(self):
        command = [sys.executable, "-m", "test_correctness.helpers.reference_ranks", str(RANKS)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **command):
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        if not ready:
            self._process.kill()  # a late answer would be taken for that to the next command
            pytest.fail(f"no answer to {command} within {DEADLINE_S} s")
        answers = json.loads(self._process.stdout.readline() or "[]")
        assert len(answers) == command["ranks"], f"{answers} from {command['ranks']} ranks"
        return answers

    def close(self):
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def sizes(op, ranks, dtype, elements):
    return elements * ITEM_BYTES[dtype] * (ranks if op in DIVIDED else 1)


@pytest.mark.hypothesis  # given inside: one pool of ranks for all examples
@pytest.mark.parametrize("op", DIVIDED + WHOLE)
def test_equals_numpy_and_passes_its_own_check(pool, op):
    ranks = st.sampled_from([2, 4] if op in PAIRED else [2, 3, 4, 5])

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(ranks=ranks, dtype=st.sampled_from(DTYPES), elements=st.integers(1, 700), seed=st.integers(0, 2**32 - 1))
    def compare(ranks, dtype, elements, seed):
        message_bytes = sizes(op, ranks, dtype, elements)
        answers = pool.ask(op=op, ranks=ranks, dtype=dtype, message_bytes=message_bytes, seed=seed)
        assert [""] * ranks == answers

    compare()


@pytest.mark.parametrize("damage", ["element", "shifted", "halves swapped", "wider dtype"])
@pytest.mark.parametrize("op", DIVIDED + WHOLE)
def test_check_notices_a_damaged_output(pool, op, damage):
    for seed, dtype in enumerate(("fp32", "bf16", "uint8")):
        message_bytes = sizes(op, 4, dtype, elements=64)
        victim = {"Reduce": 0, "Gather": 0, "OneDirection": 2 + seed % 2}.get(op, seed)
        answers = pool.ask(
            op=op, ranks=4, dtype=dtype, message_bytes=message_bytes, damage=damage, victim=victim, seed=seed
        )
        noticed = [rank for rank, answer in enumerate(answers) if answer]
        assert [victim] == noticed, answers
        assert f"on rank {victim}" in answers[victim]
        assert "expected" in answers[victim]


@pytest.mark.parametrize("op", SUMMED)
def test_check_notices_another_reduction(pool, op):
    message_bytes = sizes(op, 4, "fp32", elements=113)
    command = {"op": op, "ranks": 4, "dtype": "fp32", "message_bytes": message_bytes, "victim": 0, "seed": 0}
    assert pool.ask(**command, damage="maximum instead of sum")[0]
    assert pool.ask(**command, damage="not a number")[0]


@pytest.mark.parametrize("op", DIVIDED + WHOLE)
def test_check_notices_an_output_that_nobody_wrote(pool, op):
    message_bytes = sizes(op, 4, "int8", elements=1)
    answers = pool.ask(op=op, ranks=4, dtype="int8", message_bytes=message_bytes, damage="not run", victim=0, seed=0)
    rooted = {"Reduce": [0], "Gather": [0], "Broadcast": [1, 2, 3], "OneDirection": [2, 3]}
    defined = rooted.get(op, [0, 1, 2, 3])
    if op == "AllToAllUneven":  # of a part of one element only the last rank gets any
        defined = [3]
    assert defined == [rank for rank, answer in enumerate(answers) if answer]


def test_barrier_holds_everybody(pool):
    for ranks in (2, 5):
        assert [""] * ranks == pool.ask(op="Barrier", ranks=ranks)


def test_check_notices_a_barrier_that_holds_nobody(pool):
    # The last rank comes 5 ms late; on a busy machine the others may be later still, so there are several tries.
    tries = ("".join(pool.ask(op="Barrier", ranks=4, damage="no barrier")) for _ in range(50))
    assert any("before rank 3 arrived" in answers for answers in tries)
