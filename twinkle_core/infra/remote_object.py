"""The driver's side of an object that lives on workers. Imports Ray."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.batches import Split
from twinkle_core.infra.dispatch import Collect
from twinkle_core.infra.gang import Answer, Gang
from twinkle_core.infra.lazy import LazyCollect
from twinkle_core.infra.notify import notify
from twinkle_core.infra.ray_runtime import RayRuntime, new_key
from twinkle_core.infra.remote import CLASS_MARK, RemoteMethod, described_methods
from twinkle_core.infra.runtime import current_runtime

AT_ONCE = RemoteMethod(dispatch="all", execute="first", collect="first", lazy_collect=False)
SPECIAL: Mapping[str, RemoteMethod] = MappingProxyType({"__len__": AT_ONCE, "__getitem__": AT_ONCE, "__contains__": AT_ONCE})
"""What an object can do without being marked: asked of the first worker."""
ITERATION = RemoteMethod(dispatch="all", collect="none")
"""How an iterator goes on where `__iter__` or `__next__` is not marked: each worker's value, and that alone where there is but one."""


class RemoteObject:
    """Stands for an object of a `remote_class` on workers. A class of its own, derived from this, has the methods of the user's."""

    def __init__(self, cls: type, runtime: RayRuntime, gang: Gang, num_workers: int, mesh: DeviceMesh | None) -> None:
        self._cls = cls
        self._runtime = runtime
        self._gang = gang
        self._num_workers = num_workers
        self._mesh = mesh
        self._key = new_key(cls.__name__)

    def _construct(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        what = f"{self._cls.__name__}()"
        calls = [(self._key, self._cls, args, kwargs)] * self._num_workers
        self._told(what, lambda: self._gang.run("construct", calls, what))

    def _call(self, method: str, described: RemoteMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = f"{self._cls.__name__}.{method}"
        num_workers = 1 if described.execute == "first" else self._num_workers
        mesh = self._mesh if num_workers == self._num_workers else None
        split = Split(dispatch=described.dispatch, num_workers=num_workers, mesh=mesh, min_items=described.min_items, what=what)
        if any(isinstance(value, LazyCollect) for value in (*args, *kwargs.values())):
            there = tuple(_parts(value) for value in args), {name: _parts(value) for name, value in kwargs.items()}
            calls: list[tuple[Any, ...]] = [(self._key, method, *there, split)] * num_workers
        else:
            calls = [(self._key, method, *split.share(rank, args, kwargs), None) for rank in range(num_workers)]
        answers = self._gang.ask("call", calls, what)
        return self._give(answers, described, mesh, what, described.collect)

    def _give(self, answers: list[Answer], described: RemoteMethod, mesh: DeviceMesh | None, what: str, collect: Collect) -> Any:
        lazy = LazyCollect(answers, collect, mesh, what, described.timeout)
        if not (current_runtime().lazy_collect if described.lazy_collect is None else described.lazy_collect):
            return lazy.result()
        if described.sync:
            lazy.wait()
        else:
            self._gang.watch.outstanding.update({answer.meta: answer for answer in answers})
        return lazy

    def _told(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            notify(what, error)
            raise

    def _iterate(self) -> Iterator[Any]:
        iterator = f"{self._key}-{uuid.uuid4().hex[:8]}"
        what = f"{self._cls.__name__}.__iter__"
        self._told(what, lambda: self._gang.run("iterate", [(self._key, iterator)] * self._num_workers, what))
        while True:
            try:
                yield self._advance(iterator)
            except StopIteration:
                return

    def _advance(self, iterator: str) -> Any:
        """The next value, or `StopIteration` when all workers have come to their end. Those who end early count no longer."""
        described = self._iteration()
        what = f"{self._cls.__name__}.__next__"
        answers = self._gang.ask("advance", [(iterator, self._key)] * self._num_workers, what)
        metas = self._told(what, lambda: self._gang.wait(answers, described.timeout))
        going = [answer for answer, meta in zip(answers, metas, strict=True) if not meta.stopped]
        if not going:
            raise StopIteration
        alone = self._num_workers == 1 and described.collect == "none"
        mesh = self._mesh if len(going) == self._num_workers else None
        return self._give(going, described, mesh, what, "first" if alone else described.collect)

    def _iteration(self) -> RemoteMethod:
        described = described_methods(self._cls)
        return described.get("__next__") or described.get("__iter__") or ITERATION

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of {self._cls.__name__} is on its workers and is no remote_function; those are: "
            f"{', '.join(described_methods(self._cls)) or 'none'}"
        )

    def __reduce__(self) -> Any:
        raise ConfigError(f"a remote {self._cls.__name__} cannot be sent to another worker: pass what its methods give (lazily, if large)")

    def __repr__(self) -> str:
        return f"<{self._cls.__name__} on {self._num_workers} worker(s)>"


def place(cls: type, remote_group: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RemoteObject:
    """An object of `cls` on each worker of the group, or on its first."""
    runtime = current_runtime()
    assert runtime.ray is not None, "asked for in ray mode only"
    gang = runtime.ray.gang(remote_group)
    num_workers = 1 if getattr(cls, CLASS_MARK) == "first" else gang.world_size
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, DeviceMesh)]
    mesh = given[0] if given else runtime.global_device_mesh
    runtime.ray.check_mesh(remote_group, mesh if num_workers > 1 else None, cls.__name__)
    usable = mesh if mesh is not None and mesh.world_size == num_workers else None
    made = _type_for(cls)(cls, runtime.ray, gang, num_workers, usable)
    made._construct(args, kwargs)
    return made


@functools.cache
def _type_for(cls: type) -> type[RemoteObject]:
    special = {name: described for name, described in SPECIAL.items() if hasattr(cls, name)}
    methods = {**special, **described_methods(cls)}
    members: dict[str, Any] = {name: _method(cls, name, described) for name, described in methods.items()}
    members.update({"__doc__": cls.__doc__, "__module__": cls.__module__})
    if hasattr(cls, "__iter__"):
        members["__iter__"] = RemoteObject._iterate
    if hasattr(cls, "__next__"):
        members["__next__"] = lambda self: self._advance("")
    return type(cls.__name__, (RemoteObject,), members)


def _method(cls: type, name: str, described: RemoteMethod) -> Callable[..., Any]:
    function = inspect.unwrap(getattr(cls, name))

    @functools.wraps(function)
    def call(self: RemoteObject, *args: Any, **kwargs: Any) -> Any:
        return self._call(name, described, args, kwargs)

    return call


def _parts(value: Any) -> Any:
    return value.parts() if isinstance(value, LazyCollect) else value
