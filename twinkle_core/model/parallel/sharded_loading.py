"""Filling a sharded model with weights: each rank reads its own slices of the files, or rank 0 sends them. Imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError, DamagedError
from twinkle_core.model.loading import load_base
from twinkle_core.model.parallel.agreement import together
from twinkle_core.model.parallel.whole_tensors import local_slices

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name → safetensors file that has it; empty where the folder's weights have another form. Raises `DamagedError`."""
    base = Path(folder)
    try:
        if (base / INDEX_FILE).is_file():
            return {name: base / file for name, file in json.loads((base / INDEX_FILE).read_text())["weight_map"].items()}
        if not (base / SINGLE_FILE).is_file():
            return {}
        with safe_open(base / SINGLE_FILE, "pt") as file:
            return dict.fromkeys(file.keys(), base / SINGLE_FILE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DamagedError(f"the list of tensors in {base} cannot be read ({error!r}): fetch the model again") from error


def fill(model: PreTrainedModel, folder: str | Path, device: torch.device) -> None:
    """Gives every parameter that has no memory yet its slice of the weights in `folder`, on `device`. Collective.

    Read slice by slice where the files hold the model's own names; older or per-expert names need transformers' reader, on rank 0.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if any(".base_layer." in name for name in empty):
        raise ConfigError("memory_efficient_init fills the base model before an adapter is added: add the adapter afterwards")
    with together(dist.get_world_size()):
        files = weight_files(folder)
    if all(name in files for name in empty):
        fill_from_files(model, files, device)
    else:
        fill_from_rank_0(model, folder, device)


def fill_from_files(model: PreTrainedModel, files: Mapping[str, Path], device: torch.device) -> None:
    """Gives every empty parameter its slice, read from `files`; nothing else is read. Collective.

    Raises `DamagedError` naming a bad file or tensor, on every rank.
    """

    def read(name: str, parameter: torch.Tensor) -> torch.Tensor:
        try:
            with safe_open(files[name], "pt") as file:
                stored = file.get_slice(name)
                shape = list(stored.get_shape())
                part: torch.Tensor | None = stored[local_slices(parameter)] if shape == list(parameter.shape) else None
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"{files[name]}: {name} cannot be read ({error}): fetch the model again") from error
        if part is None:
            raise DamagedError(f"{files[name]}: {name} is {shape}, the model has {list(parameter.shape)}")
        return part

    with together(dist.get_world_size()):
        _fill(model, read, device)


def fill_from_rank_0(model: PreTrainedModel, folder: str | Path, device: torch.device) -> None:
    """Rank 0 reads the whole model, in any form that transformers knows, and sends one tensor at a time. Collective.

    What rank 0 raises is raised on every rank.
    """
    whole: dict[str, torch.Tensor] = {}
    with together(dist.get_world_size()):
        if dist.get_rank() == 0:
            whole = {name: parameter.detach() for name, parameter in load_base(folder, torch.device("cpu")).named_parameters()}
            missing = sorted({name for name, parameter in model.named_parameters() if parameter.is_meta} - whole.keys())
            if missing:
                raise ConfigError(f"memory_efficient_init finds no {missing[0]} in {folder}: set it to False")

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
