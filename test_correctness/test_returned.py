"""What an iteration returns: waited for inside the sample, or refused by name."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing.pool
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper

from perfsuite.base.errors import InvalidParameter, PerfsuiteError, RanksFailed
from perfsuite.record.workload import Budget, CallableStep
from perfsuite.runtime.ranks.returned import Iteration, describe, pending
from test_correctness.helpers import unwaited
from test_correctness.helpers.local_driver import driver_fixture, job, records

QUICK = Budget(min_rounds=3, max_time_s=0.02, warmup_time_s=0.02, timeout_s=60.0)


class Handle(dist.Work):
    """A work that keeps how often it was waited for."""

    def __init__(self):
        super().__init__()
        self.waits = 0

    def wait(self, *_):  # type: ignore[override]
        self.waits += 1
        return True


@dataclasses.dataclass
class Both:
    first: object
    second: object = None


class DTensorLike(torch.Tensor):
    """Holds its part as DTensor does."""


def with_part(part):
    tensor = torch.ones(2).as_subclass(DTensorLike)
    tensor._local_tensor = part
    return tensor


@pytest.mark.parametrize(
    ("place", "waits"),
    [
        (lambda work: work, 1),
        (lambda work: (None, work), 1),
        (lambda work: [work, [work, 3.0]], 2),
        (lambda work: {"loss": torch.ones(1), "work": {"deep": (work,)}}, 1),
        (lambda work: Both(first=None, second=work), 1),
        (lambda work: with_part(torch.ones(1)), 0),
        (lambda work: types.SimpleNamespace(loss=1.0, work=work), 1),
        (lambda work: {"out": types.SimpleNamespace(works=[work, work], by_name={"a": work})}, 3),
        (lambda work: (1, "text", torch.ones(3), range(9), {4}), 0),
        (lambda work: None, 0),
    ],
)
def test_works_are_waited_for_wherever_they_are_in_the_returned_value(place, waits):
    work = Handle()
    iteration = Iteration(lambda: place(work), "step")
    iteration()
    assert waits == work.waits
    iteration.settled()()
    assert 2 * waits == work.waits


def test_an_iteration_that_returns_nothing_to_wait_for_is_called_as_it_is():
    def run():
        return torch.ones(2)

    iteration = Iteration(run, "step")
    iteration()
    assert iteration.settled() is run


def test_a_handle_of_some_iterations_is_waited_for_in_those():
    work, given = Handle(), itertools.cycle([None, "work", 3.5])
    iteration = Iteration(lambda: work if next(given) == "work" else None, "step")
    iteration()
    iteration()
    run = iteration.settled()
    for _ in range(6):
        run()
    assert work.waits == 3


def test_a_handle_that_comes_only_after_the_warm_up_is_refused():
    work, given = Handle(), iter([None, None, "work"])
    iteration = Iteration(lambda: work if next(given) else None, "step")
    iteration()
    iteration.settled()()
    with pytest.raises(InvalidParameter, match="step returned a Handle only after its first iterations"):
        iteration()


def later(done):
    time.sleep(0.05)
    done.append("done")


@pytest.fixture(params=["thread", "executor", "pool", "torch future", "fork"])
def started(request):
    """Starts something of each kind that fills the list it is given, and returns its handle."""
    with concurrent.futures.ThreadPoolExecutor() as executor, multiprocessing.pool.ThreadPool(1) as pool:

        def thread(done):
            thread = threading.Thread(target=later, args=(done,))
            thread.start()
            return thread

        def future(done):
            future = torch.futures.Future()
            executor.submit(lambda: (later(done), future.set_result(None)))
            return future

        yield {
            "thread": thread,
            "executor": lambda done: executor.submit(later, done),
            "pool": lambda done: pool.apply_async(later, (done,)),
            "torch future": future,
            "fork": lambda done: torch.jit._fork(later, done),
        }[request.param]


def test_handles_of_threads_executors_pools_and_torch_are_waited_for(started):
    done = []
    Iteration(lambda: started(done), "step")()
    assert done == ["done"]


def test_a_process_is_waited_for():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    Iteration(lambda: process, "step")()
    assert process.returncode == 0


def test_a_future_in_an_attribute_is_waited_for_and_a_thread_there_is_not():
    done = []
    ends = threading.Event()
    lasting = threading.Thread(target=ends.wait)
    lasting.start()
    with concurrent.futures.ThreadPoolExecutor() as executor:
        Iteration(lambda: types.SimpleNamespace(future=executor.submit(later, done), logger=lasting), "step")()
    ends.set()
    assert done == ["done"]


async def coroutine():
    return None


async def stream():
    yield 1


class Custom:
    def wait(self):
        raise AssertionError("nobody knows what it waits for")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (coroutine, r"an awaitable \(coroutine\).* await it inside the iteration"),
        (lambda: asyncio.Future(loop=asyncio.new_event_loop()), r"an awaitable \(Future\)"),
        (stream, r"an asynchronous iterator \(async_generator\)"),
        (lambda: (number for number in range(3)), r"an iterator \(generator\).* read it to its end"),
        (lambda: map(str, [1]), r"an iterator \(map\)"),
        (lambda: (None, {"inside": (number for number in ())}), r"an iterator \(generator\)"),
        (lambda: lambda: None, r"a callable \(function\).* call it inside the iteration"),
        (lambda: functools.partial(print), r"a callable \(partial\)"),
        (lambda: CallableStep(print), r"a callable \(CallableStep\)"),
        (Custom, r"a Custom, which has a method wait\(\)"),
        (threading.Event, r"an? Event, which has a method wait\(\)"),
    ],
)
def test_work_that_has_not_begun_is_refused_by_name(make, told):
    with pytest.raises(InvalidParameter, match=f"an iteration of step returned {told}"):
        Iteration(make, "step")()


def test_an_open_file_a_module_and_a_value_that_holds_itself_are_no_work(tmp_path):
    loop = [torch.nn.Linear(1, 1)]
    loop.append(loop)
    with open(tmp_path / "log", "w") as file:
        assert pending((file, loop), "step") == []


# -- on ranks ----------------------------------------------------------------------------------------------------


driver = driver_fixture()


def run(driver, function, **arguments):
    return driver.run(job(function, 2, **{"budget": QUICK, **arguments}))


@pytest.mark.parametrize("how", ["work", "future", "functional", "isend"])
def test_returned_communication_is_finished_in_each_sample(driver, how):
    # Each call of the next iteration looks whether the one before had finished: an unwaited one mostly has not.
    assert records(run(driver, unwaited.returned, how=how))["unfinished"] == 0


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (unwaited.dropped, "an iteration of dropped started allreduce and did not wait for it"),
        (unwaited.dropped_functional, "started a functional collective and did not wait for it"),
        (unwaited.kept_send, "started send and did not wait for it"),
        (unwaited.in_a_thread, r"in_a_thread started work and did not wait for it \(Thread\)"),
        (unwaited.generator, "generator returned a generator; return a callable that is one iteration, or a Step"),
    ],
)
def test_communication_that_nobody_waits_for_is_refused(driver, function, told):
    with pytest.raises(InvalidParameter, match=told):
        run(driver, function)


@pytest.mark.parametrize("function", [unwaited.kept_send, unwaited.skipped_between])
def test_ranks_with_unfinished_communication_are_not_used_again(driver, function):
    run(driver, unwaited.coalesced)
    before = {slot: child.pid for slot, child in driver._transport._slots.items()}
    with pytest.raises(PerfsuiteError):
        run(driver, function)
    run(driver, unwaited.coalesced)
    pids = {slot: child.pid for slot, child in driver._transport._slots.items()}
    assert [slot for slot in before if pids[slot] != before[slot]] == [0, 1]


@pytest.mark.parametrize("function", [unwaited.ddp, unwaited.waited_by_future, unwaited.coalesced])
def test_communication_that_is_waited_for_in_another_way_is_no_false_alarm(driver, function):
    assert len(run(driver, function).times_s) >= 3


def test_a_rank_that_waits_for_a_returned_handle_is_not_the_one_that_hangs(driver):
    with pytest.raises(RanksFailed) as failure:
        run(driver, unwaited.one_sided, budget=Budget(min_rounds=3, max_time_s=0.05, timeout_s=1.5))
    assert str(failure.value).startswith("rank 1 on ")
    assert "rank 0 on" in str(failure.value)
    assert "waiting for the other ranks in wait" in str(failure.value)


def _broken(chained):
    try:
        raise OSError("disk is gone\nsecond line")
    except OSError:
        if chained:
            raise ValueError("no sample") from None
        raise


@pytest.mark.parametrize(
    ("chained", "cause"), [(False, "OSError: disk is gone"), (True, "ValueError: no sample")], ids=["plain", "chained"]
)
def test_an_error_of_a_loader_process_is_reported_with_its_cause_first(chained, cause):
    try:
        _broken(chained)
    except (OSError, ValueError):
        sent = ExceptionWrapper(where="in DataLoader worker process 0")  # what a loader's process sends
    with pytest.raises((OSError, ValueError)) as caught:
        sent.reraise()
    answer = describe(caught.value, phase="timing", code=None, destroyed=False)
    assert f"{cause} (in DataLoader worker process 0)" == answer["message"]
    assert "Original Traceback" in answer["traceback"]
