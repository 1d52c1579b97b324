"""The files of a checkpoint: safetensors and JSON, no pickle. Imports torch.

training.json                                    step, optimizer and schedule settings
rng.safetensors                                  random number generators of worker 0
adapter_config.json                              of an adapter, in peft's own form

Where tensors are whole on worker 0:
adapter_model.safetensors                        an adapter, in peft's own form; or
model.safetensors                                all parameters, by the model's own names
optimizer.safetensors                            moments and step counts

Where they lie in parts on several workers, which write a file each (`parallel.sharded_files`):
weights/index.json, whole.safetensors, part-*.safetensors      the adapter, or all parameters
optimizer/index.json, whole.safetensors, part-*.safetensors    moments and step counts
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from twinkle_core.errors import ConfigError, DamagedError, DataError, TrainingError
from twinkle_core.model.tensor_file import save_file

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
TRAINING_FILE = "training.json"
WEIGHTS_FOLDER = "weights"
OPTIMIZER_FOLDER = "optimizer"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank writes of a training state at rest; empty where other ranks write all of it."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """File → its tensors: contiguous CPU copies that later steps do not touch."""
    texts: dict[str, str] = field(default_factory=dict)
    """File → its text."""


def weights_file(is_adapter: bool) -> str:
    return ADAPTER_FILE if is_adapter else MODEL_FILE


def detach(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU copies."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Writes the files into `folder`, each flushed to disk. Raises `TrainingError` for weights that are not finite."""
    for name in {*snapshot.tensors, *snapshot.texts}:
        (folder / name).parent.mkdir(exist_ok=True)
    for name, tensors in snapshot.tensors.items():
        if name.split("/")[0] not in (OPTIMIZER_FILE, OPTIMIZER_FOLDER, RNG_FILE):
            refuse_not_finite(tensors, name)
        write_tensors(tensors, folder / name)
    for name, text in snapshot.texts.items():
        write_text(folder / name, text)


def refuse_not_finite(weights: Mapping[str, torch.Tensor], name: str) -> None:
    """Raises `TrainingError`. Losses and norms do not tell what the last optimizer step made of the weights, and nothing else looks."""
    wrong = []
    for key, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel():
            ends = torch.stack(torch.aminmax(tensor))  # one pass without a copy; what is not a number comes through
            wrong += [] if bool(ends.isfinite().all()) else [key]
    if wrong:
        raise TrainingError(
            f"{name} is not saved: {len(wrong)} of {len(weights)} tensors hold values that are not finite after the last optimizer step "
            f"({', '.join(wrong[:3])}); look at the optimizer's settings, and restore an earlier checkpoint"
        )


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """A file of contiguous CPU tensors, flushed to disk."""
    save_file(tensors, path, {"format": "pt"})
    sync(path)


def write_text(path: Path, text: str) -> None:
    """A file of text, flushed to disk."""
    path.write_text(text)
    sync(path)


def json_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json_text(value))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read ({error}): the checkpoint is not whole, use another") from error
    return value


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file. They lie in the file, not in memory: only what is looked at is read."""
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
