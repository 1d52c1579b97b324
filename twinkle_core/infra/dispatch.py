"""Which worker gets what, and what becomes of their answers. Pure functions of lists.

Example with 2 workers and the items `[a, b, c, d, e]`: `slice` gives `[a, b, c]` and `[d, e]`, `round_robin` gives
`[a, c, e]` and `[b, d]`. `slice_dp` cuts by the data ranks of a mesh, so that tensor, context, pipeline and ulysses peers get
the same share: on `DeviceMesh.from_sizes(dp_size=2, tp_size=2)` the four workers get `abc`, `abc`, `de`, `de`. `round_robin`
goes by data ranks too where a mesh is given; without one every worker is a data rank of its own. Every item goes to exactly one
data rank; a worker may get none, and is called all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError

Dispatch = str | Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
"""One of `DISPATCHES`, or `f(num_workers, worker, args, kwargs, device_mesh=mesh)`, which gives that worker's (args, kwargs)."""
Collect = str | Callable[..., Any]
"""A name of `COLLECTS`, or `f(results)`, or `f(results, device_mesh=mesh)`: one value of the workers' answers in rank order."""
Execute = Literal["first", "peer", "all"]
EXECUTES = ("first", "peer", "all")
DISPATCHES = ("all", "slice", "round_robin", "slice_dp")


def worker_slices(dispatch: str, total: int, num_workers: int, mesh: DeviceMesh | None = None) -> list[slice]:
    """The part of `total` items of each worker, by the name of the dispatch."""
    if num_workers < 1:
        raise ConfigError(f"num_workers is {num_workers}; at least one worker is needed")
    if dispatch == "all":
        return [slice(None)] * num_workers
    if dispatch == "round_robin":
        mesh = _mesh_of(mesh, num_workers, "dispatch 'round_robin'")
        return [slice(mesh.get_data_rank_from_global_rank(rank), None, mesh.data_world_size) for rank in range(num_workers)]
    if dispatch == "slice_dp":
        mesh = _mesh_of(mesh, num_workers, "dispatch 'slice_dp'")
        return [mesh.get_slice(total, mesh.get_data_rank_from_global_rank(rank)) for rank in range(num_workers)]
    if dispatch != "slice":
        raise ConfigError(f"dispatch is {dispatch!r}; known: {', '.join(DISPATCHES)}, or a callable")
    size, longer = divmod(total, num_workers)
    starts = [rank * size + min(rank, longer) for rank in range(num_workers + 1)]
    return [slice(starts[rank], starts[rank + 1]) for rank in range(num_workers)]


def split_arguments(args: tuple[Any, ...], dispatch: Dispatch, num_workers: int, mesh: DeviceMesh | None = None) -> list[tuple[Any, ...]]:
    """The arguments of each worker. Only the first, a sequence, is split; the others go to every worker as they are."""
    if callable(dispatch):
        return [dispatch(num_workers, worker, args, {}, device_mesh=mesh)[0] for worker in range(num_workers)]
    if dispatch == "all":
        return [args for _ in worker_slices("all", 0, num_workers)]
    if dispatch in DISPATCHES and (not args or not isinstance(args[0], Sequence) or isinstance(args[0], (str, bytes))):
        raise ConfigError(f"dispatch {dispatch!r} splits the first argument, which must be a sequence; got {args[:1]!r}")
    total = len(args[0]) if args else 0
    return [(list(args[0][part]), *args[1:]) for part in worker_slices(dispatch, total, num_workers, mesh)]


def collect_results(results: Sequence[Any], collect: Collect, mesh: DeviceMesh | None = None) -> Any:
    """One value from the workers' answers, which come in rank order.

    `none`: the list itself. `first`: worker 0's. `flatten`: their lists, concatenated. `sum`, `mean`: of numbers, or
    of equally long tuples of numbers, element by element. With a mesh, `flatten`, `sum` and `mean` take one answer for each
    data rank, as its peers' are the same. `last_pp`: the list of the last pipeline stage's. `last_pp_first`: the first of them.
    """
    if callable(collect):
        return collect(list(results), device_mesh=mesh) if _takes_mesh(collect) else collect(list(results))
    chosen = [results[rank] for rank in collected_ranks(collect, len(results), mesh)]
    return COLLECTS[collect](chosen)


def collected_ranks(collect: str, num_results: int, mesh: DeviceMesh | None = None) -> list[int]:
    """Whose answers the named collect reads, in order."""
    if collect not in COLLECTS:
        raise ConfigError(f"collect is {collect!r}; known: {', '.join(COLLECTS)}, or a callable")
    if collect.startswith("last_pp"):
        last = _mesh_of(mesh, num_results, f"collect {collect!r}").get_pp_last_ranks()
        return last[:1] if collect == "last_pp_first" else last
    if collect == "first":
        return [0]
    if collect == "none" or mesh is None or num_results != mesh.world_size:
        return list(range(num_results))
    return mesh.get_collect_ranks()


def _takes_mesh(function: Callable[..., Any]) -> bool:
    try:
        return "device_mesh" in inspect.signature(function).parameters
    except ValueError:  # built-in functions have no signature
        return False


def _mesh_of(mesh: DeviceMesh | None, num_workers: int, what: str) -> DeviceMesh:
    """Without a mesh every worker is a data rank of its own."""
    if mesh is None:
        return DeviceMesh.from_sizes(dp_size=num_workers)
    if mesh.world_size != num_workers:
        raise ConfigError(
            f"{what} needs a device_mesh of as many ranks as there are workers, {num_workers}; this one has {mesh.world_size}"
        )
    return mesh


def _flatten(results: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for result in results for item in result]


def _sum(results: Sequence[Any]) -> Any:
    if isinstance(results[0], tuple):
        return tuple(sum(values) for values in zip(*results, strict=True))
    return sum(results)


def _mean(results: Sequence[Any]) -> Any:
    total = _sum(results)
    return tuple(value / len(results) for value in total) if isinstance(total, tuple) else total / len(results)


def _first(results: Sequence[Any]) -> Any:
    return results[0]


COLLECTS: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {"none": list, "first": _first, "flatten": _flatten, "sum": _sum, "mean": _mean, "last_pp": list, "last_pp_first": _first}
)
