"""Results of workers as arguments for other workers, fetched there and only as far as they are needed. Imports Ray when used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.infra.batches import Arguments, Split
from twinkle_core.infra.dispatch import Collect, collect_results, collected_ranks


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The answers of the workers that were called, in rank order, and what is to become of them."""

    values: tuple[Any, ...]
    """Ray references of the results."""
    metas: tuple[Any, ...]
    """Ray references of their `Meta`."""
    collect: Collect
    """See `dispatch.Collect`."""
    mesh: DeviceMesh | None
    """Of the workers that gave them."""


class FlatParts:
    """The flattened list of all parts, of which a slice fetches only the parts it lies in."""

    def __init__(self, references: Sequence[Any], lengths: Sequence[int]) -> None:
        self._references = references
        self._lengths = lengths

    @property
    def shape(self) -> tuple[int]:
        """As an array's: makes it a batch for `Split`."""
        return (sum(self._lengths),)

    def __getitem__(self, part: slice) -> list[Any]:
        import ray

        wanted = range(self.shape[0])[part]
        start, found = 0, {}
        for reference, length in zip(self._references, self._lengths, strict=True):
            here = [index for index in wanted if start <= index < start + length]
            if here:
                items = ray.get(reference)
                found.update({index: items[index - start] for index in here})
            start += length
        return [found[index] for index in wanted]


def fetch(parts: Parts) -> Any:
    """The collected value. Fetches the answers that the collect reads, no others."""
    import ray

    if callable(parts.collect):
        return collect_results(ray.get(list(parts.values)), parts.collect, parts.mesh)
    wanted = set(collected_ranks(parts.collect, len(parts.values), parts.mesh))
    got = [ray.get(value) if rank in wanted else None for rank, value in enumerate(parts.values)]
    return collect_results(got, parts.collect, parts.mesh)


def _open(value: Any) -> Any:
    """A batch that can be sliced without fetching all of it, where `value` is one; the value that it stands for, if it is `Parts`."""
    import ray

    if not isinstance(value, Parts):
        return value
    metas = ray.get(list(value.metas))
    if value.collect != "flatten":
        return fetch(value)
    chosen = collected_ranks("flatten", len(value.values), value.mesh)
    if any(metas[rank].length is None for rank in chosen):
        return fetch(value)
    return FlatParts([value.values[rank] for rank in chosen], [metas[rank].length for rank in chosen])


def _close(value: Any) -> Any:
    return value[:] if isinstance(value, FlatParts) else value


def resolve(args: Sequence[Any], kwargs: dict[str, Any], split: Split | None, rank: int) -> Arguments:
    """The arguments of worker `rank`, each `Parts` replaced by the value it stands for; shared out where `split` is given."""
    if split is None:
        return tuple(args), kwargs
    opened = [_open(value) for value in args], {name: _open(value) for name, value in kwargs.items()}
    if callable(split.dispatch):
        opened = [_close(value) for value in opened[0]], {name: _close(value) for name, value in opened[1].items()}
    shared = split.share(rank, *opened)
    return tuple(map(_close, shared[0])), {name: _close(value) for name, value in shared[1].items()}
