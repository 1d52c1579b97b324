"""Reserving the cores and GPUs of a gang of workers, or saying what is needed and what is free. Imports Ray."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from twinkle_core.errors import ConfigError

RESOURCES = {"cuda": "GPU", "npu": "NPU"}
"""Device type -> what Ray calls it."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Reserved bundles, one a worker."""

    group: PlacementGroup
    """Ray's reservation."""
    bundle: dict[str, float]
    """Resource -> amount for each worker."""
    bundles: tuple[int, ...]
    """Bundle of each rank: ranks of one node follow each other."""

    def release(self) -> None:
        if ray.is_initialized():
            remove_placement_group(self.group)


def reserve(workers: int, bundle: dict[str, float], *, timeout_seconds: float, may_grow: bool, name: str = "") -> Room:
    """Waits for the bundles. `may_grow` False: this Ray never gets larger, so that waiting for more than it has is of no use.

    Raises `ConfigError` with what is needed and free.
    """
    group = placement_group([bundle] * workers, strategy="PACK")
    needed = {resource: amount * workers for resource, amount in bundle.items()}
    total = ray.cluster_resources()
    if not may_grow and any(total.get(resource, 0.0) < amount for resource, amount in needed.items()):
        timeout_seconds = 0.0
    try:
        if group.wait(timeout_seconds):
            return Room(group=group, bundle=bundle, bundles=_by_node(group, workers))
    except BaseException:
        remove_placement_group(group)
        raise
    free = ray.available_resources()
    remove_placement_group(group)
    amounts = ", ".join(
        f"{resource}: {amount:g} needed ({workers} x {bundle[resource]:g}), "
        f"{free.get(resource, 0.0):g} free of {total.get(resource, 0.0):g}"
        for resource, amount in needed.items()
    )
    raise ConfigError(
        f"no room for {workers} workers{f' of group {name!r}' if name else ''} after {timeout_seconds:g} s: {amounts}. "
        "Ask for fewer workers or cores, end what holds them, or raise placement_timeout_seconds"
    )


def _by_node(group: PlacementGroup, workers: int) -> tuple[int, ...]:
    nodes = placement_group_table(group).get("bundles_to_node_id", {})
    first: dict[str | None, int] = {}
    for index in range(workers):
        first.setdefault(nodes.get(index), index)
    return tuple(sorted(range(workers), key=lambda index: (first[nodes.get(index)], index)))
