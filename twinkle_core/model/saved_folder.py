"""The folder that `save` writes: one that peft or transformers loads, and that resumes. Imports torch.

Weights are whole, whatever they lie in: that is the form which everybody else reads. What only a resume needs lies as in a checkpoint:
where tensors lie in parts on several ranks, each writes its own part of the optimizer's state, into a folder that all of them see.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.hub.model_files import is_tokenizer_file
from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.host_copies import HostCopies
from twinkle_core.model.parallel.agreement import from_all, together
from twinkle_core.model.parallel.sharded_files import write_parts
from twinkle_core.model.snapshot import is_parted, progress_files, refuse_empty, take_snapshot
from twinkle_core.model.trained_weights import INDEX_FILE

if TYPE_CHECKING:
    from twinkle_core.model.checkpoint_worker import CheckpointWorker

TRAINER_STATE_FILE = "trainer_state.json"
SHARD_BYTES = 5_000_000_000
"""Whole weights are gathered and written in files of at most this size, so that rank 0 needs memory for one of them."""


def write_folder(
    worker: CheckpointWorker, final: Path, state: AdapterState, trainer_state: Mapping[str, int], save_optimizer: bool
) -> None:
    """Collective. `final` appears whole or not at all. Raises `ConfigError` for a folder that exists."""
    parted = is_parted(state)
    refuse_empty(state, worker.rank, worker.world_size)
    if not parted and worker.rank != 0:
        return
    ranks = worker.world_size if parted else 1
    scratch: Path | None = None
    try:
        with together(ranks):
            scratch = _draft_beside(final) if worker.rank == 0 else None
        draft = Path(from_all(None if scratch is None else str(scratch), ranks)[0]) / final.name
        if parted:
            _write_parted(worker, draft, state, save_optimizer)
        else:
            _write_whole(draft, state, save_optimizer)
        with together(ranks):
            if worker.rank == 0:
                files.write_json(draft / TRAINER_STATE_FILE, {"cur_step": state.step, **trainer_state})
                files.sync(draft / TRAINER_STATE_FILE)
                if state.adapter is None:
                    _write_model_files(worker, draft)
                files.sync(draft)
                draft.rename(final)
                files.sync(final.parent)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _draft_beside(final: Path) -> Path:
    if final.exists():
        raise ConfigError(f"{final} exists already; checkpoints are never overwritten, choose another name")
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    (scratch / final.name).mkdir()
    return scratch


def _write_whole(draft: Path, state: AdapterState, save_optimizer: bool) -> None:
    snapshot = take_snapshot(state, HostCopies(), 0, 1)
    if not save_optimizer:
        kept = (files.weights_file(state.adapter is not None), files.ADAPTER_CONFIG_FILE)
        tensors = {name: tensors for name, tensors in snapshot.tensors.items() if name in kept}
        snapshot = files.Snapshot(tensors=tensors, texts={name: text for name, text in snapshot.texts.items() if name in kept})
    files.write_snapshot(snapshot, draft)


def _write_parted(worker: CheckpointWorker, draft: Path, state: AdapterState, save_optimizer: bool) -> None:
    with together(worker.world_size):
        if not draft.is_dir():
            raise ConfigError(
                f"rank {worker.rank} does not see {draft}, which rank 0 made: save a model that lies in parts into a folder that all "
                "machines share, or into a store (begin_save)"
            )
        if worker.rank == 0:
            (draft / files.OPTIMIZER_FOLDER).mkdir()
    _write_weights(worker, draft, state)
    if save_optimizer:
        write_parts(draft / files.OPTIMIZER_FOLDER, state.ready()[0].tensors(), worker.rank, worker.world_size)
    with together(worker.world_size):
        if worker.rank == 0:
            tensors, texts = progress_files(state)
            if not save_optimizer:
                (draft / files.OPTIMIZER_FOLDER).rmdir()
                tensors, texts = {}, {name: text for name, text in texts.items() if name == files.ADAPTER_CONFIG_FILE}
            files.write_snapshot(files.Snapshot(tensors=tensors, texts=texts), draft)


def _write_weights(worker: CheckpointWorker, draft: Path, state: AdapterState) -> None:
    """One file after the other: gathered by all ranks, written by rank 0."""
    weights = state.weights()
    groups = list(_groups(weights))
    single = files.weights_file(state.adapter is not None)
    names = [single] if len(groups) == 1 else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        whole = worker.placement.gather({key: weights[key] for key in group})
        with together(worker.world_size):
            if worker.rank == 0:
                files.write_snapshot(files.Snapshot(tensors={name: whole}), draft)
    if len(groups) == 1:
        return
    with together(worker.world_size):
        if worker.rank == 0:
            total = sum(parameter.numel() * parameter.element_size() for parameter in weights.values())
            places = {key: name for name, group in zip(names, groups, strict=True) for key in group}
            files.write_json(draft / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
            files.sync(draft / INDEX_FILE)


def _groups(parameters: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names in order, each group of at most `SHARD_BYTES` or of one tensor."""
    group: list[str] = []
    size = 0
    for name, parameter in parameters.items():
        more = parameter.numel() * parameter.element_size()
        if group and size + more > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    yield group


def _write_model_files(worker: CheckpointWorker, folder: Path) -> None:
    """What makes a folder of weights one that transformers loads: settings, and the tokenizer of the base model."""
    before = set(folder.iterdir())
    worker.model.config.save_pretrained(folder)
    generation = getattr(worker.model, "generation_config", None)  # a model for sequences has none
    if generation is not None:
        generation.save_pretrained(folder)
    for path in sorted(worker.folder.iterdir()) if worker.folder is not None else ():
        if is_tokenizer_file(path.name) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    for path in set(folder.iterdir()) - before:
        files.sync(path)
