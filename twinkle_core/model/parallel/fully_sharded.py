"""Parameters sharded over ranks and gathered a decoder layer at a time, with torch's FSDP2. Imports torch.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. Gradients are summed over ranks, never averaged: whoever
knows the loss weight of the whole batch divides, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """How parameters are sharded; `fsdp_config` of `TransformersModel` has these keys."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """The type that layers are gathered and computed in. Shards, gradients and their sums stay float32."""
    cpu_offload: bool = False
    """Shards, gradients and optimizer state live in the CPU's memory and visit the device a layer at a time."""
    reshard_after_forward: bool = True
    """False keeps a layer whole from forward to backward: more memory, one gathering less."""
    activation_checkpointing: Literal["no", "full", "selective"] = "no"
    """'full' computes every decoder layer again in the backward pass, 'selective' every `checkpoint_every`-th."""
    checkpoint_every: int = 2
    """'selective' alone: 2 computes layers 0, 2, 4, … again."""
    memory_efficient_init: bool = False
    """Each rank reads only its own slices of the weights; without it, every rank reads the model whole, then drops the rest."""

    def __post_init__(self) -> None:
        if self.mixed_precision not in DTYPES:
            raise ConfigError(f"mixed_precision is {self.mixed_precision!r}; known: {', '.join(DTYPES)}")
        if self.activation_checkpointing not in ("no", "full", "selective"):
            raise ConfigError(f"activation_checkpointing is {self.activation_checkpointing!r}; known: no, full, selective")
        if self.checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every is {self.checkpoint_every}; at least 1 is needed")


def settings_from(fsdp_config: Mapping[str, Any] | None, mixed_precision: str, memory_efficient_init: bool) -> ShardingSettings:
    """Settings from the arguments of `TransformersModel`. Raises `ConfigError` naming an unknown key, and the known ones.

    With LoRA and 'bf16', the model computes under autocast anyway; gathering in bf16 halves what is sent.
    """
    known = {field.name for field in fields(ShardingSettings)} - {"mixed_precision", "memory_efficient_init"}
    given = dict(fsdp_config or {})
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f"fsdp_config has {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return ShardingSettings(
        mixed_precision=mixed_precision,  # type: ignore[arg-type]  # checked there
        memory_efficient_init=memory_efficient_init,
        **given,
    )


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder layers, first to last: the modules that the model itself says are not to be split."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(model).__name__} names no decoder layer (_no_split_modules): it cannot be sharded a layer at a time")
    return layers


def shard_parameters(model: PreTrainedModel, mesh: DeviceMesh, settings: ShardingSettings) -> None:
    """Changes `model` in place: its parameters become DTensors of `mesh`, (replicated, sharded) or (sharded).

    Parts that are sharded already, and parameters added later, are left alone.
    """
    for layer in decoder_layers(model):
        shard_module(layer, mesh, settings)
    shard_module(model, mesh, replace(settings, reshard_after_forward=False))  # what the root holds is needed first in the backward pass
    sum_gradients(model)


def shard_module(module: torch.nn.Module, mesh: DeviceMesh, settings: ShardingSettings) -> None:
    """Gathers the parameters of `module` together, where it is called, and only then."""
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=settings.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=DTYPES[settings.mixed_precision], reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if settings.cpu_offload else OffloadPolicy(),
    )


def sum_gradients(model: torch.nn.Module) -> None:
    """Makes every sharded part of `model` add gradients over ranks. Plain sums: gloo knows no other reduction."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def checkpoint_activations(model: PreTrainedModel, settings: ShardingSettings) -> None:
    """Sets which decoder layers keep no activations. The model's own checkpointing, so that FSDP's hooks stay outside."""
    if settings.activation_checkpointing == "no":
        return
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": True})
    every = 1 if settings.activation_checkpointing == "full" else settings.checkpoint_every
    for index, layer in enumerate(decoder_layers(model)):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]
