"""Which worker gets what, and what becomes of their answers. Pure functions of lists.

Dispatch concerns the first argument of a call, a sequence; the other arguments go to every worker as they are.

Example with 2 workers and the items `[a, b, c, d, e]`: `slice` gives `[a, b, c]` and `[d, e]`, `round_robin` gives
`[a, c, e]` and `[b, d]`. Every item goes to exactly one worker; a worker may get none, and is called all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from twinkle_core.errors import ConfigError


def split_slices(items: Sequence[Any], num_workers: int) -> list[list[Any]]:
    """Consecutive shares, one a worker; the first `len(items) % num_workers` are one longer."""
    _check_workers(num_workers)
    size, longer = divmod(len(items), num_workers)
    starts = [rank * size + min(rank, longer) for rank in range(num_workers + 1)]
    return [list(items[starts[rank] : starts[rank + 1]]) for rank in range(num_workers)]


def round_robin(items: Sequence[Any], num_workers: int) -> list[list[Any]]:
    """Worker r gets items r, r + num_workers, …"""
    _check_workers(num_workers)
    return [list(items[rank::num_workers]) for rank in range(num_workers)]


def split_arguments(args: tuple[Any, ...], dispatch: str, num_workers: int) -> list[tuple[Any, ...]]:
    """The arguments of each worker, by the name of the dispatch: `all`, `slice` or `round_robin`."""
    if dispatch == "all":
        _check_workers(num_workers)
        return [args] * num_workers
    if dispatch not in SPLITS:
        raise ConfigError(f"dispatch is {dispatch!r}; known: all, {', '.join(SPLITS)}")
    if not args or not isinstance(args[0], Sequence) or isinstance(args[0], (str, bytes)):
        raise ConfigError(f"dispatch {dispatch!r} splits the first argument, which must be a sequence; got {args[:1]!r}")
    return [(share, *args[1:]) for share in SPLITS[dispatch](args[0], num_workers)]


def collect_results(results: Sequence[Any], collect: str) -> Any:
    """One value from the workers' answers, which come in rank order.

    `none`: the list itself. `first`: worker 0's. `flatten`: their lists, concatenated. `sum`, `mean`: of numbers, or
    of equally long tuples of numbers, element by element.
    """
    if collect not in COLLECTS:
        raise ConfigError(f"collect is {collect!r}; known: {', '.join(COLLECTS)}")
    return COLLECTS[collect](results)


def _flatten(results: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for result in results for item in result]


def _sum(results: Sequence[Any]) -> Any:
    if isinstance(results[0], tuple):
        return tuple(sum(values) for values in zip(*results, strict=True))
    return sum(results)


def _mean(results: Sequence[Any]) -> Any:
    total = _sum(results)
    return tuple(value / len(results) for value in total) if isinstance(total, tuple) else total / len(results)


def _check_workers(num_workers: int) -> None:
    if num_workers < 1:
        raise ConfigError(f"num_workers is {num_workers}; at least one worker is needed")


SPLITS: Mapping[str, Callable[[Sequence[Any], int], list[list[Any]]]] = MappingProxyType(
    {"slice": split_slices, "round_robin": round_robin}
)
COLLECTS: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {"none": list, "first": lambda results: results[0], "flatten": _flatten, "sum": _sum, "mean": _mean}
)
