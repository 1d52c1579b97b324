"""Saving and restoring what a model trains: the driver's side; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import ConfigError, DamagedError, TwinkleError
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.model.metrics import AdapterMetrics

if TYPE_CHECKING:
    import numpy as np

    from storage.artifact import FileEntry

TRAINER_STATE_FILE = "trainer_state.json"
WAIT_SECONDS = 0.5
"""How long a worker waits for its own part of a save, or for an upload, before it asks how the others' went."""
STATE_KEYS = ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")


class ModelSaving:
    """The part of a model's driver that saves and restores one adapter, or all parameters."""

    _group: WorkerGroup
    _uploads: bool = False
    """Whether an upload was begun that nobody waited for."""
    _is_saving = False

    def _metrics_of(self, adapter_name: str | None) -> AdapterMetrics:
        raise NotImplementedError

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, np.ndarray]:
        """The trained parameters by the names they have in a checkpoint, float32."""
        result: dict[str, np.ndarray] = self._group.call("get_state_dict", adapter_name, collect="first")
        return result

    def get_peft_config_dict(self, adapter_name: str | None = None) -> dict[str, Any]:
        """The adapter's settings as in `adapter_config.json`."""
        result: dict[str, Any] = self._group.call("get_peft_config_dict", adapter_name, collect="first")
        return result

    def begin_save(self, store_url: str, prefix: str, *, adapter_name: str | None = None) -> None:
        """Copies the training state to host memory and starts writing and uploading it under `prefix` of the store.

        Training may go on at once. Worker 0 has all to write, or, where tensors lie in parts on several workers, each its own share.
        One save at a time: call `end_save` in between. A window that is not full is stepped first.
        """
        if self._is_saving:
            raise ConfigError("a save is under way: call end_save before the next begin_save")
        self._group.call("close_window", adapter_name)
        self._group.call("begin_save", store_url, prefix, adapter_name)
        self._is_saving = True

    def end_save(self, block: bool = True) -> tuple[FileEntry, ...] | None:
        """The files of the save that was begun, of all workers, once all are done; None while one runs (`block=False`) or none was begun.

        Raises what the save raised on any worker, as soon as it did; the next save may then begin.
        """
        if not self._is_saving:
            return None
        self._is_saving = False  # also where what follows raises
        is_done = False
        while not is_done:
            answers: Sequence[bool | OSError] = self._group.call("wait_for_save", WAIT_SECONDS if block else 0.0)
            for answer in answers:
                if isinstance(answer, OSError):
                    raise answer
            is_done = all(answers)
            if not is_done and not block:
                self._is_saving = True
                return None
        parts: Sequence[Sequence[FileEntry]] = self._group.call("end_save")
        return tuple(sorted((entry for part in parts for entry in part), key=lambda entry: entry.path))

    def restore(self, folder: str | Path, *, only_weights: bool = False, adapter_name: str | None = None) -> None:
        """Loads weights, optimizer, schedule, step and RNG states. Set up adapter, optimizer and schedule first, as they were.

        Raises `DataError` naming each missing, unexpected or misshapen tensor, `ConfigError` for other settings than
        the saved ones, and `DamagedError` for files that cannot be read; nothing is changed then.
        """
        self._group.call("restore", str(folder), only_weights, adapter_name)
        self._metrics_of(adapter_name).forget_training()

    def restore_from(self, store_url: str, prefix: str, entries: Sequence[FileEntry], *, adapter_name: str | None = None) -> None:
        """As `restore`, from a checkpoint in a store: every worker fetches and verifies the files that it reads from."""
        self._group.call("restore_from", store_url, prefix, tuple(entries), adapter_name)
        self._metrics_of(adapter_name).forget_training()

    def save(
        self,
        name: str | None = None,
        output_dir: str | Path = "output",
        interval: int = 1,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = True,
        consumed_train_samples: int = 0,
        gradient_accumulation_steps: int | None = None,
    ) -> Path | None:
        """Writes the folder `output_dir/name`, which appears whole or not at all; an existing one is refused. Gives the folder.

        `name` None stands for 'checkpoint-step-N' after N optimizer steps. With `interval` n nothing is saved, and None given,
        unless N is a multiple of n. An accumulation window that is not full is stepped first: a checkpoint holds all that was
        learnt from, and the last, short window of a run is not lost. `save_optimizer=False` leaves out what only a resume needs.
        Weights are whole in every case; of a model that lies in parts on several machines `output_dir` must be one that all of them see.
        """
        if name is not None and (Path(name).name != name or name in ("", ".", "..")):
            raise ConfigError(f"checkpoint name {name!r} must be a plain folder name")
        if interval < 1:
            raise ConfigError(f"interval is {interval}; at least 1 is needed")
        step: int = self._group.call("get_step", adapter_name, collect="first")
        if step % interval:
            return None
        step = self._group.call("close_window", adapter_name, collect="first")
        accumulation = gradient_accumulation_steps or self._group.call("get_accumulation", adapter_name, collect="first")
        state = {"consumed_train_samples": consumed_train_samples, "gradient_accumulation_steps": accumulation}
        folder = Path(output_dir).absolute() / (name or f"checkpoint-step-{step}")
        return Path(self._group.call("save", str(folder), state, save_optimizer, adapter_name, collect="first"))

    def load(
        self, name: str | Path, output_dir: str | Path | None = None, *, load_optimizer: bool = False, adapter_name: str | None = None
    ) -> None:
        """Weights of a folder (`output_dir/name`, or `name`): ours, PEFT's, HF Trainer's or Twinkle's; with `load_optimizer` all of it."""
        folder = Path(name) if output_dir is None else Path(output_dir) / name
        if not folder.is_dir():
            raise ConfigError(f"checkpoint folder {folder} does not exist here")
        self.restore(folder.absolute(), only_weights=not load_optimizer, adapter_name=adapter_name)

    def resume_from_checkpoint(
        self, checkpoint_dir: str | Path, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """Restores a folder of `save`. Gives cur_step, consumed_train_samples and gradient_accumulation_steps.

        With `resume_only_model` the weights alone are restored, and the numbers still given. HF Trainer's folders do not hold
        how many rows were consumed: use `load`.
        """
        path = Path(checkpoint_dir) / TRAINER_STATE_FILE
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DamagedError(f"{path} cannot be read ({error}): the checkpoint is not whole, use another") from error
        missing = [key for key in STATE_KEYS if key not in state]
        if missing:
            raise ConfigError(f"{path} has no {', '.join(missing)}: it is no folder of ours or Twinkle's; use load(…, load_optimizer=True)")
        self.restore(checkpoint_dir, only_weights=resume_only_model, adapter_name=adapter_name)
        step = state["cur_step"] if resume_only_model else self._group.call("get_step", adapter_name, collect="first")
        return {"cur_step": int(step)} | {key: int(state[key]) for key in STATE_KEYS[1:]}

    def upload_to_hub(
        self, checkpoint_dir: str | Path, hub_model_id: str, hub_token: str | None = None, async_upload: bool = False
    ) -> None:
        """Uploads a folder of `save`, from worker 0, whose machine holds it, to 'hf://org/name' (or 'org/name') or 'ms://org/name'.

        It appears there in one commit, or not at all. `hub_token` None: HF_TOKEN or MODELSCOPE_API_TOKEN of worker 0, or its login.
        `async_upload` uploads behind training: `wait_for_upload`, or `shutdown`, raises what failed. See `hub.upload`.
        """
        from twinkle_core.hub.upload import parse_target

        parse_target(hub_model_id)
        self._group.call("upload_to_hub", str(Path(checkpoint_dir).absolute()), hub_model_id, hub_token)
        self._uploads = True
        if not async_upload:
            self.wait_for_upload()

    def wait_for_upload(self) -> None:
        """Waits for the uploads behind training; raises what one of them raised.

        However long they take: no call to the workers lasts longer than a moment, so none of them runs into a time-out.
        """
        self._uploads = False
        is_done = False
        while not is_done:
            answers: Sequence[bool | TwinkleError] = self._group.call("wait_for_upload", WAIT_SECONDS)
            for answer in answers:
                if isinstance(answer, TwinkleError):
                    raise answer
            is_done = all(answers)
