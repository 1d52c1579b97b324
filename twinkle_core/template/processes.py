"""A function applied to a stream by several processes: results in order, little in flight, no process left behind.

The processes are plain child programs of this interpreter that talk over a socket. Unlike those of `multiprocessing` they do
not import the caller's main module, which under Prefect or Ray costs seconds and in a script without a guard starts it again.
A thread of the caller works too: it takes items that no process has begun, so that nothing waits while they start.

No main thread does the work: its heap is the one that the interpreter's own objects are strewn over, and tokenizing takes a third longer
on it than on the fresh one that glibc gives another thread.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Generic, TypeVar

from twinkle_core.errors import WorkerLostError

Result = TypeVar("Result")

IN_FLIGHT_ITEMS = 4
"""Items that are given out and not yet taken back, per process; also the items whose results wait for an earlier one."""
IN_FLIGHT_BYTES = 4 << 20
"""The same in bytes of input, per process. One item alone may be larger."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from twinkle_core.template.processes import serve; serve(int(sys.argv[1]))"
)
_ENVIRONMENT = ("env", "TOKENIZERS_PARALLELISM=false", "RAYON_NUM_THREADS=1", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")
"""Sets the variables for the child alone: one thread each, since there is a process for each core."""
_END_SECONDS = 5.0


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ProcessMap(Generic[Result]):
    """`work` over a stream of bytes, by this process and `num_proc - 1` more. As a context manager: at its end they are gone.

    With `thread`, a second thread of this process takes the place of one process: it costs no start, but shares the interpreter's lock.
    `work` and its results must pickle. What it raises is raised here with its own type, whichever process it was in. A process that the
    kernel kills raises `WorkerLostError` at once. When this process is
    killed, the others end by themselves after the item they are at: their socket is closed.
    """

    def __init__(self, work: Callable[[bytes], Result], num_proc: int, *, thread: bool = False) -> None:
        self._work, self._num_proc = work, num_proc
        self._num_threads = 1 + (thread and num_proc > 1)
        self._todo: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Result] | BaseException] = queue.SimpleQueue()
        self._children: list[_Child] = []
        self._threads = ThreadPoolExecutor(num_proc, thread_name_prefix="encode")

    def __enter__(self) -> ProcessMap[Result]:
        with ExitStack() as undo:
            undo.callback(self._end)
            for _ in range(self._num_threads):
                self._threads.submit(self._work_here).add_done_callback(self._tell)
            if self._num_proc > self._num_threads:
                work = bytes(ForkingPickler.dumps(self._work))
                for _ in range(self._num_proc - self._num_threads):
                    self._children.append(_Child.start())
                    self._threads.submit(self._drive, self._children[-1], work).add_done_callback(self._tell)
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        while not self._todo.empty():
            with suppress(queue.Empty):
                self._todo.get_nowait()
        for _ in range(self._num_proc):
            self._todo.put(None)
        for child in self._children:
            child.process.kill()
        self._threads.shutdown()
        for child in self._children:
            child.process.wait(_END_SECONDS)

    def __call__(self, items: Iterable[bytes]) -> Iterator[Result]:
        """One result for each item, in order."""
        ready: dict[int, Result] = {}
        sizes: list[int] = []
        source = iter(items)
        held = next(source, None)
        taken, in_flight = 0, 0
        while held is not None or taken < len(sizes):
            if held is not None and self._has_room(len(sizes) - taken, in_flight + len(held)):
                self._todo.put((len(sizes), held))
                sizes.append(len(held))
                in_flight += len(held)
                held = next(source, None)
            elif taken in ready:
                in_flight -= sizes[taken]
                taken += 1
                yield ready.pop(taken - 1)
            else:
                self._wait(ready)

    def _has_room(self, num_items: int, num_bytes: int) -> bool:
        return not num_items or (num_items < IN_FLIGHT_ITEMS * self._num_proc and num_bytes <= IN_FLIGHT_BYTES * self._num_proc)

    def _wait(self, ready: dict[int, Result]) -> None:
        answer = self._done.get()
        if isinstance(answer, BaseException):
            raise answer
        ready[answer[0]] = answer[1]

    def _drive(self, child: _Child, work: bytes) -> None:
        """The thread of one child: hands it an item, waits for the result, and so on."""
        with child.connection as connection:
            try:
                connection.send_bytes(work)
                while (item := self._todo.get()) is not None:
                    connection.send_bytes(item[1])
                    result, error = connection.recv()
                    if error is not None:
                        self._done.put(error)
                        return
                    self._done.put((item[0], result))
            except (EOFError, OSError) as error:
                raise child.lost() from error

    def _work_here(self) -> None:
        """A thread that works in this process."""
        while (item := self._todo.get()) is not None:
            self._done.put((item[0], self._work(item[1])))

    def _tell(self, thread: Future[None]) -> None:
        """An error that ended a thread goes to the caller."""
        if (error := thread.exception()) is not None:
            self._done.put(error)


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]

    @classmethod
    def start(cls) -> _Child:
        ours, theirs = Pipe()
        with theirs:
            command = [*_ENVIRONMENT, sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        return cls(process, ours)

    def lost(self) -> WorkerLostError:
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerLostError(f"encoding process {self.process.pid} closed its connection; run again")
        if code >= 0:
            return WorkerLostError(f"encoding process {self.process.pid} ended with exit code {code}: its error stands above")
        return WorkerLostError(
            f"encoding process {self.process.pid} was ended by signal {-code} ({signal.strsignal(-code)}); "
            "finished parts are kept: run again, with a smaller num_proc if memory was short"
        )


def serve(descriptor: int) -> None:
    """The child's side: the function first, then items, until the other side is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children itself
    with Connection(descriptor) as connection, ThreadPoolExecutor(1) as thread:
        thread.submit(_answer, connection).result()


def _answer(connection: Connection[Any, Any]) -> None:
    try:
        work = connection.recv()
        while True:
            connection.send_bytes(_reply(work, connection.recv_bytes()))
    except (EOFError, ConnectionError):
        return


def _reply(work: Callable[[bytes], Any], item: bytes) -> bytes:
    """(result, None), or (None, the error that `work` raised, with its traceback as a note), pickled."""
    try:
        return bytes(ForkingPickler.dumps((work(item), None)))
    except Exception as error:
        error.add_note("in an encoding process: " + "".join(traceback.format_exception(error, limit=-20)))
        try:
            reply = bytes(ForkingPickler.dumps((None, error)))
            ForkingPickler.loads(reply)
        except Exception:  # an error that only its own process can make
            reply = bytes(ForkingPickler.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"))))
        return reply
