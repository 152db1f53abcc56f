"""Work that an iteration starts and neither waits for nor returns: refused by name, or known to be no fault."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import itertools
import multiprocessing.pool
import queue
import subprocess
import threading
import time
import types

import pytest
import torch

from perfsuite.base.errors import InvalidParameter
from perfsuite.runtime.ranks.returned import Iteration


def in_a_loop(pool: concurrent.futures.Executor) -> None:
    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(pool, time.sleep, 0.3)

    asyncio.run(main())


def in_a_joined_thread(*call) -> None:
    thread = threading.Thread(target=call[0], args=call[1:])
    thread.start()
    thread.join()


def by_torch(pool: concurrent.futures.Executor) -> None:
    pending = torch.futures.Future()
    threading.Timer(0.3, pending.set_result, [None]).start()


LOOP = asyncio.new_event_loop()


async def with_a_task() -> None:
    LOOP.create_task(asyncio.sleep(0.3))  # noqa: RUF006  nobody keeps it


class Loader(threading.Thread):
    """Starts by the class, as subclasses did before ``super``."""

    def start(self) -> None:
        threading.Thread.start(self)


LEFT = {
    "Thread": lambda pool: threading.Thread(target=time.sleep, args=(0.3,)).start(),
    "Timer": lambda pool: threading.Timer(0.3, int).start(),
    "Future": lambda pool: pool.submit(time.sleep, 0.3) and None,
    "Future, Timer": by_torch,
    "Task": lambda pool: LOOP.run_until_complete(with_a_task()),
    "process sleep": lambda pool: subprocess.Popen(["sleep", "0.5"]) and None,
}


@pytest.mark.parametrize(
    ("left", "start"),
    [
        *LEFT.items(),
        ("Thread", lambda pool: _thread.start_new_thread(time.sleep, (0.3,)) and None),
        ("Thread", lambda pool: [time.sleep(0.03), LEFT["Thread"](pool)]),
        ("Future", in_a_loop),
        ("Thread", lambda pool: in_a_joined_thread(LEFT["Thread"], pool)),
        ("Future", lambda pool: in_a_joined_thread(LEFT["Future"], pool)),
        ("Thread", lambda pool: in_a_joined_thread(in_a_joined_thread, LEFT["Thread"], pool)),
        ("Loader", lambda pool: Loader(target=time.sleep, args=(0.3,)).start()),
        ("MapResult", lambda pool: pool.threads.map_async(time.sleep, [0.3]) and None),
        ("IMapIterator", lambda pool: pool.threads.imap(time.sleep, [0.3]) and None),
        ("IMapUnorderedIterator", lambda pool: pool.threads.imap_unordered(time.sleep, [0.3]) and None),
        ("Thread", lambda pool: types.SimpleNamespace(thread=(LEFT["Thread"](pool)))),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_work_that_iterations_leave_is_refused_by_name(left, start):
    before = [vars(threading.Thread)["start"], vars(subprocess.Popen)["wait"], _thread.start_new_thread]
    with multiprocessing.pool.ThreadPool(1) as threads, concurrent.futures.ThreadPoolExecutor() as pool:
        pool.threads = threads
        iteration = Iteration(lambda: start(pool), "step")
        iteration()
        iteration()
        with pytest.raises(InvalidParameter, match=rf"step started work and did not wait for it \({left}"):
            [iteration() for _ in range(6 if left == "Task" else 1)]  # the next run of its loop may wait for a task
    assert before == [vars(threading.Thread)["start"], vars(subprocess.Popen)["wait"], _thread.start_new_thread]


def with_a_loader():
    loaded = iter(torch.utils.data.DataLoader(range(1000), num_workers=1))
    return lambda: next(loaded)


def with_buffers_of_a_queue():
    buffers = queue.Queue()
    buffers.put(0)
    return lambda: buffers.put(buffers.get())


def with_a_future():
    pool = concurrent.futures.ThreadPoolExecutor()
    ENDS.append(pool.shutdown)
    loaded = [pool.submit(int)]

    def run():
        loaded.pop().result()
        loaded.append(pool.submit(int))

    return run


def that_begins_much_once():
    pool, ended = concurrent.futures.ThreadPoolExecutor(), threading.Event()
    ENDS.extend([pool.shutdown, ended.set])
    begun = []

    def run():
        if begun:
            ended.set()
            concurrent.futures.wait(begun)
        else:
            begun.extend(pool.submit(ended.wait, 60) for _ in range(4))

    return run


@pytest.mark.usefixtures("ends_of_threads")
@pytest.mark.parametrize(
    ("left", "make"),
    [
        ("Thread", that_begins_much_once),
        *itertools.product(["Thread", "Queue"], [with_a_loader, with_buffers_of_a_queue, with_a_future]),
        ("Future", with_a_loader),
        *itertools.product(["Future"], [with_buffers_of_a_queue, with_a_future]),
    ],
)
def test_a_wait_for_other_work_does_not_allow_work_that_piles_up(left, make):
    ended = threading.Event()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        leave = {
            "Thread": lambda: threading.Thread(target=ended.wait, args=(60,)).start(),
            "Future": lambda: pool.submit(ended.wait, 60),
            "Queue": by_put(served(queue.Queue(), lambda _: ended.wait(60), 0)),
        }[left]
        ENDS.append(ended.set)
        wait = make()

        def run():
            wait()
            leave()

        iteration = Iteration(run, "step")
        try:
            with pytest.raises(InvalidParameter, match=rf"did not wait for it \([\w, ]*{left}"):
                [iteration() for _ in range(8)]
        finally:
            ended.set()


def that_waits_by(wait):
    """Return the maker of a loop that waits so for the work of the iteration before."""

    def make(pool):
        earlier = []

        def run():
            while earlier:
                wait(earlier.pop())
            done = threading.Event()
            earlier.append((pool.submit(lambda: (time.sleep(0.01), done.set())), done))

        return run

    return make


def by_its_state(asked):
    while not asked[0].done():
        time.sleep(0.001)


def with_few_in_flight(pool):
    free = threading.Semaphore(1)

    def run():
        free.acquire()
        threading.Thread(target=lambda: (time.sleep(0.01), free.release())).start()

    return run


def with_a_pool_for_each(pool):
    earlier = []

    def run():
        while earlier:
            earlier.pop().shutdown()
        earlier.append(concurrent.futures.ThreadPoolExecutor(1))
        earlier[0].submit(time.sleep, 0.01)

    return run


def with_a_task_for_the_next_run(pool):
    tasks = []

    async def main():
        if tasks:
            await tasks.pop()
        tasks.append(asyncio.ensure_future(asyncio.sleep(0.01)))

    return lambda: LOOP.run_until_complete(main())


def that_writes_checkpoints(pool):
    writer = []

    def run():
        for thread in writer:
            thread.join()
        writer[:] = [threading.Thread(target=time.sleep, args=(0.01,))]
        writer[0].start()

    return run


def whose_thread_sends_its_result(pool):
    results = queue.SimpleQueue()

    def run():
        threading.Thread(target=lambda: results.put(time.sleep(0.01))).start()
        results.get()

    return run


def with_a_pool_that_grows(pool):
    return lambda: [*concurrent.futures.ThreadPoolExecutor(2).map(time.sleep, [0.001])] and None


def with_a_service(pool):
    services = []
    ends = threading.Event()

    def run():
        if not services:
            services.append(threading.Thread(target=ends.wait, daemon=True))
            services[0].start()

    return run


def with_a_finished_task(pool):
    async def main():
        await asyncio.gather(asyncio.sleep(0.001), asyncio.to_thread(time.sleep, 0.001))

    return lambda: asyncio.run(main())


ENDS = []


@pytest.fixture
def ends_of_threads():
    yield
    while ENDS:
        ENDS.pop()()


def served(items, serve, *first):
    """Return a queue that an earlier thread serves; it has taken the first of the items ``first``."""
    for item in first:
        items.put(item)
    taken = threading.Event()
    thread = threading.Thread(target=lambda: [(taken.set(), serve(item)) for item in iter(items.get, None)])
    thread.start()
    ENDS.extend([thread.join, lambda: items.put(None)])
    assert taken.wait(60)
    return items


def by_the_loop_of_a_thread(serve):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ENDS.extend([loop.close, thread.join, lambda: loop.call_soon_threadsafe(loop.stop)])
    return lambda: loop.call_soon_threadsafe(serve, None) and None


def by_put(items, item=0):
    return lambda: items.put(item)


@pytest.mark.usefixtures("ends_of_threads")
@pytest.mark.parametrize(
    ("left", "make"),
    [
        ("Queue", lambda serve: by_put(served(queue.Queue(), serve, 0))),
        ("Queue", lambda serve: by_put(served(queue.Queue(maxsize=100), serve, 0))),
        ("LifoQueue", lambda serve: by_put(served(queue.LifoQueue(), serve, 0))),
        ("Queue", lambda serve: by_put(served(multiprocessing.Queue(), serve, 0), bytes(1 << 20))),
        ("Queue", lambda serve: by_put(served(multiprocessing.Queue(), serve, 0))),
        ("JoinableQueue", lambda serve: by_put(served(multiprocessing.JoinableQueue(), serve, 0))),
        ("SimpleQueue", lambda serve: by_put(served(queue.SimpleQueue(), serve, 0))),
        ("_UnixSelectorEventLoop", by_the_loop_of_a_thread),
    ],
)
def test_work_that_piles_up_before_an_earlier_thread_is_refused_by_name(left, make):
    served_again = threading.Event()
    iteration = Iteration(make(lambda item: served_again.wait(60)), "step")
    ENDS.append(served_again.set)
    with pytest.raises(InvalidParameter, match=rf"step started work and did not wait for it \({left}\)"):
        [iteration() for _ in range(8)]


def that_asks_a_thread(pool):
    answers = queue.Queue()
    asked = served(queue.Queue(), lambda item: answers.put(time.sleep(item)), 0.01)

    def run():
        asked.put(0.01)
        answers.get()

    return run


def whose_queue_is_full(pool):
    return by_put(served(queue.Queue(maxsize=2), time.sleep, 0.05, 0.05), 0.05)


def whose_thread_loads_ahead(pool):
    loaded, ended = queue.SimpleQueue(), threading.Event()

    def load():
        while not ended.wait(0.001):
            loaded.put(0)

    pool.submit(load)
    ENDS.append(ended.set)
    return lambda: [loaded.get(), time.sleep(0.005)]


def beside_a_thread_with_a_proxy(pool):
    class Proxy:  # as werkzeug's, whose object is there while a request is
        __dict__ = __class__ = property(lambda self: 1 // 0)

    def hold(proxy):
        ended.wait(60)

    ended = threading.Event()
    pool.submit(hold, Proxy())
    ENDS.append(ended.set)
    return lambda: None


def that_logs_by_a_thread(pool):
    records = served(queue.Queue(), str, "first")
    return lambda: [records.put("line"), time.sleep(0.01)]


@pytest.mark.usefixtures("ends_of_threads")
@pytest.mark.parametrize(
    "make",
    [
        that_waits_by(lambda asked: asked[0].result()),
        that_waits_by(lambda asked: asked[0].exception()),
        that_waits_by(lambda asked: concurrent.futures.wait([asked[0]])),
        that_waits_by(lambda asked: [*concurrent.futures.as_completed([asked[0]])]),
        that_waits_by(lambda asked: asked[1].wait()),
        that_waits_by(by_its_state),
        with_few_in_flight,
        with_a_pool_for_each,
        with_a_task_for_the_next_run,
        that_asks_a_thread,
        pytest.param(lambda pool: with_buffers_of_a_queue(), id="buffers"),
        pytest.param(lambda pool: by_put(queue.Queue(), 1.0), id="kept results"),
        whose_queue_is_full,
        whose_thread_loads_ahead,
        beside_a_thread_with_a_proxy,
        lambda pool: by_put(served(queue.SimpleQueue(), str, 0)),
        lambda pool: by_put(queue.SimpleQueue()),
        that_logs_by_a_thread,
        that_writes_checkpoints,
        whose_thread_sends_its_result,
        with_a_pool_that_grows,
        with_a_service,
        with_a_finished_task,
        lambda pool: lambda: subprocess.run(["true"], check=True) and None,
        lambda pool: lambda: torch.utils.data.DataLoader([1, 2], num_workers=1)._get_iterator().__next__() and None,
    ],
)
def test_started_work_that_is_finished_or_awaited_later_is_no_false_alarm(make):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        iteration = Iteration(make(pool), "step")
        for _ in range(8):
            iteration()
        while ENDS:
            ENDS.pop()()


@pytest.mark.usefixtures("ends_of_threads")
@pytest.mark.parametrize(
    ("feeds", "make"),
    [
        (True, that_logs_by_a_thread),
        (True, whose_queue_is_full),
        (True, lambda pool: by_put(served(multiprocessing.Queue(), str, 0))),
        (True, lambda pool: by_the_loop_of_a_thread(str)),
        (False, that_asks_a_thread),
        (False, lambda pool: with_buffers_of_a_queue()),
        (False, that_waits_by(lambda asked: asked[0].result())),
        (False, lambda pool: lambda: None),
    ],
)
def test_iterations_that_give_work_to_an_earlier_thread_are_known(feeds, make):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        iteration = Iteration(make(pool), "step")
        for _ in range(5):
            iteration()
    assert feeds == iteration.feeds
