"""What a checkpoint is: files under an attempt's own prefix, a manifest that names them and its parent, and HEAD.

HEAD is the one object that moves. It holds the number of the newest attempt (its *epoch*) and the newest committed
manifest; every move is a compare-and-swap. Beginning an attempt raises the epoch, so whoever still runs under an older
one is fenced: its next commit fails, and nothing it wrote is ever seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from storage import layout
from storage.artifact import FileEntry
from storage.errors import FencedError, NotFoundError
from storage.fingerprint import digest_bytes
from storage.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """How far training is, after a completed optimizer step. Stored as `trainer_state.json`.

    Example: 3 steps of 8 rows over an epoch of 20 rows give `cur_step=3, consumed_train_samples=24, epoch=1.2`.
    """

    cur_step: int = 0
    """Completed optimizer steps."""
    consumed_train_samples: int = 0
    """Packed rows handed to completed optimizer steps, over all epochs: the whole data cursor."""
    consumed_train_documents: int = 0
    consumed_train_tokens: int = 0
    epoch: float = 0.0
    """Passes over the data, as a fraction."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of a full optimizer step on the busiest worker."""
    world_size: int = 1
    recipe_fingerprint: str = ""
    """Key of the training artifact: sha256 over recipe and inputs."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A committed checkpoint: which files, made by which attempt, after which other one."""

    step: int
    epoch: int
    """Number of the attempt that made it."""
    prefix: str
    """Where the files lie in the store."""
    parent: str | None
    """Key of the manifest it follows."""
    files: tuple[FileEntry, ...]
    state: TrainerState

    @property
    def key(self) -> str:
        return layout.checkpoint_manifest_key(self.prefix)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        raw = json.loads(data)
        files = tuple(FileEntry(**entry) for entry in raw.pop("files"))
        return cls(files=files, state=TrainerState(**raw.pop("state")), **raw)


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """One line of HEAD."""

    step: int
    manifest: str
    """Key of the manifest in the store."""
    sha256: str
    """Digest of the manifest's bytes, which in turn hold the digests of the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The object that moves: the newest attempt, and the committed checkpoints that are kept, newest first."""

    epoch: int = 0
    checkpoints: tuple[Committed, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


def read_head(store: Store, train_key: str) -> tuple[Head, str | None]:
    """HEAD and its version for compare-and-swap; an unwritten HEAD is epoch 0 with version None."""
    try:
        data, version = store.get_versioned(layout.head_key(train_key))
    except NotFoundError:
        return Head(), None
    raw: dict[str, Any] = json.loads(data)
    return Head(epoch=raw["epoch"], checkpoints=tuple(Committed(**line) for line in raw["checkpoints"])), version


Keep = Callable[[tuple[Committed, ...]], tuple[tuple[Committed, ...], tuple[Committed, ...]]]
"""Splits committed checkpoints, newest first, into those kept and those to delete."""


class Attempt:
    """One try at a training run, from `begin` until a newer one begins."""

    def __init__(self, store: Store, train_key: str, head: Head) -> None:
        self.store, self.train_key, self.head = store, train_key, head

    @classmethod
    def begin(cls, store: Store, train_key: str) -> Attempt:
        """A new attempt with the next epoch; every older attempt is fenced from here on."""
        while True:
            head, version = read_head(store, train_key)
            mine = replace(head, epoch=head.epoch + 1)
            if store.compare_and_swap(layout.head_key(train_key), mine.to_json(), version):
                return cls(store, train_key, mine)

    @property
    def epoch(self) -> int:
        return self.head.epoch

    def is_current(self) -> bool:
        """Whether no newer attempt has begun."""
        return read_head(self.store, self.train_key)[0].epoch == self.epoch

    def prefix(self, step: int) -> str:
        """Where this attempt writes the files of a step: nobody else ever writes there."""
        return layout.checkpoint_prefix(self.train_key, step, self.epoch)

    def check_current(self) -> str | None:
        """HEAD's version. Raises `FencedError` when a newer attempt has begun."""
        head, version = read_head(self.store, self.train_key)
        if head.epoch != self.epoch:
            raise FencedError(
                f"training {self.train_key[:12]}: attempt {self.epoch} was overtaken by attempt {head.epoch}; "
                f"it commits nothing more. Let the newer attempt finish."
            )
        return version

    def commit(self, *, step: int, files: tuple[FileEntry, ...], state: TrainerState, keep: Keep) -> Manifest:
        """Writes the manifest, moves HEAD to it, then deletes the checkpoints that `keep` no longer lists.

        Raises `FencedError`, with nothing visible changed, when a newer attempt has begun.
        """
        version = self.check_current()
        parent = self.head.checkpoints[0].manifest if self.head.checkpoints else None
        manifest = Manifest(step=step, epoch=self.epoch, prefix=self.prefix(step), parent=parent, files=files, state=state)
        data = manifest.to_json()
        self.store.put(manifest.key, data)
        mine = Committed(step=step, manifest=manifest.key, sha256=digest_bytes(data))
        older = tuple(line for line in self.head.checkpoints if line.step < step)
        kept, gone = keep((mine, *older))
        head = replace(self.head, checkpoints=kept)
        if not self.store.compare_and_swap(layout.head_key(self.train_key), head.to_json(), version):
            self.check_current()
            raise FencedError(f"training {self.train_key[:12]}: HEAD was moved by another writer within attempt {self.epoch}")
        self.head = head
        for line in gone:
            self._delete(line)
        return manifest

    def _delete(self, line: Committed) -> None:
        try:
            manifest = Manifest.from_json(self.store.get(line.manifest))
        except NotFoundError:
            return
        for entry in manifest.files:
            self.store.delete(f"{manifest.prefix}/{entry.path}")
        self.store.delete(line.manifest)
