"""What a worker does for checkpoints: snapshots, folders, restoring. Imports torch."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.hub.model_files import is_tokenizer_file
from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.adapter import refuse_untrained
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.peer_files import adapter_settings, peer_state, read_weights
from twinkle_core.model.placement import Placement, Replicated

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from storage.artifact import FileEntry
    from twinkle_core.model.background_save import BackgroundSave

TRAINER_STATE_FILE = "trainer_state.json"
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
        self._upload: object = None

    def state(self, adapter_name: str | None = None) -> AdapterState:
        raise NotImplementedError

    def place(self) -> None:
        raise NotImplementedError

    def get_state_dict(self, adapter_name: str | None) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in self.placement.gather(self.state(adapter_name).parameters).items()}

    def get_peft_config_dict(self, adapter_name: str | None) -> dict[str, Any]:
        adapter = self.state(adapter_name).adapter
        if adapter is None:
            raise ConfigError("all parameters are trained: there is no adapter with settings")
        return adapter.config_dict()

    def begin_save(self, store_url: str, prefix: str, adapter_name: str | None) -> None:
        from twinkle_core.model.background_save import BackgroundSave

        if self._save is not None:
            raise ConfigError("a save is under way: call end_save before the next begin_save")
        snapshot = self._snapshot(self.state(adapter_name))
        if self.rank == 0:
            self._save = BackgroundSave(snapshot, store_url, prefix)

    def end_save(self, block: bool) -> tuple[FileEntry, ...] | None:
        if self._save is None:
            return None
        try:
            result = self._save.result(block=block)
        except BaseException:
            self._save = None
            raise
        if result is not None:
            self._save = None
        return result

    def close_window(self, adapter_name: str | None) -> int:
        """Takes the step of a window that is not full; gives the steps taken so far."""
        state = self.state(adapter_name)
        if state.optimizer is not None and (ignored := state.close_window()):
            LOG.warning(ignored)
        return state.step

    def save(self, folder: str, trainer_state: Mapping[str, int], save_optimizer: bool, adapter_name: str | None) -> str:
        state = self.state(adapter_name)
        snapshot = self._snapshot(state)
        if self.rank != 0:
            return folder
        final = Path(folder)
        if final.exists():
            raise ConfigError(f"{final} exists already; checkpoints are never overwritten, choose another name")
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as scratch:
            whole = Path(scratch) / final.name
            whole.mkdir()
            files.write_snapshot(snapshot, whole, only_weights=not save_optimizer)
            files.write_json(whole / TRAINER_STATE_FILE, {"cur_step": state.step, **trainer_state})
            files.sync(whole / TRAINER_STATE_FILE)
            if state.adapter is None:
                self._write_model_files(whole)
            files.sync(whole)
            whole.rename(final)
        files.sync(final.parent)
        return folder

    def _write_model_files(self, folder: Path) -> None:
        """What makes a folder of weights one that transformers loads: settings, and the tokenizer of the base model."""
        before = set(folder.iterdir())
        self.model.config.save_pretrained(folder)
        if self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        for path in sorted(self.folder.iterdir()) if self.folder is not None else ():
            if is_tokenizer_file(path.name) and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
        for path in set(folder.iterdir()) - before:
            files.sync(path)

    def _snapshot(self, state: AdapterState) -> files.Snapshot:
        """Collective; empty but on rank 0."""
        optimizer, _ = state.ready()
        weights = self.placement.gather(state.parameters)
        if state.adapter is not None and state.step > 0 and self.rank == 0:
            refuse_untrained(weights)
        return files.Snapshot(
            weights=weights,
            adapter_config=state.adapter.config_json() if state.adapter else None,
            optimizer=self.placement.gather(optimizer.tensors()),
            rng=files.detach(_rng_states()),
            training=state.progress(),
        )

    def restore_from(self, store_url: str, prefix: str, entries: Sequence[FileEntry], adapter_name: str | None) -> None:
        from storage.store import open_store
        from storage.transfer import local_folder

        with tempfile.TemporaryDirectory(prefix="restore-") as scratch:
            folder = local_folder(open_store(store_url), prefix, entries, Path(scratch))
            self.restore(str(folder), only_weights=False, adapter_name=adapter_name)

    def restore(self, folder: str, only_weights: bool, adapter_name: str | None) -> None:
        """Everything is read and checked before anything is changed."""
        self.place()
        state, path = self.state(adapter_name), Path(folder)
        if state.adapter is not None and (saved := adapter_settings(path)) is not None:
            files.check_settings(saved, adapter_settings(state.adapter.config_dict()) or {}, path / files.ADAPTER_CONFIG_FILE)
        weights = read_weights(path, state, self.model)
        if only_weights:
            self.placement.scatter(weights, state.parameters)
            state.start_window()
            return
        if not (path / files.TRAINING_FILE).exists() and (peer := peer_state(path, state)) is not None:
            training, tensors, rng = peer.training, peer.optimizer, None
        else:
            training, tensors, rng = self._read_state(path, state)
        optimizer, _ = state.ready()
        self.placement.scatter(weights, state.parameters)
        optimizer.load(tensors, training.get("optimizer_state"), self.placement)
        if rng is not None:
            _set_rng_states(rng)
        state.load_progress(training)
        state.start_window()

    def _read_state(self, path: Path, state: AdapterState) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        training = files.read_json(path / files.TRAINING_FILE)
        files.check_settings(training, state.settings(), path / files.TRAINING_FILE)
        if ("grad_scaler" in training) != (state.scaler is not None):
            raise ConfigError(
                f"{path} was saved {'with' if state.scaler is None else 'without'} a gradient scaler; use the same mixed_precision"
            )
        expected = state.ready()[0].expected(training.get("optimizer_state"))
        tensors, rng = files.read_tensors(path / files.OPTIMIZER_FILE), files.read_tensors(path / files.RNG_FILE)
        files.check_tensors(tensors, expected, path / files.OPTIMIZER_FILE)
        files.check_tensors(rng, _rng_states(), path / files.RNG_FILE)
        return training, tensors, rng

    def upload_to_hub(self, folder: str, repository: str, token: str | None, in_background: bool) -> None:
        if self.rank != 0:
            return
        from huggingface_hub import HfApi

        if not Path(folder).is_dir():
            raise ConfigError(f"checkpoint folder {folder} does not exist on the machine of worker 0")
        api = HfApi(token=token)
        api.create_repo(repository, exist_ok=True)
        self._upload = api.run_as_future(api.upload_folder, repo_id=repository, folder_path=folder)
        if not in_background:
            self.wait_for_upload()

    def wait_for_upload(self) -> None:
        """Raises what the last upload raised."""
        if isinstance(self._upload, Future):
            self._upload.result()

    def load_weights(self, state: AdapterState, weights: Mapping[str, torch.Tensor], source: str) -> None:
        """Into an adapter that was just added, before the model is placed."""
        files.check_tensors(weights, state.parameters, Path(source))
        with torch.no_grad():
            for name, parameter in state.parameters.items():
                parameter.copy_(weights[name])


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def _set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
