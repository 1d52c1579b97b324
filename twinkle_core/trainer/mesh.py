"""How `resources` ask a model to be spread over its workers, and what of it cannot work. Imports no torch.

Everything that can be known from the settings, or from the base model's config.json, is refused here, before a worker is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle_core.config import ResourcesConfig, TrainConfig
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError, DataError

SIZES = ("fsdp", "tp", "cp", "ulysses", "ep")
RECURRENT = "recurrent layers"
SPREAD_EXPERTS = ("qwen3_moe",)
"""Model types whose experts can be spread over ranks (`model.parallel.expert_parallel.KNOWN`)."""


def mesh_of(resources: ResourcesConfig) -> DeviceMesh | None:
    """The mesh of the workers; None where each holds the whole model and rows of its own.

    Raises `ConfigError` for sizes that do not make up the workers, or that do not go together.
    """
    r = resources
    if all(getattr(r, name) == 1 for name in SIZES):
        return None
    inner = r.fsdp * r.cp * r.tp
    if r.workers % inner:
        raise ConfigError(
            f"resources.workers {r.workers} is not a multiple of fsdp {r.fsdp} x cp {r.cp} x tp {r.tp} = {inner}: "
            f"set resources.workers to {-(-r.workers // inner) * inner}, or smaller sizes"
        )
    from twinkle_core.model.parallel.layout import Layout  # its package takes a while, and most runs ask for no mesh

    mesh: Any = DeviceMesh.from_sizes(
        world_size=r.workers,
        dp_size=r.workers // inner,
        fsdp_size=r.fsdp,
        cp_size=r.cp,
        tp_size=r.tp,
        ulysses_size=r.ulysses if r.ulysses > 1 else None,
        ep_size=r.ep if r.ep > 1 else None,
    )
    Layout.of(mesh)
    made: DeviceMesh = mesh
    return made


def num_data_ranks(resources: ResourcesConfig) -> int:
    """Parts that a batch is cut into: workers that share rows count once."""
    mesh = mesh_of(resources)
    return resources.workers if mesh is None else mesh.data_world_size


def check_resources(resources: ResourcesConfig, train: TrainConfig) -> None:
    """Raises `ConfigError` for forms that the settings alone rule out."""
    mesh_of(resources)
    if resources.tp > 1 and resources.memory_efficient_init and train.lora is not None:
        raise ConfigError(
            f"resources.tp {resources.tp} with an adapter needs the base model's weights: set resources.memory_efficient_init to false"
        )
    if resources.cpu_offload and resources.fsdp == 1:
        raise ConfigError("resources.cpu_offload keeps shards in the CPU's memory: set resources.fsdp above 1")
    if resources.memory_efficient_init and not any(getattr(resources, name) > 1 for name in ("fsdp", "tp", "ep")):
        raise ConfigError("resources.memory_efficient_init lets each worker read its own part: set resources.fsdp, tp or ep above 1")


def check_model(resources: ResourcesConfig, config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for forms that the model of a config.json does not have."""
    r, kind = resources, config.get("model_type")
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    heads = text.get("num_attention_heads")
    numbers = {"attention heads": heads, "key-value heads": text.get("num_key_value_heads") or heads}
    for name, size, counted in (("ulysses", r.ulysses, ("attention heads",)), ("tp", r.tp, tuple(numbers))):
        for what in counted:
            number = numbers[what]
            if isinstance(number, int) and number % size:
                raise ConfigError(f"resources.{name} {size} does not divide the {number} {what} of the base model ('{kind}')")
    if r.ep > 1:
        experts = text.get("num_experts")
        if kind not in SPREAD_EXPERTS:
            raise ConfigError(f"resources.ep {r.ep} is for models with experts ({', '.join(SPREAD_EXPERTS)}); the base model is '{kind}'")
        if isinstance(experts, int) and experts % r.ep:
            raise ConfigError(f"resources.ep {r.ep} does not divide the {experts} experts of the base model ('{kind}')")
    for name, size in (("cp", r.cp), ("ulysses", r.ulysses)):
        if size > 1 and (why := _needs_whole_rows(text, is_ring=name == "cp")):
            instead = "resources.fsdp" if why == RECURRENT else "resources.ulysses"
            raise ConfigError(f"resources.{name} {size}: the base model ('{kind}') has {why}, which it does not compute; use {instead}")


def _needs_whole_rows(text: Mapping[str, Any], *, is_ring: bool) -> str | None:
    """What of a model's layers is not computed on parts of a row: as `ulysses.check_supported` and `ring.check_supported` find it."""
    layers = text.get("layer_types") or ()
    if "linear_attention" in layers:
        return RECURRENT
    found = {
        "attention dropout": text.get("attention_dropout"),
        "sliding-window layers": "sliding_attention" in layers,
        "soft-capped attention": text.get("attn_logit_softcapping") is not None,
        "latent attention": text.get("kv_lora_rank") is not None,
    }
    return next((what for what, is_there in found.items() if is_there), None) if is_ring else None


def read_model_config(folder: Path) -> dict[str, Any] | None:
    """The base model's config.json; None where the folder has none (a .gguf file, weights that are still to be converted)."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    return config
