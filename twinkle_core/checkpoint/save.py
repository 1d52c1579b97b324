"""Checkpoints behind training: the loop stops for the copy to host memory, the rest happens while it goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from storage.artifact import FileEntry, verify_files
from storage.errors import DamagedError, StorageError
from storage.fingerprint import digest_bytes
from storage.store import Store
from twinkle_core.checkpoint.manifest import Attempt, Keep, Manifest, TrainerState
from twinkle_core.errors import TrainingError

FAILED_SAVES = 3
"""Saves that may fail in a row before the run ends: a store that is away for a while costs nothing, and days of work are never at stake."""
FINAL_PAUSES_SECONDS = (1.0, 5.0, 20.0, 60.0)
"""Before each further try of the last save: nothing comes after it that would try again."""


class Saves(Protocol):
    """What a model offers to be checkpointed (`TransformersModel` does)."""

    def begin_save(self, store_url: str, prefix: str) -> None:
        """Copies the training state to host memory and starts to write and upload it in the background."""
        ...

    def end_save(self, block: bool) -> tuple[FileEntry, ...] | None:
        """The uploaded files; None while the upload still runs and `block` is false. Raises what the upload raised."""
        ...


class _Verification:
    """A thread that writes the small files and then reads every file back from the store: no word of a store is taken for a commit."""

    def __init__(self, store: Store, prefix: str, files: tuple[FileEntry, ...], extra: Mapping[str, bytes]) -> None:
        # Volatile: clock times and the world they ran in are verified, but are not what the training computed.
        added = (FileEntry(path=name, size=len(data), sha256=digest_bytes(data), volatile=True) for name, data in extra.items())
        self.files = (*files, *added)
        self._store, self._prefix, self._extra = store, prefix, extra
        self._error: OSError | None = None
        self._is_sound = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-verification", daemon=True)
        self._thread.start()

    def done(self, *, block: bool) -> bool:
        """Whether all files are there as they should be; raises what is wrong with them, or what reading them raised."""
        if block:
            self._thread.join()
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        if not self._is_sound:
            raise TrainingError("the thread that verifies a checkpoint ended without a result and without an error")
        return True

    def _run(self) -> None:
        try:
            for name, data in self._extra.items():
                self._store.put(f"{self._prefix}/{name}", data)
            if problems := verify_files(self._store, self._prefix, self.files):
                raise DamagedError(f"{self._store.url} said that all was written, but {'; '.join(problems)}")
            self._is_sound = True
        except OSError as error:
            self._error = error


@dataclass(kw_only=True)
class _Pending:
    state: TrainerState
    history: bytes
    verification: _Verification | None = None


class Checkpointer:
    """Saves every `save_every` optimizer steps and at the end; at most one save is in flight.

    A save that fails (disk full, store away, store that did not keep what it took) is told to `say`, and training goes on: the next
    one tries again. After `FAILED_SAVES` in a row the error ends the run. The last save is tried again by itself.
    """

    def __init__(self, attempt: Attempt, model: Saves, *, save_every: int, keep: Keep, say: Callable[[str], None]) -> None:
        self._attempt, self._model, self._save_every, self._keep, self._say = attempt, model, save_every, keep, say
        self._pending: _Pending | None = None
        self._num_failed = 0
        self.newest: Manifest | None = None

    def is_due(self, state: TrainerState) -> bool:
        """Whether `after_step` saves; every step where it does has to be told."""
        return state.cur_step % self._save_every == 0

    def after_step(self, state: TrainerState, history: Sequence[dict[str, Any]]) -> None:
        """Commits an upload that has finished; starts the next one when it is due. Not every step need be told."""
        due = self.is_due(state)
        try:
            self._commit(block=due)
        except OSError as error:
            self._failed(error)
        if due:
            try:
                self._begin(state, history)
            except OSError as error:
                self._failed(error, step=state.cur_step)

    def finish(self, state: TrainerState, history: Sequence[dict[str, Any]]) -> Manifest:
        """The committed checkpoint of the last step."""
        last = f"the last checkpoint, of step {state.cur_step},"
        for pause in (*FINAL_PAUSES_SECONDS, None):
            try:
                self._commit(block=True)
                if self.newest is None or self.newest.step != state.cur_step:
                    self._begin(state, history)
                    self._commit(block=True)
                break
            except OSError as error:
                if pause is None:
                    raise StorageError(
                        f"{last} could not be saved in {len(FINAL_PAUSES_SECONDS) + 1} tries: {error}. "
                        "Mend the store and run again: training goes on from the checkpoint before"
                    ) from error
                self._pending = None
                self._say(f"{last} was not saved: {error}. It is tried again in {pause:g} s")
                time.sleep(pause)
        assert self.newest is not None
        return self.newest

    def _failed(self, error: OSError, step: int | None = None) -> None:
        step = self._pending.state.cur_step if self._pending is not None else step
        self._pending = None
        self._num_failed += 1
        if self._num_failed >= FAILED_SAVES:
            raise StorageError(
                f"{self._num_failed} checkpoints in a row could not be saved, the last one of step {step}: {error}. "
                "Mend the store and run again: training goes on from the newest checkpoint that was saved"
            ) from error
        self._say(f"the checkpoint of step {step} was not saved: {error}. Training goes on, and the next one is tried")

    def _begin(self, state: TrainerState, history: Sequence[dict[str, Any]]) -> None:
        # Fenced before the copy, so that an overtaken attempt stops early; commit checks again.
        self._attempt.check_current()
        self._model.begin_save(self._attempt.store.url, self._attempt.prefix(state.cur_step))
        self._pending = _Pending(state=state, history=history_bytes(history))

    def _commit(self, block: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        state = pending.state
        if pending.verification is None:
            files = self._model.end_save(block)
            if files is None:
                return
            extra = {"trainer_state.json": state.to_json(), "history.jsonl": pending.history}
            pending.verification = _Verification(self._attempt.store, self._attempt.prefix(state.cur_step), files, extra)
        if not pending.verification.done(block=block):
            return
        self.newest = self._attempt.commit(step=state.cur_step, files=pending.verification.files, state=state, keep=self._keep)
        self._pending = None
        self._num_failed = 0


def history_bytes(history: Sequence[dict[str, Any]]) -> bytes:
    """Metric rows as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in history)


def read_history(data: bytes) -> list[dict[str, Any]]:
    """The rows that `history_bytes` wrote."""
    return [json.loads(line) for line in data.splitlines()]
