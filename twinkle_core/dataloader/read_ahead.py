"""Work done ahead in threads, its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def read_ahead(tasks: Iterator[Callable[[], T]], num_threads: int, depth: int) -> Generator[T, None, None]:
    """The results of the tasks, in their order; `depth` more are worked on or waiting. Without threads, each is done when its turn comes.

    An exception is raised in its task's place. Closing the iterator ends the threads, after the tasks that they are at.
    """
    if not num_threads:
        for task in tasks:
            yield task()
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="dataloader") as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
