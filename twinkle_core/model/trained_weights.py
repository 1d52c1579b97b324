"""The trained tensors of a checkpoint, whole, whichever files they lie in. Imports torch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from twinkle_core.errors import DamagedError
from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.parallel.sharded_files import read_whole

INDEX_FILE = "model.safetensors.index.json"


def is_adapter(folder: Path) -> bool:
    """Whether a checkpoint holds an adapter, not all parameters."""
    return (folder / files.ADAPTER_FILE).exists() or (folder / files.ADAPTER_CONFIG_FILE).exists()


def read_trained(folder: Path) -> dict[str, torch.Tensor]:
    """By the names that peft and transformers give them. Raises `DamagedError` for files that cannot be read."""
    if (folder / files.WEIGHTS_FOLDER).is_dir():
        return read_whole(folder / files.WEIGHTS_FOLDER)
    if is_adapter(folder):
        return files.read_tensors(folder / files.ADAPTER_FILE)
    return read_cut_file(folder) if (folder / INDEX_FILE).exists() else files.read_tensors(folder / files.MODEL_FILE)


def read_cut_file(folder: Path) -> dict[str, torch.Tensor]:
    """Weights that were too many for one file, in transformers' form: an index says which tensor is where."""
    names = sorted(set(files.read_json(folder / INDEX_FILE)["weight_map"].values()))
    if any(Path(name).name != name for name in names):
        raise DamagedError(f"{folder / INDEX_FILE} names files outside its folder")
    return {key: tensor for name in names for key, tensor in files.read_tensors(folder / name).items()}


@contextmanager
def adapter_folder(folder: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """A folder in peft's own form with `weights`, those of the checkpoint `folder`: itself where it has that form."""
    if (folder / files.ADAPTER_FILE).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="adapter-") as scratch:
        files.write_tensors(weights, Path(scratch) / files.ADAPTER_FILE)
        shutil.copyfile(folder / files.ADAPTER_CONFIG_FILE, Path(scratch) / files.ADAPTER_CONFIG_FILE)
        yield Path(scratch)
