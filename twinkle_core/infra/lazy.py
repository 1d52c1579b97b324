"""Results that stay on the workers until somebody asks. Imports Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.dispatch import Collect, collect_results
from twinkle_core.infra.gang import Answer
from twinkle_core.infra.notify import notify
from twinkle_core.infra.parts import Parts


class LazyCollect:
    """What a remote call will give. Given to another remote method, its parts go from worker to worker.

    `lazy()` or `lazy.result()` waits for the value and gives it; so do `len`, iteration, indexing, `in`, `float`, `int`, `bool`,
    `==` and attributes of the value, so that a script runs unchanged in local mode, where a call gives the value itself.
    """

    def __init__(self, answers: list[Answer], collect: Collect, mesh: DeviceMesh | None, what: str, timeout: float | None) -> None:
        self._answers = answers
        self._collect = collect
        self._mesh = mesh
        self._what = what
        self._timeout = timeout
        self._value: tuple[Any] | None = None

    def result(self) -> Any:
        """The value, fetched once. Raises what a worker raised, or `WorkerLostError`."""
        if self._value is None:
            self.wait()
            gang = self._answers[0].gang
            self._value = (collect_results(gang.values(self._answers), self._collect, self._mesh),)
        return self._value[0]

    def __call__(self) -> Any:
        return self.result()

    def wait(self) -> list[Any]:
        """Waits until all workers are done, and fetches nothing but each worker's `Meta`."""
        try:
            return self._answers[0].gang.wait(self._answers, self._timeout)
        except Exception as error:
            notify(self._what, error)
            raise

    def parts(self) -> Parts:
        """What a worker needs to fetch the value itself."""
        values, metas = zip(*((answer.value, answer.meta) for answer in self._answers), strict=True)
        return Parts(values=values, metas=metas, collect=self._collect, mesh=self._mesh)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"the lazy result of {self._what} lies inside another value: pass it to a remote method as an argument of its own, "
            "or call it first"
        )

    def __repr__(self) -> str:
        return f"<LazyCollect of {self._what}>" if self._value is None else repr(self._value[0])

    def __str__(self) -> str:
        return str(self.result())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result(), name)

    def __len__(self) -> int:
        return len(self.result())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result())

    def __getitem__(self, key: Any) -> Any:
        return self.result()[key]

    def __contains__(self, item: Any) -> bool:
        return item in self.result()

    def __bool__(self) -> bool:
        return bool(self.result())

    def __float__(self) -> float:
        return float(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __eq__(self, other: object) -> bool:
        return bool(self.result() == (other.result() if isinstance(other, LazyCollect) else other))

    __hash__ = None  # type: ignore[assignment]
