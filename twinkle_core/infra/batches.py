"""Splitting the arguments of a call of a user's method: which of them are batches, and each worker's share. Pure.

A batch is a list, an array or tensor with a first axis, or a dict whose values are all such. Tuples, strings, numbers and
other objects are settings and go to every worker whole. All batches of one call have the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.dispatch import Dispatch, worker_slices

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the arguments of one call are shared out."""

    dispatch: Dispatch
    """See `dispatch.Dispatch`."""
    num_workers: int
    """Workers that are called."""
    mesh: DeviceMesh | None = None
    """For `slice_dp` and callables."""
    min_items: int = 0
    """Fewer items than this for any worker are refused."""
    what: str = "the call"
    """'Class.method', for errors."""

    def share(self, worker: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of one worker. Raises `ConfigError` for lengths that differ and for too short a share."""
        if callable(self.dispatch):
            shared = self.dispatch(self.num_workers, worker, tuple(args), dict(kwargs), device_mesh=self.mesh)
            return tuple(shared[0]), dict(shared[1])
        lengths = {} if self.dispatch == "all" else self._lengths(args, kwargs)
        if not lengths:
            worker_slices(self.dispatch, 0, self.num_workers, self.mesh)  # refuses an unknown name, and a mesh that does not fit
            return tuple(args), dict(kwargs)
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ConfigError(
                f"{self.what} splits its batches ({self.dispatch}), whose lengths differ: {shown}. "
                "Pass settings as tuples, or use dispatch 'all'"
            )
        total = next(iter(lengths.values()))
        parts = worker_slices(self.dispatch, total, self.num_workers, self.mesh)
        sizes = [len(range(total)[part]) for part in parts]
        if min(sizes) < self.min_items:
            raise ConfigError(
                f"{self.what} needs at least {self.min_items} item(s) for each worker; {total} on {self.num_workers} workers "
                f"are {', '.join(map(str, sizes))}: give more, or use fewer workers"
            )
        part = parts[worker]
        return tuple(take(value, part) for value in args), {name: take(value, part) for name, value in kwargs.items()}

    def _lengths(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        named = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
        return {name: length for name, value in named.items() if (length := batch_length(value, f"{self.what}: {name}")) is not None}


def batch_length(value: Any, what: str = "a batch") -> int | None:
    """Number of items; None for what is no batch."""
    if isinstance(value, list):
        return len(value)
    if isinstance(value, dict) and value:
        lengths = {batch_length(column, what) for column in value.values()}
        if None in lengths:
            return None
        if len(lengths) > 1:
            raise ConfigError(f"{what} is a dict of columns of different lengths: {', '.join(map(str, sorted(filter(None, lengths))))}")
        return lengths.pop()
    shape = getattr(value, "shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and shape else None


def take(value: Any, part: slice) -> Any:
    """The part of a batch; what is no batch, whole."""
    if batch_length(value) is None:
        return value
    return {name: take(column, part) for name, column in value.items()} if isinstance(value, dict) else value[part]
