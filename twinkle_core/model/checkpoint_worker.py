"""What a worker does for checkpoints: snapshots, folders, restoring. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import ConfigError, TwinkleError
from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.host_copies import HostCopies
from twinkle_core.model.parallel.agreement import together
from twinkle_core.model.placement import Placement, Replicated
from twinkle_core.model.restoring import Fetch, StoredCheckpoint, read_saved
from twinkle_core.model.saved_folder import write_folder
from twinkle_core.model.snapshot import take_snapshot

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from storage.artifact import FileEntry
    from twinkle_core.hub.upload import BackgroundUploads
    from twinkle_core.model.background_save import BackgroundSave

LOG = logging.getLogger(__name__)


class CheckpointWorker:
    """The part of a worker that saves and restores what is trained under one name. Every rank calls each method."""

    model: PreTrainedModel
    folder: Path | None
    states: dict[str, AdapterState]

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.placement: Placement = Replicated(rank, world_size)
        self._save: BackgroundSave | None = None
        self._uploads: BackgroundUploads | None = None
        self._copies = HostCopies()

    def state(self, adapter_name: str | None = None) -> AdapterState:
        raise NotImplementedError

    def place(self) -> None:
        raise NotImplementedError

    def get_state_dict(self, adapter_name: str | None) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in self.placement.gather(self.state(adapter_name).weights()).items()}

    def get_peft_config_dict(self, adapter_name: str | None) -> dict[str, Any]:
        adapter = self.state(adapter_name).adapter
        if adapter is None:
            raise ConfigError("all parameters are trained: there is no adapter with settings")
        return adapter.config_dict()

    def begin_save(self, store_url: str, prefix: str, adapter_name: str | None) -> None:
        from twinkle_core.model.background_save import BackgroundSave

        if self._save is not None:  # another rank's failed: this one may still be writing from the memory that it was given
            self._save, self._copies = None, HostCopies()
        snapshot = take_snapshot(self.state(adapter_name), self._copies, self.rank, self.world_size)
        if snapshot.tensors or snapshot.texts:
            self._save = BackgroundSave(snapshot, store_url, prefix)

    def wait_for_save(self, seconds: float) -> bool | OSError:
        """Whether this rank's part of the save is done, after at most `seconds`, or why it failed.

        A disk that is full or a store that is away is an answer, not an error: an error would end a group of workers.
        """
        try:
            return self._save is None or self._save.wait(seconds)
        except OSError as error:
            return error

    def end_save(self) -> tuple[FileEntry, ...]:
        """The files that this rank uploaded."""
        save, self._save = self._save, None
        return save.result() if save is not None else ()

    def close_window(self, adapter_name: str | None) -> int:
        """Takes the step of a window that is not full; gives the steps taken so far.

        All saving begins here: raises `TrainingError` where a loss or gradient since the last restore was not finite.
        """
        state = self.state(adapter_name)
        if state.optimizer is not None and (ignored := state.close_window()):
            LOG.warning(ignored)
        state.ledger.check()
        return state.step

    def save(self, folder: str, trainer_state: Mapping[str, int], save_optimizer: bool, adapter_name: str | None) -> str:
        write_folder(self, Path(folder), self.state(adapter_name), trainer_state, save_optimizer)
        return folder

    def restore_from(self, store_url: str, prefix: str, entries: Sequence[FileEntry], adapter_name: str | None) -> None:
        from storage.scratch import scratch_folder
        from storage.store import open_store

        with scratch_folder() as scratch:
            with together(self.world_size):
                stored = StoredCheckpoint(open_store(store_url), prefix, entries, scratch)
            self._restore(stored.folder, False, adapter_name, stored.fetch)

    def restore(self, folder: str, only_weights: bool, adapter_name: str | None) -> None:
        self._restore(Path(folder), only_weights, adapter_name, None)

    def _restore(self, folder: Path, only_weights: bool, adapter_name: str | None, fetch: Fetch | None) -> None:
        """Everything is read and checked, on every rank, before anything is changed on any."""
        self.place()
        state = self.state(adapter_name)
        with together(self.world_size):
            saved = read_saved(folder, state, self.model, only_weights=only_weights, fetch=fetch)
        saved.apply(state)

    def upload_to_hub(self, folder: str, repository: str, token: str | None) -> None:
        """Begins it, from worker 0, whose machine has the folder."""
        if self.rank != 0:
            return
        from twinkle_core.hub.upload import BackgroundUploads

        if not Path(folder).is_dir():
            raise ConfigError(f"checkpoint folder {folder} does not exist on the machine of worker 0")
        self._uploads = self._uploads or BackgroundUploads()
        self._uploads.begin(Path(folder), repository, token)

    def wait_for_upload(self, seconds: float) -> bool | TwinkleError:
        """Whether uploads are done, after at most `seconds`, or why one failed: an answer, as of `wait_for_save`."""
        try:
            return self._uploads is None or self._uploads.wait(seconds)
        except TwinkleError as error:
            return error

    def load_weights(self, state: AdapterState, weights: Mapping[str, torch.Tensor], source: str) -> None:
        """Into an adapter that was just added, before the model is placed."""
        files.check_tensors(weights, state.parameters, Path(source))
        with torch.no_grad():
            for name, parameter in state.parameters.items():
                parameter.copy_(weights[name])
