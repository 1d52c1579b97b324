"""Tensors in files of which each rank writes its part, for any number of ranks to read. safetensors and JSON. Imports torch.

part-00000-of-00004.safetensors   what rank 0 holds first, by the tensors' own names
index.json                        where each part lies in its tensor; written last: without it the folder is not whole
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from twinkle_core.errors import DamagedError, DataError
from twinkle_core.model.checkpoint_files import read_json, sync, write_json
from twinkle_core.model.parallel.whole_tensors import local_part, local_slices

INDEX = "index.json"


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A box of a tensor, and the file that has it under the tensor's name."""

    file: str
    start: tuple[int, ...]
    """[dimensions]: where the box begins in the tensor."""
    shape: tuple[int, ...]
    """[dimensions]."""


def write_parts(folder: Path, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> None:
    """Collective. Writes this rank's file, flushed to disk; rank 0 writes the index once all files are there. The folder exists.

    A part that several ranks hold is written by one of them. Errors of the disk are raised on every rank.
    """
    owners = _owners(tensors, rank, world_size)
    file = _file_of(rank, world_size)
    mine = {name for (name, _), (owner, _) in owners.items() if owner == rank}
    error: OSError | None = None
    try:
        parts = {name: local_part(tensor).detach().cpu().contiguous() for name, tensor in tensors.items() if name in mine}
        save_file(parts, folder / file, {"format": "pt"})
        sync(folder / file)
        if rank == 0:
            entries: dict[str, Any] = {
                name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "parts": []} for name, tensor in sorted(tensors.items())
            }
            for (name, start), (owner, shape) in owners.items():
                entries[name]["parts"].append(asdict(FilePart(file=_file_of(owner, world_size), start=start, shape=shape)))
    except OSError as caught:
        error = caught
    for other in _everybodys(error, world_size):
        if other is not None:
            raise other
    if rank == 0:
        write_json(folder / INDEX, {"world_size": world_size, "tensors": entries})
        sync(folder / INDEX)
    _everybodys(None, world_size)


Box = tuple[str, tuple[int, ...]]
"""Name of a tensor and where a part of it begins."""


def _owners(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> dict[Box, tuple[int, tuple[int, ...]]]:
    """Each part → the lowest of the ranks that hold it, which writes it, and its shape."""
    held: dict[Box, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if local_part(tensor).numel():
            held[name, tuple(part.start for part in local_slices(tensor))] = tuple(local_part(tensor).shape)
    owners: dict[Box, tuple[int, tuple[int, ...]]] = {}
    for other, boxes in enumerate(_everybodys(held, world_size)):
        for box, shape in boxes.items():
            owners.setdefault(box, (other, shape))
    return owners


def _file_of(rank: int, world_size: int) -> str:
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


def _everybodys(value: Any, world_size: int) -> list[Any]:
    """The values of all ranks, by rank."""
    if world_size == 1:
        return [value]
    answers: list[Any] = [None] * world_size
    dist.all_gather_object(answers, value)
    return answers


def read_parts(folder: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fills this rank's part of each live tensor, from files of any number of ranks. Reads what overlaps it, nothing else.

    Raises `DamagedError` for a missing or unreadable file and parts that do not make up their tensor, `DataError` naming tensors that
    are missing, unexpected, or of another shape or type. Names and shapes are checked before anything is changed.
    """
    index = read_json(folder / INDEX)["tensors"]
    _check(folder, index, targets)
    for name, target in targets.items():
        own = local_slices(target)
        live = local_part(target)
        for part in (_file_part(entry) for entry in index[name]["parts"]):
            ends = [start + size for start, size in zip(part.start, part.shape, strict=True)]
            common = [(max(start, here.start), min(end, here.stop)) for start, end, here in zip(part.start, ends, own, strict=True)]
            if any(first >= last for first, last in common):
                continue
            there = tuple(slice(first - start, last - start) for (first, last), start in zip(common, part.start, strict=True))
            here = tuple(slice(first - box.start, last - box.start) for (first, last), box in zip(common, own, strict=True))
            with torch.no_grad():
                live[here].copy_(_read(folder / part.file, name, there))


def _file_part(entry: Mapping[str, Any]) -> FilePart:
    return FilePart(file=entry["file"], start=tuple(entry["start"]), shape=tuple(entry["shape"]))


def _read(path: Path, name: str, box: tuple[slice, ...]) -> torch.Tensor:
    try:
        with safe_open(path, "pt") as file:
            if not box:
                scalar: torch.Tensor = file.get_tensor(name)
                return scalar
            part: torch.Tensor = file.get_slice(name)[box]
            return part
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{path}: {name} cannot be read ({error}): the checkpoint is not whole, use another") from error


def _check(folder: Path, index: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    problems = [f"{name} is missing" for name in sorted(targets.keys() - index.keys())]
    problems += [f"{name} is unexpected" for name in sorted(index.keys() - targets.keys())]
    for name in sorted(targets.keys() & index.keys()):
        entry, target = index[name], targets[name]
        if entry["shape"] != list(target.shape) or entry["dtype"] != str(target.dtype):
            problems.append(f"{name} is {entry['dtype']} {entry['shape']}, the model has {target.dtype} {list(target.shape)}")
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DataError(f"{folder} does not fit this model: {'; '.join(problems[:10])}{more}. Same base model and adapter settings?")
    for name, entry in index.items():
        parts = [_file_part(part) for part in entry["parts"]]
        there, expected = sum(math.prod(part.shape) for part in parts), math.prod(entry["shape"])
        absent = sorted({part.file for part in parts if Path(part.file).name != part.file or not (folder / part.file).is_file()})
        if there != expected or absent:
            what = f"{', '.join(absent)} missing" if absent else f"{there} of {expected} values of {name}"
            raise DamagedError(f"{folder}: {what}: the checkpoint is not whole, use another")
