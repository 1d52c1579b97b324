"""What of a training state each rank writes. Imports torch.

Where tensors are whole on every rank, rank 0 writes all of it. Where some lie in parts, each rank writes parts that it holds, and
nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.adapter import refuse_untrained
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.host_copies import HostCopies
from twinkle_core.model.parallel.agreement import from_all
from twinkle_core.model.parallel.sharded_files import INDEX, share_out
from twinkle_core.model.parallel.whole_tensors import local_part


def is_parted(state: AdapterState) -> bool:
    """Whether some trained tensor is not whole on its rank: the same on all ranks."""
    return any(isinstance(tensor, DTensor) for tensor in state.parameters.values())


def take_snapshot(state: AdapterState, copies: HostCopies, rank: int, world_size: int) -> files.Snapshot:
    """Collective where tensors lie in parts. Copies this rank's share of the state; training may go on when this returns.

    Raises `TrainingError`, on every rank that takes part, for an adapter that learnt nothing.
    """
    optimizer, _ = state.ready()
    refuse_empty(state, rank, world_size)
    sets: dict[str, Mapping[str, torch.Tensor]] = {files.WEIGHTS_FOLDER: state.weights(), files.OPTIMIZER_FOLDER: optimizer.tensors()}
    tensors, texts = _parts_of(sets, copies, rank, world_size) if is_parted(state) else _whole_of(state, sets, copies, rank)
    if rank == 0:
        more, their_texts = progress_files(state)
        tensors, texts = tensors | more, texts | their_texts
    return files.Snapshot(tensors=tensors, texts=texts)


def progress_files(state: AdapterState) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    """The small files, which rank 0 writes: tensors and texts."""
    texts = {files.TRAINING_FILE: files.json_text(state.progress())}
    if state.adapter is not None:
        texts[files.ADAPTER_CONFIG_FILE] = state.adapter.config_json()
    return {files.RNG_FILE: files.detach(rng_states())}, texts


def refuse_empty(state: AdapterState, rank: int, world_size: int) -> None:
    """Raises `TrainingError` for an adapter that took steps and is still what it was. Collective where it lies in parts."""
    if state.adapter is None or state.step == 0:
        return
    if not is_parted(state):
        if rank == 0:
            refuse_untrained(dict(state.parameters))
        return
    local = {name: local_part(parameter) for name, parameter in state.parameters.items()}
    learnt = any(bool(part.any()) for name, part in local.items() if "lora_B" in name)
    if not any(from_all(learnt, world_size)):
        refuse_untrained({name: torch.zeros(1) for name in local})


Taken = tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]


def _whole_of(state: AdapterState, sets: Mapping[str, Mapping[str, torch.Tensor]], copies: HostCopies, rank: int) -> Taken:
    if rank != 0:
        return {}, {}
    names = {files.WEIGHTS_FOLDER: files.weights_file(state.adapter is not None), files.OPTIMIZER_FOLDER: files.OPTIMIZER_FILE}
    return {names[key]: copies.take(key, tensors) for key, tensors in sets.items()}, {}


def _parts_of(sets: Mapping[str, Mapping[str, torch.Tensor]], copies: HostCopies, rank: int, world_size: int) -> Taken:
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    texts: dict[str, str] = {}
    for key, whole in sets.items():
        share = share_out(whole, rank, world_size)
        for file, parts in share.parts.items():
            tensors[f"{key}/{file}"] = copies.take(f"{key}/{file}", parts)
        if share.index is not None:
            texts[f"{key}/{INDEX}"] = share.index
    return tensors, texts


def rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
