"""Drawing which ranks are in which group, and what they do in its meshes. Pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinkle_core.device_mesh import DeviceGroup, DeviceMesh, place_ranks
from twinkle_core.infra.runtime import current_runtime


def get_device_placement(device_group: DeviceGroup | Sequence[DeviceGroup] | None = None) -> str:
    """A drawing of what `initialize` was given, and of the components placed since: groups, their workers, and their meshes by rank.

    `device_group`: the groups to draw in place of those of `initialize`.
    """
    runtime = current_runtime()
    meshes = dict(runtime.ray.meshes) if runtime.ray is not None else {}
    if device_group is not None:
        groups = [device_group] if isinstance(device_group, DeviceGroup) else list(device_group)
        return draw_groups(runtime.mode, groups, runtime.global_device_mesh, meshes)
    if not runtime.groups:
        lines = [f"{runtime.mode}: {runtime.process.world_size} process(es), this one is rank {runtime.process.rank}"]
        return "\n".join(lines + draw_mesh(runtime.global_device_mesh))
    return draw_groups(runtime.mode, runtime.groups, runtime.global_device_mesh, meshes)


def draw_groups(
    mode: str, groups: Sequence[DeviceGroup], global_mesh: DeviceMesh | None, meshes: Mapping[tuple[str, str], DeviceMesh | None]
) -> str:
    """`meshes`: (group, component) -> its mesh."""
    lines = [mode]
    for name, ranks in place_ranks(groups).items():
        group = next(group for group in groups if group.name == name)
        lines.append(f"+- group {name!r}: {group.num_workers} worker(s) on {group.device_type} {_spans(ranks)}")
        mine = {component: mesh for (owner, component), mesh in meshes.items() if owner == name}
        for component, mesh in mine.items() or {"(nothing placed)": global_mesh}.items():
            lines.append(f"|  +- {component}")
            lines += [f"|  |  {line}" for line in draw_mesh(mesh)]
    return "\n".join(lines)


def draw_mesh(mesh: DeviceMesh | None) -> list[str]:
    """One line for the sizes and one for each rank."""
    if mesh is None:
        return []
    sizes = " x ".join(f"{axis} {mesh.get_dim_size(axis)}" for axis in mesh.mesh_dim_names)
    folds = [f"{name} {size}" for name, size in (("ulysses", mesh.ulysses_size), ("ep", mesh.ep_size), ("vpp", mesh.vpp_size)) if size]
    lines = [f"mesh {sizes}{' (' + ', '.join(folds) + ')' if folds else ''}"]
    for rank in range(mesh.world_size):
        seen = mesh.at_rank(rank)
        place = " ".join(f"{axis}={getattr(seen, f'{axis}_rank')}" for axis in mesh.mesh_dim_names)
        lines.append(f"rank {rank}: data={seen.data_rank} {place}{'' if seen.ep_rank is None else f' ep={seen.ep_rank}'}")
    return lines


def _spans(ranks: Sequence[int]) -> str:
    """'0-3, 6' for 0, 1, 2, 3, 6."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
