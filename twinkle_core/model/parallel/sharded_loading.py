"""Filling a sharded model with weights: each rank reads its own slices of the files, or rank 0 sends them. Imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twinkle_core.errors import ConfigError, DamagedError
from twinkle_core.kernel import packed_attention
from twinkle_core.model.loading import refuse_quantized
from twinkle_core.model.parallel.whole_tensors import local_slices

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def build_empty(folder: str | Path) -> PreTrainedModel:
    """The model of the folder's config in training mode: parameters without memory, buffers real, tied weights one parameter."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    refuse_quantized(config, folder)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=packed_attention.register(), trust_remote_code=False
        )
    model.tie_weights()  # type: ignore[no-untyped-call]  # the context gave each name a parameter of its own
    packed_attention.check_supported(type(model), model.config)
    model.config.use_cache = False
    model.train()
    return model


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name → safetensors file that has it; empty where the folder's weights have another form."""
    base = Path(folder)
    if (base / INDEX_FILE).is_file():
        return {name: base / file for name, file in json.loads((base / INDEX_FILE).read_text())["weight_map"].items()}
    if not (base / SINGLE_FILE).is_file():
        return {}
    with safe_open(base / SINGLE_FILE, "pt") as file:
        return dict.fromkeys(file.keys(), base / SINGLE_FILE)


def names_match(model: PreTrainedModel, files: Mapping[str, Path]) -> bool:
    """Whether the files hold each parameter under the model's own name; older or per-expert names need transformers' reader."""
    return all(name in files for name, _ in model.named_parameters())


def fill_from_files(model: PreTrainedModel, files: Mapping[str, Path], device: torch.device) -> None:
    """Gives every empty parameter its slice, read from `files`; nothing else is read. Raises `DamagedError` naming a bad file or tensor."""

    def read(name: str, parameter: torch.Tensor) -> torch.Tensor:
        with safe_open(files[name], "pt") as file:
            stored = file.get_slice(name)
            if list(stored.get_shape()) != list(parameter.shape):
                raise DamagedError(f"{files[name]}: {name} is {list(stored.get_shape())}, the model has {list(parameter.shape)}")
            part: torch.Tensor = stored[local_slices(parameter)]
        return part

    _fill(model, read, device)


def fill_from_rank_0(model: PreTrainedModel, whole: Mapping[str, torch.Tensor] | None, device: torch.device) -> None:
    """Gives every empty parameter its slice of what rank 0 has (`whole` is None elsewhere), one tensor at a time. Collective."""

    def receive(name: str, parameter: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if whole is not None:
            buffer.copy_(whole[name])
        dist.broadcast(buffer, src=0)
        return buffer[local_slices(parameter)].clone()

    _fill(model, receive, device)


def _fill(model: PreTrainedModel, part_of: Callable[[str, torch.Tensor], torch.Tensor], device: torch.device) -> None:
    holders: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, key))
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        part = part_of(name, parameter).to(device, parameter.dtype).contiguous()
        whole: torch.Tensor = part
        if isinstance(parameter, DTensor):
            mesh, places = parameter.device_mesh, parameter.placements
            whole = DTensor.from_local(part, mesh, places, run_check=False, shape=parameter.shape, stride=parameter.stride())
        filled = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for module, key in holders[id(parameter)]:
            module._parameters[key] = filled
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None:
                if value.is_meta:
                    raise ConfigError(f"buffer {key} of {type(module).__name__} has no value before the weights are read")
                module._buffers[key] = value.to(device)
