"""Checkpoints behind training: the loop stops for the copy to host memory, the rest happens while it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from storage.artifact import FileEntry
from storage.fingerprint import digest_bytes
from twinkle_core.checkpoint.manifest import Attempt, Keep, Manifest, TrainerState


class Saves(Protocol):
    """What a model offers to be checkpointed (`TransformersModel` does)."""

    def begin_save(self, store_url: str, prefix: str) -> None:
        """Copies the training state to host memory and starts to write and upload it in the background."""
        ...

    def end_save(self, block: bool) -> tuple[FileEntry, ...] | None:
        """The uploaded files; None while the upload still runs and `block` is false. Raises what the upload raised."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Pending:
    state: TrainerState
    history: bytes


class Checkpointer:
    """Saves every `save_every` optimizer steps and at the end; at most one save is in flight."""

    def __init__(self, attempt: Attempt, model: Saves, *, save_every: int, keep: Keep) -> None:
        self._attempt, self._model, self._save_every, self._keep = attempt, model, save_every, keep
        self._pending: _Pending | None = None
        self.newest: Manifest | None = None

    def is_due(self, state: TrainerState) -> bool:
        """Whether `after_step` saves; every step where it does has to be told."""
        return state.cur_step % self._save_every == 0

    def after_step(self, state: TrainerState, history: Sequence[dict[str, Any]]) -> None:
        """Commits an upload that has finished; starts the next one when it is due. Not every step need be told."""
        due = self.is_due(state)
        self._commit(block=due)
        if due:
            self._begin(state, history)

    def finish(self, state: TrainerState, history: Sequence[dict[str, Any]]) -> Manifest:
        """The committed checkpoint of the last step."""
        self._commit(block=True)
        if self.newest is None or self.newest.step != state.cur_step:
            self._begin(state, history)
            self._commit(block=True)
        assert self.newest is not None
        return self.newest

    def _begin(self, state: TrainerState, history: Sequence[dict[str, Any]]) -> None:
        # Fenced before the copy, so that an overtaken attempt stops early; commit checks again.
        self._attempt.check_current()
        self._model.begin_save(self._attempt.store.url, self._attempt.prefix(state.cur_step))
        self._pending = _Pending(state=state, history=history_bytes(history))

    def _commit(self, block: bool) -> None:
        if self._pending is None or (files := self._model.end_save(block)) is None:
            return
        state = self._pending.state
        prefix = self._attempt.prefix(state.cur_step)
        extra = {"trainer_state.json": state.to_json(), "history.jsonl": self._pending.history}
        entries = list(files)
        for name, data in extra.items():
            self._attempt.store.put(f"{prefix}/{name}", data)
            # Volatile: clock times and the world they ran in are verified, but are not what the training computed.
            entries.append(FileEntry(path=name, size=len(data), sha256=digest_bytes(data), volatile=True))
        self._pending = None
        self.newest = self._attempt.commit(step=state.cur_step, files=tuple(entries), state=state, keep=self._keep)


def history_bytes(history: Sequence[dict[str, Any]]) -> bytes:
    """Metric rows as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in history)


def read_history(data: bytes) -> list[dict[str, Any]]:
    """The rows that `history_bytes` wrote."""
    return [json.loads(line) for line in data.splitlines()]
