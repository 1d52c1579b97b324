"""A user's own class on workers: `remote_class` and `remote_function`. Imports no Ray until an object is placed on it.

    @remote_class(execute="all")
    class Scorer:
        def __init__(self, scale: float) -> None: ...

        @remote_function(dispatch="slice", collect="flatten")
        def score(self, texts: list[str]) -> list[float]: ...

    scorer = Scorer(2.0, remote_group="scorers")

In local mode `scorer` is a plain `Scorer` and `remote_group` only has to name a known group. In ray mode it is a `RemoteObject`, whose
methods are those marked here; each worker of the group holds a `Scorer`. Nothing is keyed by where the script creates it.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.dispatch import COLLECTS, DISPATCHES, EXECUTES, Collect, Dispatch
from twinkle_core.infra.notify import notified
from twinkle_core.infra.runtime import current_runtime
from twinkle_core.infra.state import STATE

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__remote_method__"
CLASS_MARK = "__remote_execute__"


@dataclass(frozen=True, kw_only=True)
class RemoteMethod:
    """How a method is called on workers. `remote_function` makes and checks it."""

    dispatch: Dispatch = "slice"
    """How its batches are shared out; see `batches` for what is a batch."""
    execute: str = "all"
    """'all' or 'peer': every worker that holds the object. 'first': worker 0."""
    collect: Collect = "none"
    """What becomes of the answers."""
    sync: bool = False
    """Whether a call returns only when all workers are done, also where its result is lazy."""
    lazy_collect: bool | None = None
    """Whether a call gives a `LazyCollect`; None: as `initialize` says."""
    timeout: float | None = None
    """Seconds after which a call that is waited for fails."""
    min_items: int = 0
    """Items of a batch that every worker needs; fewer are refused."""


def remote_function(
    dispatch: Dispatch = "slice",
    execute: str = "all",
    collect: Collect = "none",
    *,
    sync: bool = False,
    lazy_collect: bool | None = None,
    timeout: float | None = None,
    min_items: int = 0,
) -> Callable[[Function], Function]:
    """Marks a method that can be called on workers; see `RemoteMethod`. In this process it stays a plain method."""
    _check("dispatch", dispatch, DISPATCHES)
    _check("execute", execute, EXECUTES)
    _check("collect", collect, tuple(COLLECTS))
    if timeout is not None and timeout <= 0:
        raise ConfigError(f"timeout is {timeout}; seconds above 0 are needed")
    described = RemoteMethod(
        dispatch=dispatch,
        execute=execute,
        collect=collect,
        sync=sync,
        lazy_collect=lazy_collect,
        timeout=timeout,
        min_items=min_items,
    )

    def mark(function: Function) -> Function:
        marked = notified(function)
        setattr(marked, MARK, described)
        return marked

    return mark


def remote_class(execute: str = "all") -> Callable[[Class], Class]:
    """Lets objects of a class be placed on workers by `remote_group=`; `execute`: on 'all' of the group (or 'peer'), or its 'first'.

    Gives a class of the same name that derives from the decorated one. A constructor that takes `device_mesh` is given the one that
    the caller names, else the global one; in a worker it is bound to the worker's rank.
    """
    _check("execute", execute, EXECUTES)

    def decorate(cls: Class) -> Class:
        if isinstance(cls, RemoteType) and CLASS_MARK in vars(cls):
            raise ConfigError(f"{cls.__name__} is a remote_class already")
        if isinstance(cls, RemoteType):  # derived from a remote class: it has all that is needed
            setattr(cls, CLASS_MARK, execute)
            return cls
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, CLASS_MARK: execute}
        made: Any = _metaclass_for(type(cls))(cls.__name__, (cls,), named)
        return made  # type: ignore[no-any-return]

    return decorate


class RemoteType(type):
    """The class of remote classes: decides, when an object is made, where it lives."""

    def __call__(cls, *args: Any, remote_group: str | None = None, **kwargs: Any) -> Any:
        if STATE.in_worker:
            return super().__call__(*args, **kwargs)
        runtime = current_runtime()
        if remote_group is not None and runtime.groups:
            runtime.group(remote_group)
        takes_mesh = "device_mesh" in inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if takes_mesh and kwargs.get("device_mesh") is None and not any(isinstance(value, DeviceMesh) for value in args):
            kwargs["device_mesh"] = runtime.global_device_mesh
        if runtime.ray is None or remote_group is None:
            return super().__call__(*args, **kwargs)
        from twinkle_core.infra.remote_object import place

        return place(cls, remote_group, args, kwargs)


class RemoteABC(RemoteType, ABCMeta):
    """`RemoteType` of abstract classes."""


def _metaclass_for(meta: type) -> Any:
    if meta is type:
        return RemoteType
    if meta is ABCMeta:
        return RemoteABC
    return type(f"Remote{meta.__name__}", (RemoteType, meta), {})


def described_methods(cls: type) -> dict[str, RemoteMethod]:
    """The methods that can be called on workers, by name."""
    found = {name: getattr(inspect.getattr_static(cls, name), MARK, None) for name in dir(cls)}
    return {name: described for name, described in found.items() if described is not None}


def _check(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known and not (callable(value) and name != "execute"):
        raise ConfigError(f"{name} is {value!r}; known: {', '.join(known)}{'' if name == 'execute' else ', or a callable'}")
