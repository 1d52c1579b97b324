"""The files of a checkpoint: safetensors and JSON, no pickle. Imports torch.

adapter_model.safetensors, adapter_config.json   an adapter, in peft's own form; or
model.safetensors                                all parameters, by the model's own names
optimizer.safetensors                            moments and step counts
rng.safetensors                                  random number generators of worker 0
training.json                                    step, optimizer and schedule settings
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from twinkle_core.errors import ConfigError, DamagedError, DataError

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
TRAINING_FILE = "training.json"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A training state at rest: CPU copies that later steps do not touch."""

    weights: dict[str, torch.Tensor]
    adapter_config: str | None
    """Text of adapter_config.json; None when all parameters are trained."""
    optimizer: dict[str, torch.Tensor]
    rng: dict[str, torch.Tensor]
    training: dict[str, Any]


def weights_file(is_adapter: bool) -> str:
    return ADAPTER_FILE if is_adapter else MODEL_FILE


def detach(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU copies."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def write_snapshot(snapshot: Snapshot, folder: Path, *, only_weights: bool = False) -> None:
    """Writes the files into `folder`, each flushed to disk."""
    metadata = {"format": "pt"}
    save_file(snapshot.weights, folder / weights_file(snapshot.adapter_config is not None), metadata)
    if not only_weights:
        save_file(snapshot.optimizer, folder / OPTIMIZER_FILE, metadata)
        save_file(snapshot.rng, folder / RNG_FILE, metadata)
        write_json(folder / TRAINING_FILE, snapshot.training)
    if snapshot.adapter_config is not None:
        (folder / ADAPTER_CONFIG_FILE).write_text(snapshot.adapter_config)
    for path in folder.iterdir():
        sync(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read ({error}): the checkpoint is not whole, use another") from error
    return value


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{path} cannot be read ({error}): the checkpoint is not whole, use another") from error


def check_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raises `DataError` naming tensors that are missing, unexpected, or of another shape or type."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is unexpected" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        here, there = expected[name], found[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            problems.append(f"{name} is {there.dtype} {list(there.shape)}, the model has {here.dtype} {list(here.shape)}")
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DataError(f"{path} does not fit this model: {'; '.join(problems[:10])}{more}. Same base model and adapter settings?")


def check_settings(saved: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Raises `ConfigError` naming each setting that differs from the saved one."""
    differing = [f"{key} was {saved.get(key)!r}, is {value!r}" for key, value in current.items() if saved.get(key) != value]
    if differing:
        instead = "" if path.name == ADAPTER_CONFIG_FILE else ", or load only the weights"
        raise ConfigError(f"{path} was saved under other settings: {'; '.join(differing)}. Set the same{instead}")


def sync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
