"""Filling a sharded model with weights: each rank reads its own slices of the files, or rank 0 sends them. Imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError, DamagedError, TwinkleError
from twinkle_core.model.loading import load_base
from twinkle_core.model.parallel.whole_tensors import local_slices

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name → safetensors file that has it; empty where the folder's weights have another form."""
    base = Path(folder)
    if (base / INDEX_FILE).is_file():
        return {name: base / file for name, file in json.loads((base / INDEX_FILE).read_text())["weight_map"].items()}
    if not (base / SINGLE_FILE).is_file():
        return {}
    with safe_open(base / SINGLE_FILE, "pt") as file:
        return dict.fromkeys(file.keys(), base / SINGLE_FILE)


def fill(model: PreTrainedModel, folder: str | Path, device: torch.device) -> None:
    """Gives every parameter that has no memory yet its slice of the weights in `folder`, on `device`. Collective.

    Read slice by slice where the files hold the model's own names; older or per-expert names need transformers' reader, on rank 0.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if any(".base_layer." in name for name in empty):
        raise ConfigError("memory_efficient_init fills the base model before an adapter is added: add the adapter afterwards")
    files = weight_files(folder)
    if all(name in files for name in empty):
        fill_from_files(model, files, device)
    else:
        fill_from_rank_0(model, folder, device)


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


def fill_from_rank_0(model: PreTrainedModel, folder: str | Path, device: torch.device) -> None:
    """Rank 0 reads the whole model, in any form that transformers knows, and sends one tensor at a time. Collective.

    What rank 0 raises is raised on every rank.
    """
    whole: dict[str, torch.Tensor] = {}
    errors: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            whole = {name: parameter.detach() for name, parameter in load_base(folder, torch.device("cpu")).named_parameters()}
        except (OSError, TwinkleError) as error:
            errors = [error]
    dist.broadcast_object_list(errors, src=0)
    if errors[0] is not None:
        raise errors[0]

    def receive(name: str, parameter: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if whole:
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
