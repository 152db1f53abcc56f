"""Find threads, processes, futures and tasks that an iteration starts and neither waits for nor returns.

The samples would not include their work. Three iterations in a row that leave work end the case: a pool or a service
starts only once. Work for which a later iteration waits is allowed, as data loaders and checkpoints do: the time of
such a loop is true. A wait for other things, as at a queue, allows work that does not pile up. Items for an earlier
thread or process are allowed too, unless they pile up.
"""

from __future__ import annotations

import _thread
import asyncio.base_events
import concurrent.futures
import contextlib
import multiprocessing.pool
import multiprocessing.queues
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from perfsuite.base.errors import InvalidParameter

_KINDS: tuple[tuple[Any, str, str, Callable[[Any], int]], ...] = (
    (threading.Thread, "start", "join is_alive", lambda thread: thread.is_alive() and not _is_of_a_pool(thread)),
    (concurrent.futures.Future, "__init__", "result exception done", lambda future: not future.done()),
    (multiprocessing.pool.ApplyResult, "__init__", "wait ready", lambda result: not result.ready()),
    (multiprocessing.pool.IMapIterator, "__init__", "__next__ next", lambda results: results._job in results._cache),
    (torch.futures.Future, "__init__", "wait done", lambda future: not future.done()),
    (multiprocessing.process.BaseProcess, "start", "join is_alive", lambda _: 0),  # _processes() finds all
    (subprocess.Popen, "__init__", "wait poll", lambda _: 0),
    (queue.Queue, "put", "get", lambda items: items.unfinished_tasks > (n := items.qsize()) and n * (not items.full())),
    (multiprocessing.queues.Queue, "put", "get", lambda items: items.qsize() * (not items.full())),
    (multiprocessing.queues.JoinableQueue, "put", "join", lambda items: items.qsize() * (not items.full())),
    (asyncio.BaseEventLoop, "call_soon_threadsafe", "run_until_complete", lambda loop: len(loop._ready)),
    (threading.Event, "", "wait", int),
    (concurrent.futures._base._AcquireFutures, "", "__enter__", int),  # wait() and as_completed()
)
"""Classes of handles: class, method that starts, methods that wait or ask, and how much of the work goes on.  Items of
a queue are work if others were taken and not marked as done: a thread reads the queue.  A full queue lets the caller
wait."""
_QUEUES = (queue.Queue, multiprocessing.queues.Queue)
_length = queue.SimpleQueue.qsize
_FED = (*_QUEUES, queue.SimpleQueue, asyncio.BaseEventLoop)  # Classes by which work goes to an earlier thread.
_MAKERS = (("asyncio.base_events", "BaseEventLoop", "create_task"), ("torch.distributed.rpc", "api", "_invoke_rpc"))
"""Functions that return a handle with a method ``done``, by module, owner and name."""
_POOLS = ("concurrent", "multiprocessing", "asyncio", "torch")
"""Packages whose threads serve futures that are noted themselves."""
_MOST_IN_A_ROW, _MOST_THAT_GROW = 2, 5
"""Most iterations in a row that leave work, without any wait; most that leave more of one class than all before them,
as a loader does that begins several batches ahead."""
_GRACE_S, _GRACE = 5e-4, 0.05  # Time for a thread to end after it sent its result: seconds, and share of the iteration.


class Started:
    """Notes starts by the thread of the iterations and by threads that it started, while it is entered."""

    def __init__(self, name: str) -> None:
        """``name`` names the workload in errors."""
        self._name = name
        self._caller = (os.getpid(), threading.get_ident())
        self._made: list[tuple[Any, Callable[[Any], int]]] = []
        self._seen: dict[int, tuple[weakref.ref[Any], Callable[[Any], int]]] = {}  # Handles of all noted iterations.
        self._stack = contextlib.ExitStack()
        self._processes: set[str] = set()
        self._began_s = 0.0
        self._in_a_row = 0  # Number of the last iterations that left work.
        # By class: number of iterations that left more than all before them, since one left less than half; the most.
        self._growing, self._most = Counter[type](), Counter[type]()
        self._waited: set[type] = set()  # Classes of handles for which an iteration waited after their own.
        self.feeds = False  # Whether an iteration gave work to an earlier thread and did not wait for its answer.

    def __enter__(self) -> None:
        self._made.clear()
        self._processes = _processes()
        enter = self._stack.enter_context
        for kind, start, wait, goes_on in _KINDS:
            if start:
                enter(replaced(kind, start, Noted(vars(kind)[start], self._note, goes_on)))
            for name in wait.split():
                enter(replaced(kind, name, Noted(vars(kind)[name], self._awaited)))
        for module, owner, name in _MAKERS:
            if (made_by := getattr(sys.modules.get(module), owner, None)) is not None:
                enter(replaced(made_by, name, self._maker(getattr(made_by, name))))
        enter(replaced(_thread, "start_new_thread", _start_thread))
        acquire = threading.Semaphore.acquire

        def note_and_acquire(semaphore: Any, blocking: bool = True, timeout: float | None = None) -> bool:
            if blocking and timeout != 0:  # an executor asks without a wait
                self._awaited(semaphore)
            return acquire(semaphore, blocking, timeout)

        enter(replaced(threading.Semaphore, "acquire", note_and_acquire))
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _maker(self, original: Any) -> Any:
        def make(*arguments: Any, **named: Any) -> Any:
            made = original(*arguments, **named)
            self._note(made, lambda handle: not handle.done())
            return made

        return make

    def _is_caller(self) -> bool:
        """Return False in other threads, and in forked processes, which keep the replaced methods."""
        pid, thread = self._caller
        if os.getpid() != pid or threading.get_ident() == thread:
            return os.getpid() == pid
        return any(made is threading.current_thread() for made, _ in self._made)

    def _note(self, made: Any, goes_on: Callable[[Any], bool]) -> None:
        if self._is_caller():
            self._made.append((made, goes_on))

    def _awaited(self, handle: Any) -> None:
        """Note a wait by the caller; a thread that it left may wait for other things, and ``start`` for the thread."""
        own = [each for made, _ in self._made for each in (made, getattr(made, "_started", None))]
        is_later = isinstance(handle, _QUEUES) or all(handle is not each for each in own)
        if isinstance(handle, asyncio.BaseEventLoop):  # its next run may wait for tasks that a run left
            is_later = any(asyncio.isfuture(task) and not task.done() for task, _ in self._alive())
        if is_later and self._caller == (os.getpid(), threading.get_ident()):
            self._waited.add(type(handle))

    def require_finished(self) -> None:
        """Raise InvalidParameter if this iteration and those before it left work."""
        now_s = time.perf_counter()
        until_s = now_s + max(_GRACE_S, _GRACE * (now_s - self._began_s))
        read = _read_by_others()
        while (any(left := self._left()) or any(map(_length, read))) and time.perf_counter() < until_s:
            time.sleep(_GRACE_S / 10)
        kinds, processes = left
        self.feeds |= any(isinstance(handle, _FED) and type(handle) not in self._waited for handle, _ in self._made)
        self._made += [(items, _length) for items in read]
        self._seen.update({id(handle): (weakref.ref(handle), goes_on) for handle, goes_on in self._made})
        self._made.clear()  # a handle holds the tensors of its work
        amounts = self._amounts()
        for kind in amounts.keys() | self._most.keys():
            amount, most = amounts[kind], self._most[kind]
            self._growing[kind] = self._growing[kind] + (amount > most) if 2 * amount >= most else 0
            self._most[kind] = max(most, amount)
        starts = processes or any(not issubclass(kind, _FED) for kind in kinds)
        self._in_a_row = self._in_a_row + 1 if starts and not self._waited else 0
        piled = {kind for kind, times in self._growing.items() if times > _MOST_THAT_GROW}
        if self._in_a_row > _MOST_IN_A_ROW or piled:
            names = sorted(kind.__name__ for kind in kinds | piled) + processes
            raise InvalidParameter(
                f"an iteration of {self._name} started work and did not wait for it ({', '.join(names)}): its samples "
                "would not include that work; wait for it in the iteration or in the next one, or return its handle"
            )

    def _left(self) -> tuple[set[type], list[str]]:
        """Return the classes of handles without a later wait, and the names of processes, whose work goes on."""
        kinds = {type(handle) for handle, goes_on in self._made if goes_on(handle)}
        processes = [f"process {name}" for name in map(_running, _processes() - self._processes) if name]
        return {kind for kind in kinds if kind not in self._waited or issubclass(kind, _QUEUES)}, processes

    def _amounts(self) -> Counter[type]:
        """Return how much work of all noted iterations goes on, by the class of its handle."""
        amounts: Counter[type] = Counter()
        amounts[subprocess.Popen] = sum(map(bool, map(_running, _processes())))
        for handle, goes_on in self._alive():
            amounts[type(handle)] += goes_on(handle)
        return amounts

    def _alive(self) -> Iterator[tuple[Any, Callable[[Any], int]]]:
        return ((handle, goes_on) for ref, goes_on in self._seen.values() if (handle := ref()) is not None)


class Noted:
    """Replaces a method of a class: notes its object and returns the original; adds no frame to the stack."""

    def __init__(self, original: Any, note: Callable[..., object], *arguments: Any) -> None:
        self._original, self._note, self._arguments = original, note, arguments

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:  # a subclass calls the method by the class
            return self._call
        self._note(instance, *self._arguments)
        return self._original.__get__(instance, owner)

    def _call(self, instance: Any, *arguments: Any, **named: Any) -> Any:
        self._note(instance, *self._arguments)
        return self._original(instance, *arguments, **named)


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Replace an attribute of a class or a module inside the block."""
    original = vars(owner)[name]
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _start_thread(function: Any, arguments: Any, named: Any = MappingProxyType({})) -> int | None:
    """Replace ``_thread.start_new_thread`` by a thread that can be asked whether it is alive."""
    thread = threading.Thread(target=function, args=arguments, kwargs=named, daemon=True)
    thread.start()
    return thread.ident


def _read_by_others() -> list[Any]:
    """Return the SimpleQueues that other threads hold and do not fill: their class has no methods to replace."""
    found: list[Any] = []
    for thread, top in sys._current_frames().items():
        held, fills, frame = [], False, top if thread != threading.get_ident() else None
        while frame is not None:
            values = [*frame.f_locals.values()]
            values += [each for value in values for each in _attributes(value)]
            held += [value for value in values if issubclass(type(value), queue.SimpleQueue)]
            fills |= "put" in frame.f_code.co_names
            frame = frame.f_back
        found += [] if fills else held
    return found


def _attributes(value: object) -> list[Any]:
    try:
        return [*vars(value).values()]
    except Exception:  # it has none, or it is a proxy whose object is absent
        return []


def _is_of_a_pool(thread: Any) -> bool:
    module = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
    return str(module).partition(".")[0] in _POOLS


def _processes() -> set[str]:
    """Return the ids of the children of this thread, and of the main thread, which adopts orphans."""
    tasks = {os.getpid(), threading.get_native_id()}
    return {pid for task in tasks for pid in _text(f"/proc/self/task/{task}/children").split()}


def _running(pid: str) -> str:
    """Return the name of a process; empty if it has ended."""
    name, _, rest = _text(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
    return "" if rest.split()[:1] == ["Z"] else name


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it has ended
        return ""
