"""The placement of a model that is spread over ranks in any of the forms of this package. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.kernel import packed_attention
from twinkle_core.model.parallel import ring, sequence, ulysses
from twinkle_core.model.parallel.expert_parallel import find_experts, spread_experts
from twinkle_core.model.parallel.fully_sharded import (
    ShardingSettings,
    checkpoint_activations,
    decoder_layers,
    settings_from,
    shard_module,
    shard_parameters,
)
from twinkle_core.model.parallel.layout import Layout, Mesh
from twinkle_core.model.parallel.sharded_gradients import ShardedGradients
from twinkle_core.model.parallel.sharded_loading import fill
from twinkle_core.model.parallel.tensor_parallel import layers_to_split, split_layers
from twinkle_core.model.parallel.whole_tensors import assign_whole, gather_whole
from twinkle_core.model.placement import Placement, Replicated


def placement_for(
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    device_mesh: Mesh | None = None,
    fsdp_config: Mapping[str, Any] | None = None,
    mixed_precision: str = "no",
    memory_efficient_init: bool = False,
) -> Placement:
    """The placement that a mesh asks for: `Replicated` for data parallelism alone, else `Spread`. Collective.

    Raises `ConfigError` for a mesh of another size, axes that no form here has, and settings that need one that is not asked for.
    """
    settings = settings_from(fsdp_config, mixed_precision, memory_efficient_init)
    if device_mesh is None:
        if fsdp_config or memory_efficient_init:
            raise ConfigError("fsdp_config and memory_efficient_init need a device_mesh that says how parameters are sharded")
        return Replicated(rank, world_size)
    layout = Layout.of(device_mesh)
    if layout.world_size != world_size:
        raise ConfigError(f"device_mesh has {layout.world_size} ranks, the group {world_size} workers: make them equal")
    if world_size == 1 or (layout.data_world_size == world_size and not layout.is_sharded and settings == ShardingSettings()):
        if settings != ShardingSettings(mixed_precision=settings.mixed_precision):
            raise ConfigError("fsdp_config and memory_efficient_init need fsdp_size, tp_size or ep_size above 1")
        return Replicated(rank, world_size)
    return Spread(rank, layout, settings, device)


class Spread:
    """A `Placement` by `layout`. The process group of all ranks is joined already; every rank makes one, with equal arguments."""

    joins_all = True

    def __init__(self, rank: int, layout: Layout, settings: ShardingSettings, device: torch.device) -> None:
        if not dist.is_initialized() or dist.get_world_size() != layout.world_size:
            there = dist.get_world_size() if dist.is_initialized() else 1
            raise ConfigError(f"the mesh has {layout.world_size} ranks, the process group {there}: make them equal")
        if not layout.shards_parameters and (settings.cpu_offload or not settings.reshard_after_forward):
            raise ConfigError("fsdp_config's cpu_offload and reshard_after_forward are for sharded parameters: set fsdp_size above 1")
        self._rank, self._layout, self._settings, self._device = rank, layout, settings, device
        self.data_rank = layout.data_rank(rank)
        self.data_world_size = layout.data_world_size
        self.leads = layout.is_first_of_slice(rank)
        self.cuts_rows = layout.sequence_size > 1
        self.takes_adapters_late = layout.size("tp") == 1
        self.needs_meta = settings.memory_efficient_init
        self._form: sequence.Form = "ring" if layout.size("cp") > 1 else "ulysses"
        self._mesh = DeviceMesh(device.type, layout.parameter_grid, mesh_dim_names=("dp", "shard", "tp"))
        expert_axes = ("ep_fsdp", "ep")
        self._expert_mesh = DeviceMesh(device.type, layout.expert_grid, mesh_dim_names=expert_axes) if layout.ep > 1 else None
        self._place_in_row, self._attention = self._join_sequence_group()

    def _join_sequence_group(self) -> tuple[int, str | None]:
        """This rank's part of each row, and the attention to use. Collective: every rank makes every group, in one order."""
        place, attention = 0, None
        if self._layout.sequence_size == 1:
            return place, attention
        for ranks in self._layout.sequence_groups:
            group = dist.new_group(ranks)
            if self._rank in ranks:
                place = ranks.index(self._rank)
                attention = (ring if self._form == "ring" else ulysses).register(group)
        return place, attention

    def check(self, model: PreTrainedModel) -> None:
        layout, config = self._layout, model.config.get_text_config()
        if layout.ulysses > 1:
            ulysses.check_supported(config, layout.ulysses)
        if layout.size("cp") > 1:
            ring.check_supported(config)
        if layout.size("tp") > 1:
            layers_to_split(model, layout.size("tp"))
        if layout.ep > 1:
            find_experts(model, layout.ep)
        if layout.shards_parameters or self._settings.activation_checkpointing != "no":
            decoder_layers(model)

    def place(self, model: PreTrainedModel, folder: Path | None) -> None:
        self.check(model)
        checkpoint_activations(model, self._settings)
        layout = self._layout
        if layout.size("tp") > 1:
            split_layers(model, self._mesh["tp"])
        if self._expert_mesh is not None:
            for module in spread_experts(model, self._expert_mesh["ep"]):
                shard_module(module, self._expert_mesh["ep_fsdp"], self._settings)
        if layout.shards_parameters:
            axes = ("dp", "shard") if layout.size("dp") > 1 else ("shard",)
            shard_parameters(model, self._mesh[axes], self._settings)
        if any(parameter.is_meta for parameter in model.parameters()):
            if folder is None:
                raise ConfigError("memory_efficient_init reads weights from a model folder; a model made from a config has none")
            fill(model, folder, self._device)
        if self._attention is not None:
            for module in model.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "_attn_implementation", None) == packed_attention.NAME:
                    config._attn_implementation = self._attention

    def gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> ShardedGradients:
        return ShardedGradients(parameters.values(), sum_plain=self._layout.size("tp") == 1)

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return gather_whole(tensors, keep=self._rank == 0)

    def scatter(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
        assign_whole(target, source)

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._attention is None:
            return batch
        return sequence.cut_batch(batch, self._form, self._layout.sequence_size, self._place_in_row)

    def own_part(self, loss_sum: float) -> float:
        """Ranks of a tensor-parallel group have the whole loss each, ranks that a row is cut over their tokens' part of it."""
        return loss_sum if self._mesh.get_local_rank("tp") == 0 else 0.0
