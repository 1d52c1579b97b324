"""Tensors in files of which each rank writes its part, for any number of ranks to read. safetensors and JSON. Imports torch.

part-00000-of-00004.safetensors   parts that rank 0 writes, by the tensors' own names; a rank without a part writes none
whole.safetensors                 tensors that all ranks have whole, by rank 0
index.json                        where each part lies in its tensor

Writing has two halves: `share_out` asks all ranks what they hold and gives each its own parts, which later steps do not touch once
they are copied; the files are then written by whoever likes, without another word between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from twinkle_core.errors import DamagedError, DataError
from twinkle_core.model.checkpoint_files import json_text, read_json, sync, write_tensors
from twinkle_core.model.parallel.agreement import from_all, together
from twinkle_core.model.parallel.whole_tensors import assign_local, local_part, local_slices

INDEX = "index.json"
WHOLE = "whole.safetensors"


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A box of a tensor, and the file that has it under the tensor's name."""

    file: str
    start: tuple[int, ...]
    """[dimensions]: where the box begins in the tensor."""
    shape: tuple[int, ...]
    """[dimensions]."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank writes of a set of tensors."""

    parts: dict[str, dict[str, torch.Tensor]]
    """File → live parts by the tensors' names. No file is empty."""
    index: str | None
    """Text of the index; None but on rank 0."""


Box = tuple[str, tuple[int, ...]]
"""Name of a tensor and where a part of it begins."""


def share_out(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> Share:
    """Collective. Which rank writes what: each part once, by one of those that hold it, so that all write about as much."""
    held: dict[Box, tuple[tuple[int, ...], int]] = {}
    for name, tensor in tensors.items():
        part = local_part(tensor)
        if part.numel():
            held[name, tuple(cut.start for cut in local_slices(tensor))] = (tuple(part.shape), part.numel() * part.element_size())
    holders: dict[Box, list[int]] = {}
    boxes: dict[Box, tuple[tuple[int, ...], int]] = {}
    for other, theirs in enumerate(from_all(held, world_size)):
        for box in theirs:
            holders.setdefault(box, []).append(other)
        boxes |= theirs
    load = [0] * world_size
    places: dict[Box, tuple[str, int]] = {}
    for box in sorted(boxes, key=lambda box: (-len(holders[box]), -boxes[box][1], box)):
        is_everywhere = len(holders[box]) == world_size
        writer = 0 if is_everywhere else min(holders[box], key=lambda other: (load[other], other))
        places[box] = (WHOLE if is_everywhere else file_of(writer, world_size), writer)
        load[writer] += boxes[box][1]
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for (name, _), (file, writer) in sorted(places.items()):
        if writer == rank:
            parts.setdefault(file, {})[name] = local_part(tensors[name]).detach()
    index = _index_text(tensors, {box: (boxes[box][0], file) for box, (file, _) in places.items()}) if rank == 0 else None
    return Share(parts=parts, index=index)


def _index_text(tensors: Mapping[str, torch.Tensor], places: Mapping[Box, tuple[tuple[int, ...], str]]) -> str:
    entries: dict[str, Any] = {
        name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "parts": []} for name, tensor in sorted(tensors.items())
    }
    for (name, start), (shape, file) in sorted(places.items()):
        entries[name]["parts"].append(asdict(FilePart(file=file, start=start, shape=shape)))
    return json_text({"tensors": entries})


def file_of(rank: int, world_size: int) -> str:
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


def write_parts(folder: Path, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> None:
    """Collective. Writes this rank's file and, rank 0, the index, flushed to disk. The folder exists, for all ranks.

    What the disk says to one rank is raised on every rank, at once.
    """
    share = share_out(tensors, rank, world_size)
    with together(world_size):
        for file, parts in share.parts.items():
            write_tensors({name: part.cpu().contiguous() for name, part in parts.items()}, folder / file)
        if share.index is not None:
            (folder / INDEX).write_text(share.index)
            sync(folder / INDEX)


def read_local(
    folder: Path, targets: Mapping[str, torch.Tensor], *, fetch: Callable[[Iterable[str]], None] | None = None
) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor, on the CPU, from files of any number of ranks. Reads what overlaps it, nothing else.

    `targets` say which tensors there must be, and what of them is this rank's; they are not changed. `fetch` is told which files of
    the folder are needed before they are opened.

    Raises `DamagedError` for a missing or unreadable file and parts that do not make up their tensor, `DataError` naming tensors that
    are missing, unexpected, or of another shape or type.
    """
    index = _read_index(folder)
    _check(folder, index, targets)
    plans = {name: _overlaps(index[name][2], local_slices(target)) for name, target in targets.items()}
    needed = sorted({part.file for plan in plans.values() for part, _, _ in plan})
    if fetch is not None:
        fetch(needed)
    absent = [name for name in needed if not (folder / name).is_file()]
    if absent:
        raise DamagedError(f"{folder}: {', '.join(absent)} missing: the checkpoint is not whole, use another")
    local = {name: torch.empty(local_part(target).shape, dtype=target.dtype) for name, target in targets.items()}
    by_file: dict[str, list[tuple[str, tuple[slice, ...], tuple[slice, ...]]]] = {}
    for name, plan in plans.items():
        for part, there, here in plan:
            by_file.setdefault(part.file, []).append((name, there, here))
    for file, pieces in by_file.items():
        _read(folder / file, pieces, local)
    return local


def read_parts(folder: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fills this rank's part of each live tensor. As `read_local`; nothing is changed before all was read."""
    assign_local(targets, read_local(folder, targets))


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder of parts, whole, on the CPU."""
    kinds = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    index = _read_index(folder)
    unknown = sorted({kind for kind, _, _ in index.values()} - kinds.keys())
    if unknown:
        raise DamagedError(f"{folder / INDEX} names the type {unknown[0]}, which is none of torch's")
    return read_local(folder, {name: torch.empty(shape, dtype=kinds[kind], device="meta") for name, (kind, shape, _) in index.items()})


Index = dict[str, tuple[str, tuple[int, ...], tuple[FilePart, ...]]]
"""Name → type, shape and parts of a tensor."""


def _read_index(folder: Path) -> Index:
    try:
        return {
            name: (
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                tuple(FilePart(file=str(p["file"]), start=tuple(p["start"]), shape=tuple(p["shape"])) for p in entry["parts"]),
            )
            for name, entry in read_json(folder / INDEX)["tensors"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{folder / INDEX} is not understood ({error!r}): the checkpoint is not whole, use another") from error


def _overlaps(parts: Iterable[FilePart], own: tuple[slice, ...]) -> list[tuple[FilePart, tuple[slice, ...], tuple[slice, ...]]]:
    """The parts that hold something of the box `own`: which values of the file, and where they belong in the box."""
    found = []
    for part in parts:
        ends = [start + size for start, size in zip(part.start, part.shape, strict=True)]
        common = [(max(start, here.start), min(end, here.stop)) for start, end, here in zip(part.start, ends, own, strict=True)]
        if all(first < last for first, last in common):
            there = tuple(slice(first - start, last - start) for (first, last), start in zip(common, part.start, strict=True))
            here = tuple(slice(first - box.start, last - box.start) for (first, last), box in zip(common, own, strict=True))
            found.append((part, there, here))
    return found


def _read(path: Path, pieces: Iterable[tuple[str, tuple[slice, ...], tuple[slice, ...]]], local: Mapping[str, torch.Tensor]) -> None:
    name = ""
    try:
        with safe_open(path, "pt") as file:
            for name, there, here in pieces:
                local[name][here].copy_(file.get_slice(name)[there] if there else file.get_tensor(name))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DamagedError(f"{path}: {name} cannot be read ({error}): the checkpoint is not whole, use another") from error


def _check(folder: Path, index: Index, targets: Mapping[str, torch.Tensor]) -> None:
    problems = [f"{name} is missing" for name in sorted(targets.keys() - index.keys())]
    problems += [f"{name} is unexpected" for name in sorted(index.keys() - targets.keys())]
    for name in sorted(targets.keys() & index.keys()):
        kind, shape, _ = index[name]
        target = targets[name]
        if shape != tuple(target.shape) or kind != str(target.dtype):
            problems.append(f"{name} is {kind} {list(shape)}, the model has {target.dtype} {list(target.shape)}")
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DataError(f"{folder} does not fit this model: {'; '.join(problems[:10])}{more}. Same base model and adapter settings?")
    for name, (_, shape, parts) in index.items():
        if any(Path(part.file).name != part.file for part in parts):
            raise DamagedError(f"{folder / INDEX} names files outside its folder")
        there, expected = sum(math.prod(part.shape) for part in parts), math.prod(shape)
        if there != expected or any(len(part.start) != len(shape) or len(part.shape) != len(shape) for part in parts):
            raise DamagedError(f"{folder}: {there} of {expected} values of {name}: the checkpoint is not whole, use another")
