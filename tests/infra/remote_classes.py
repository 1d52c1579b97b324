"""Users' classes for the tests of `remote_class`."""

import os
import signal
import time
from collections.abc import Iterator

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import DataError
from twinkle_core.infra import remote_class, remote_function

DRIVER = os.getpid()


class NotForTheDriver:
    """Unpickling it raises in any process that is no worker."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self):
        return _rebuild, (self.value,)


def _rebuild(value: int) -> NotForTheDriver:
    from twinkle_core.infra.state import STATE

    if not STATE.in_worker:
        raise RuntimeError("the driver unpickled it")
    return NotForTheDriver(value)


@remote_class(execute="all")
class Counter:
    """Adds to what it was given."""

    def __init__(self, start: int, *, device_mesh: DeviceMesh | None = None) -> None:
        self.start = start
        self.mesh = device_mesh
        self.calls = 0

    @remote_function(dispatch="slice_dp", collect="flatten")
    def add(self, items: list[int], more: int = 0) -> list[int]:
        """Each item plus start."""
        self.calls += 1
        return [item + self.start + more for item in items]

    @remote_function(dispatch="slice", collect="flatten", min_items=1)
    def add_some(self, items: list[int]) -> list[int]:
        return [item + self.start for item in items]

    @remote_function(dispatch="all", collect="sum", lazy_collect=False)
    def count(self) -> int:
        return self.calls

    @remote_function(dispatch="all", collect=max, lazy_collect=False)
    def data_rank(self) -> int:
        return self.mesh.data_rank if self.mesh is not None else 0

    @remote_function(dispatch="slice", collect="flatten")
    def wrap(self, items: list[int]) -> list[NotForTheDriver]:
        return [NotForTheDriver(item) for item in items]

    @remote_function(dispatch="slice", collect="flatten")
    def unwrap(self, items: list[NotForTheDriver]) -> list[int]:
        return [item.value for item in items]

    @remote_function(dispatch="all", collect="first")
    def fail(self, text: str) -> None:
        raise DataError(text)

    @remote_function(dispatch="all", collect="none", timeout=0.5)
    def sleep(self, rank: int, seconds: float) -> None:
        if self.mesh is not None and self.mesh.rank == rank:
            time.sleep(seconds)

    @remote_function(dispatch="all", collect="none")
    def die(self, rank: int, number: int) -> None:
        if self.mesh is not None and self.mesh.rank == rank:
            os.kill(os.getpid(), number)
            time.sleep(20)
        elif number == signal.SIGKILL:
            time.sleep(20)

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def local_only(self) -> int:
        return 1


@remote_class(execute="first")
class Loader:
    """Batches of two."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * index, 2 * index + 1] for index in range(self.num_batches)])


@remote_class()
class Countdown:
    """Worker r counts r + 1 numbers down, then ends."""

    def __init__(self, *, device_mesh: DeviceMesh | None = None) -> None:
        self.left = (device_mesh.rank or 0) + 1 if device_mesh is not None else 2

    def __iter__(self) -> "Countdown":
        return self

    @remote_function(dispatch="all", collect="flatten", lazy_collect=False)
    def __next__(self) -> list[int]:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return [self.left]


def script(pair: str | None, one: str | None) -> list:
    """What a user writes, once: only `initialize` decides where it runs."""
    counter = Counter(10, remote_group=pair)
    loader = Loader(3, remote_group=one)
    second = Counter(100, remote_group=one)
    seen = [list(counter.add(batch)) for batch in loader]
    return [seen, len(loader), list(second.add(counter.add_some([1, 2, 3]), more=1000)), isinstance(counter, Counter)]
