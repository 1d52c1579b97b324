"""Reading a checkpoint: each rank its own part of it, before anything is changed. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import ConfigError, DamagedError
from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.parallel.sharded_files import INDEX, read_local
from twinkle_core.model.parallel.whole_tensors import local_slices
from twinkle_core.model.peer_files import adapter_settings, peer_state, read_weights
from twinkle_core.model.snapshot import rng_states, set_rng_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from storage.artifact import FileEntry
    from storage.store import Store

Fetch = Callable[[Iterable[str]], None]
"""Is told names of files in the folder that are about to be read."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds for this rank, read and checked."""

    weights: dict[str, torch.Tensor]
    """This rank's part of each trained tensor."""
    training: dict[str, Any] | None = None
    """Step and settings; None where only the weights are wanted."""
    room: dict[str, torch.Tensor] | None = None
    """Tensors of the optimizer's state, to be filled."""
    optimizer: dict[str, torch.Tensor] | None = None
    """This rank's part of each of them."""
    rng: dict[str, torch.Tensor] | None = None
    """Of worker 0; None in a peer's folder."""

    def apply(self, state: AdapterState) -> None:
        """Changes the model, its optimizer and counters, and the random states of this process."""
        state.assign(self.weights)
        if self.training is not None and self.room is not None and self.optimizer is not None:
            state.ready()[0].load(self.room, self.optimizer, self.training.get("optimizer_state"))
            if self.rng is not None:
                set_rng_states(self.rng)
            state.load_progress(self.training)
        state.start_window()
        state.forget_trouble()


def read_saved(folder: Path, state: AdapterState, model: PreTrainedModel, *, only_weights: bool, fetch: Fetch | None = None) -> Saved:
    """Raises `DataError`, `ConfigError` and `DamagedError` as `ModelSaving.restore` says. Changes nothing."""
    if state.adapter is not None and (saved := adapter_settings(folder)) is not None:
        files.check_settings(saved, adapter_settings(state.adapter.config_dict()) or {}, folder / files.ADAPTER_CONFIG_FILE)
    weights = _parts(folder, files.WEIGHTS_FOLDER, state.weights(), fetch)
    if weights is None:
        weights = _cut(read_weights(folder, state, model), state.weights())
    if only_weights:
        return Saved(weights=weights)
    if not (folder / files.TRAINING_FILE).exists() and (peer := peer_state(folder, state)) is not None:
        room = state.ready()[0].room(None)
        return Saved(weights=weights, training=peer.training, room=room, optimizer=_cut(peer.optimizer, room))
    training = files.read_json(folder / files.TRAINING_FILE)
    files.check_settings(training, state.settings(), folder / files.TRAINING_FILE)
    if ("grad_scaler" in training) != (state.scaler is not None):
        with_or_not = "with" if state.scaler is None else "without"
        raise ConfigError(f"{folder} was saved {with_or_not} a gradient scaler; use the same mixed_precision")
    room = state.ready()[0].room(training.get("optimizer_state"))
    optimizer = _parts(folder, files.OPTIMIZER_FOLDER, room, fetch)
    if optimizer is None:
        whole = files.read_tensors(folder / files.OPTIMIZER_FILE)
        files.check_tensors(whole, room, folder / files.OPTIMIZER_FILE)
        optimizer = _cut(whole, room)
    rng, here = files.read_tensors(folder / files.RNG_FILE), rng_states()
    if ("cuda" in rng) != ("cuda" in here):  # of a GPU, and resumed without one, or the other way: the last digits differ anyway
        rng.pop("cuda", None)
        here.pop("cuda", None)
    files.check_tensors(rng, here, folder / files.RNG_FILE)
    return Saved(weights=weights, training=training, room=room, optimizer=optimizer, rng=rng)


def _parts(folder: Path, name: str, targets: Mapping[str, torch.Tensor], fetch: Fetch | None) -> dict[str, torch.Tensor] | None:
    """This rank's part of what ranks wrote; None where the folder has whole tensors."""
    if not (folder / name / INDEX).exists():
        return None
    fetch_here = None if fetch is None else lambda names: fetch([f"{name}/{file}" for file in names])
    return read_local(folder / name, targets, fetch=fetch_here)


def _cut(whole: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of each whole tensor: of one that lies in a file, only this is read when it is copied."""
    return {name: whole[name][local_slices(target)] for name, target in targets.items()}


class StoredCheckpoint:
    """A checkpoint in a store, of which each rank fetches and verifies what it reads: the small files at once, parts when asked."""

    def __init__(self, store: Store, prefix: str, entries: Iterable[FileEntry], scratch: Path) -> None:
        from storage.transfer import local_folder

        every = {entry.path: entry for entry in entries}
        self._parts = {name: entry for name, entry in every.items() if _is_part(name)}
        self._local_folder, self._store, self._prefix, self._scratch = local_folder, store, prefix, scratch
        self.folder = local_folder(store, prefix, [entry for name, entry in every.items() if name not in self._parts], scratch)

    def fetch(self, names: Iterable[str]) -> None:
        """Raises `DamagedError` for a file that the checkpoint does not have, or that is not what it was."""
        wanted = list(names)
        strange = [name for name in wanted if name not in self._parts]
        if strange:
            raise DamagedError(f"{self._prefix}: {', '.join(strange)} is named in an index, but is no file of the checkpoint")
        self._local_folder(self._store, self._prefix, [self._parts[name] for name in wanted], self._scratch)


def _is_part(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder in (files.WEIGHTS_FOLDER, files.OPTIMIZER_FOLDER) and file != INDEX
