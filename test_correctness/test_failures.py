"""What is known of failed ranks becomes one report and one exception: stacks, causes, consequences, cut messages."""

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from perfsuite.base.errors import (
    CaseError,
    ExpectedFailure,
    InvalidParameter,
    OutOfMemory,
    RanksFailed,
    UnsupportedCase,
)
from perfsuite.base.text import cut
from perfsuite.runtime.failures import (
    UPSTREAM,
    RankFailure,
    compose,
    exception_of,
    is_whole,
    judge,
    judge_stack,
    state_of,
)

STACK = textwrap.dedent(
    """\
    Thread 0x01 (most recent call first):
      File "/x/perfsuite/runtime/transports/forkserver.py", line 65 in _end_with_driver
      File "/usr/lib/python3.11/threading.py", line 982 in run

    Current thread 0x02 (most recent call first):
    {frames}  File "/x/perfsuite/record/workload.py", line 116 in run
      File "/x/perfsuite/runtime/ranks/worker.py", line 202 in _check
      File "/x/perfsuite/runtime/transports/forkserver.py", line 61 in become_worker
      File "<string>", line 1 in <module>
    """
)
OWN_CODE = '  File "/home/me/mine.py", line 22 in f\n'


def at(file, line, name):
    return f'  File "{file}", line {line} in {name}\n'


BACKWARD = at("/s/torch/autograd/graph.py", 9, "_engine_run_backward") + at("/s/torch/_tensor.py", 8, "backward")
DEVICE = at("/s/torch/cuda/__init__.py", 9, "synchronize") + at("/x/perfsuite/platforms/cuda.py", 5, "synchronize")
COLLECTIVE = at("/s/torch/distributed/distributed_c10d.py", 3252, "all_reduce") + at(
    "/s/torch/distributed/c10d_logger.py", 83, "wrapper"
)
FIRST_USE = (  # of a tensor that a functional collective gave
    at("/s/torch/_ops.py", 12, "__call__")
    + at("/s/torch/distributed/_functional_collectives.py", 142, "wait_tensor")
    + at("/s/torch/utils/_pytree.py", 1689, "wrapped")
    + at("/s/torch/distributed/_functional_collectives.py", 1155, "__torch_dispatch__")
    + at("/s/torch/_library/autograd.py", 51, "forward")
)
MAPPED = at("/s/torch/utils/_pytree.py", 9, "tree_map")


@pytest.mark.parametrize(
    ("frames", "state", "where"),
    [
        (COLLECTIVE + OWN_CODE, "waiting", "all_reduce, called at /home/me/mine.py:22 in f"),
        (FIRST_USE + OWN_CODE, "waiting", "forward, called at /home/me/mine.py:22 in f"),
        (OWN_CODE, "hung", "/home/me/mine.py:22 in f"),
        (OWN_CODE + MAPPED, "hung", "/home/me/mine.py:22 in f"),
        (BACKWARD + OWN_CODE, "stuck", "/home/me/mine.py:22 in f"),  # it may wait or hang
        (DEVICE, "stuck", "/x/perfsuite/platforms/cuda.py:5 in synchronize"),
    ],
    ids=["collective", "first use", "own code", "mapped", "backward", "device"],
)
def test_a_stack_says_whether_a_rank_waits_or_hangs_and_where(frames, state, where):
    look = judge_stack(STACK.format(frames=frames))
    assert (look.state, look.where) == (state, where)
    assert "runtime" not in look.stack


def test_an_empty_dump_says_so():
    look = judge_stack("")
    assert (look.state, look.where) == ("stuck", "an unknown place (no Python stack)")


@pytest.mark.parametrize(
    ("state", "judged"),
    [
        ("is stopped by a signal; kill -CONT continues it (state T)", "hung"),
        ("waits in the kernel and takes no signal, for example for a driver or a file system (state D)", "stuck"),
    ],
)
def test_without_a_stack_the_state_of_the_process_is_told(state, judged):
    """One that is stopped waits for nobody; one in the kernel may, as do all where a device waits for the others."""
    look = judge(*[f"Process: {state}\n"] * 2)
    unknown = "an unknown place (no Python stack)"
    assert (look.state, look.where, look.stack) == (judged, f"{unknown}: its process {state}", "")


def test_a_process_that_has_ended_has_no_state():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert state_of(ended.pid) == ""
    assert state_of(os.getpid()).endswith(" (state R)\n")


def failure(rank, state, what="", detail="", kind=""):
    return RankFailure(rank=rank, host="node1", state=state, what=what, phase="timing", detail=detail, kind=kind)


def test_the_cause_comes_first_and_consequences_lose_their_tracebacks():
    gloo = 'Traceback\n  File "/s/torch/distributed/distributed_c10d.py", line 1, in all_reduce\nRuntimeError: reset'
    reset = failure(0, "raised", "RuntimeError: reset", gloo)
    report = compose(3, [reset, failure(1, "finished"), failure(2, "died", "exit code 3")], "")
    assert report.splitlines()[0] == "rank 2 on node1 died: exit code 3 (while timing) (3 ranks)"
    assert "rank 0 on node1 lost the other ranks: RuntimeError: reset" in report
    assert "Traceback" not in report
    assert "rank 1" not in report


def test_a_communication_error_on_every_rank_is_its_own_cause():
    gloo = 'Traceback\n  File "/s/torch/distributed/distributed_c10d.py", line 1, in all_reduce\nRuntimeError: size\n'
    report = compose(2, [failure(rank, "raised", "RuntimeError: size", gloo) for rank in (0, 1)], "")
    assert report.startswith("rank 0 on node1 raised RuntimeError: size (while timing); so did rank 1")
    assert "as above" in report


@pytest.mark.parametrize(("line", "state"), [(2, "waiting"), (3, "stuck"), (4, "hung")])
def test_a_wait_in_c_is_known_by_the_line_that_calls_it(tmp_path, line, state):
    file = tmp_path / "mine.py"
    file.write_text("work = dist.all_reduce(x, async_op=True)\nwork.wait()\nloss = x.item()\nspin()\n")
    assert judge_stack(STACK.format(frames=at(file, line, "f"))).state == state


def test_a_rank_that_moves_on_is_at_work_and_one_that_does_not_hangs():
    earlier, later = STACK.format(frames=OWN_CODE), STACK.format(frames=at("/home/me/mine.py", 30, "g"))
    assert judge(earlier, later).state == "working"
    assert judge(later, later).state == "hung"
    assert judge("", later).state == "hung"
    assert judge(earlier, "").state == "stuck"


@pytest.mark.parametrize(
    ("frames", "ticks", "state"),
    [(OWN_CODE, 20, "working"), (OWN_CODE, 1, "hung"), (DEVICE, 20, "stuck"), (BACKWARD + OWN_CODE, 20, "stuck")],
    ids=["computes", "sleeps", "device", "backward"],
)
def test_a_rank_that_computes_in_one_place_is_at_work(frames, ticks, state):
    stack = STACK.format(frames=frames)
    assert judge(f"Core time: 7\n{stack}", f"Core time: {7 + ticks}\n{stack}").state == state


@pytest.mark.parametrize("characters", range(0, len(STACK.format(frames=OWN_CODE)), 7))
def test_half_a_dump_is_not_taken_for_a_whole_one(characters):
    dump = STACK.format(frames=OWN_CODE)
    assert is_whole(dump)
    assert not is_whole(dump[:characters])
    # Threads come before the main one: where that is missing, nothing says that the rank hangs.
    assert judge_stack(dump[: min(characters, dump.index("Current"))]).state == "stuck"


def test_of_a_deep_stack_the_innermost_frames_are_enough():
    deep = STACK.partition("{frames}")[0] + OWN_CODE * 100 + "  ...\n"
    assert is_whole(deep)
    assert judge_stack(deep).where == "/home/me/mine.py:22 in f"


def exception(*failures):
    return exception_of(len(failures), failures, "")


def raised(rank, kind, what="why"):
    return failure(rank, "raised", what, "T", kind)


def test_who_waits_or_may_wait_is_named_after_who_hangs():
    states = ["waiting", "stuck", "working", "hung"]
    for known in range(1, 5):
        report = compose(known, [failure(rank, state, "x") for rank, state in enumerate(states[:known])], "")
        cause = {1: 0, 2: 1, 3: 1, 4: 3}[known]
        assert report.startswith(f"rank {cause} on node1")


def test_of_several_that_died_the_first_is_the_cause():
    report = compose(3, [failure(2, "died", "killed by SIGKILL"), failure(0, "died", "killed by SIGABRT")], "")
    assert report.startswith("rank 2 on node1 died: killed by SIGKILL (while timing); so did rank 0")


@pytest.mark.parametrize(
    ("failures", "kind", "message"),
    [
        ([raised(0, "skipped"), failure(1, "waiting", "all_reduce")], UnsupportedCase, "rank 0 on node1 skipped: why"),
        ([raised(0, "expected_failure"), raised(1, "skipped")], ExpectedFailure, "rank 0 on node1 expected to fail"),
        ([raised(0, "unsupported"), raised(1, "unsupported")], UnsupportedCase, "^why"),
        ([raised(0, "skipped"), raised(1, "invalid_parameter")], InvalidParameter, "^why"),
        ([raised(0, "skipped"), raised(1, "exception")], RanksFailed, "^rank 1 on node1 raised why"),
        ([raised(0, "skipped"), failure(1, "died", "exit code 3")], RanksFailed, "^rank 1 on node1 died"),
        ([raised(0, "exception"), raised(1, "out_of_memory")], OutOfMemory, "^why"),
        ([failure(0, "stuck", "wait"), raised(1, "refused")], CaseError, "^rank 1 on node1: why$"),
    ],
)
def test_an_error_counts_for_more_than_a_skip_and_a_skip_for_more_than_who_waits(failures, kind, message):
    with pytest.raises(kind, match=message):
        raise exception(*failures)


PEER = "RuntimeError: [/x/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:2"


def test_a_skip_stands_where_the_others_lost_the_rank_that_skipped():
    with pytest.raises(UnsupportedCase, match="rank 1 on node1 skipped: why"):
        raise exception(raised(0, "exception", PEER), raised(1, "skipped"))


@pytest.mark.parametrize("what", ["ValueError: Default process group has not been initialized", "CaseError: gone"])
def test_a_mistake_that_torch_reports_is_no_consequence(what):
    torch = 'Traceback\n  File "/s/torch/distributed/distributed_c10d.py", line 1, in barrier\n' + what
    report = compose(2, [failure(0, "raised", PEER), failure(1, "raised", what, torch)], "")
    assert report.startswith(f"rank 1 on node1 raised {what}")
    assert "rank 0 on node1 lost the other ranks" in report


def test_long_text_keeps_its_beginning_and_its_end():
    text = "begin " + "x" * 1_000_000 + " end"
    assert cut(text, 100).startswith("begin xxx")
    assert cut(text, 100).endswith("xxx end")
    assert "999,910 of 1,000,010 characters left out" in cut(text, 100)
    assert cut("short", 100) == "short"
    assert cut("half a pair: \ud800", 100) == r"half a pair: \ud800"


def test_a_known_fault_of_a_library_is_named_and_the_document_has_the_same_table():
    page = (Path(__file__).parent.parent / "docs" / "contributing" / "upstream.md").read_text(encoding="utf-8")
    for phrase, fault in UPSTREAM.items():
        assert f"| `{phrase}` | {fault.replace('NCCL_ALGO', '`NCCL_ALGO`')} |" in page
        report = compose(2, [failure(0, "raised", f"DistBackendError: {phrase} for it")], "")
        assert f"known upstream: {fault} (perfsuite docs upstream)" in report.splitlines()
    assert "known upstream" not in compose(2, [failure(0, "raised", "ValueError: x")], "")
