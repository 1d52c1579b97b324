"""What a checkpoint is: files under an attempt's own prefix, a manifest that names them and its parent, and HEAD.

HEAD is the one object that moves. It holds the number of the newest attempt (its *epoch*) and the newest committed
manifest; every move is a compare-and-swap. Beginning an attempt raises the epoch, so whoever still runs under an older
one is fenced: its next commit fails, and nothing it wrote is ever seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from storage import layout
from storage.artifact import FileEntry
from storage.errors import DamagedError, FencedError, NotFoundError, StorageError
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
        """With a digest of itself: nothing else in the store says what HEAD should be."""
        plain = asdict(self)
        return json.dumps({**plain, "sha256": _digest_of(plain)}, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Head:
        """Raises `ValueError`, `KeyError` or `TypeError` for what `to_json` cannot have written. The digest may be absent (version 0.1)."""
        raw: dict[str, Any] = json.loads(data)
        plain = {"epoch": raw["epoch"], "checkpoints": raw["checkpoints"]}
        if raw.get("sha256", "") not in ("", _digest_of(plain)):
            raise ValueError("its digest is another one")
        return cls(epoch=int(plain["epoch"]), checkpoints=tuple(Committed(**line) for line in plain["checkpoints"]))


def _digest_of(plain: dict[str, Any]) -> str:
    return digest_bytes(json.dumps(plain, sort_keys=True).encode())


def read_head(store: Store, train_key: str) -> tuple[Head, str | None]:
    """HEAD and its version for compare-and-swap; an unwritten HEAD is epoch 0 with version None. `DamagedError` for an unreadable one."""
    key = layout.head_key(train_key)
    try:
        data, version = store.get_versioned(key)
    except NotFoundError:
        return Head(), None
    try:
        return Head.from_json(data), version
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{key!r} in {store.url} is damaged ({error}): run the training again, which rebuilds it") from error


Keep = Callable[[tuple[Committed, ...]], tuple[tuple[Committed, ...], tuple[Committed, ...]]]
"""Splits committed checkpoints, newest first, into those kept and those to delete."""


class Attempt:
    """One try at a training run, from `begin` until a newer one begins."""

    def __init__(self, store: Store, train_key: str, head: Head, problems: tuple[str, ...] = ()) -> None:
        self.store, self.train_key, self.head = store, train_key, head
        self.problems = problems
        """What was wrong with HEAD when the attempt began."""

    @classmethod
    def begin(cls, store: Store, train_key: str) -> Attempt:
        """A new attempt with the next epoch; every older attempt is fenced from here on.

        A HEAD that is damaged, missing although there are checkpoints, or older than an attempt that wrote some is rebuilt from the
        manifests (see `rebuild`): the next number after an old HEAD's may be that of an attempt which still runs.
        """
        from twinkle_core.checkpoint.rebuild import newest_writer, rebuilt_head

        while True:
            problems: tuple[str, ...] = ()
            try:
                head, version = read_head(store, train_key)
                if version is None:
                    head, problems = rebuilt_head(store, train_key, None)
                elif (newest := newest_writer(store, train_key)) > head.epoch:
                    damage = f"it is at attempt {head.epoch}, and attempt {newest} wrote files"
                    head, problems = rebuilt_head(store, train_key, damage)
            except DamagedError as error:
                version = store.get_versioned(layout.head_key(train_key))[1]
                head, problems = rebuilt_head(store, train_key, str(error.__cause__))
            mine = replace(head, epoch=head.epoch + 1)
            if store.compare_and_swap(layout.head_key(train_key), mine.to_json(), version):
                return cls(store, train_key, mine, problems)

    @property
    def epoch(self) -> int:
        return self.head.epoch

    def is_current(self) -> bool:
        """Whether no newer attempt has begun."""
        return read_head(self.store, self.train_key)[0].epoch == self.epoch

    def prefix(self, step: int) -> str:
        """Where this attempt writes the files of a step: nobody else ever writes there."""
        return layout.checkpoint_prefix(self.train_key, step, self.epoch)

    def check_current(self) -> tuple[Head, str | None]:
        """HEAD and its version. Raises `FencedError` when a newer attempt has begun, `DamagedError` when HEAD is gone."""
        head, version = read_head(self.store, self.train_key)
        if head.epoch > self.epoch:
            raise FencedError(
                f"training {self.train_key[:12]}: attempt {self.epoch} was overtaken by attempt {head.epoch}; "
                f"it commits nothing more. Let the newer attempt finish."
            )
        if head.epoch < self.epoch:
            raise DamagedError(
                f"{layout.head_key(self.train_key)!r} in {self.store.url} is at attempt {head.epoch} though attempt {self.epoch} runs: "
                "it was lost, or put back to an older one. Run the training again, which rebuilds it"
            )
        return head, version

    def commit(self, *, step: int, files: tuple[FileEntry, ...], state: TrainerState, keep: Keep) -> Manifest:
        """Writes the manifest, moves HEAD to it, then deletes the checkpoints that `keep` no longer lists.

        The caller has verified `files`. Manifest and HEAD are read back: what a store did not keep is not believed, and nothing is
        deleted on its word. What then cannot be deleted is left to `artifacts gc`: the checkpoint is committed all the same. Raises
        `FencedError`, with nothing visible changed, when a newer attempt has begun.
        """
        head, version = self.check_current()
        if (standing := self._standing(head, step, files)) is not None:
            return standing
        older = tuple(line for line in head.checkpoints if line.step < step)
        parent = older[0].manifest if older else None
        manifest = Manifest(step=step, epoch=self.epoch, prefix=self.prefix(step), parent=parent, files=files, state=state)
        data = manifest.to_json()
        self.store.put(manifest.key, data)
        self._read_back(manifest.key, data)
        mine = Committed(step=step, manifest=manifest.key, sha256=digest_bytes(data))
        kept, gone = keep((mine, *older))
        self._move_head(replace(head, checkpoints=kept), version, mine)
        for line in gone:
            with suppress(OSError):
                self._delete(line)
        return manifest

    def _standing(self, head: Head, step: int, files: tuple[FileEntry, ...]) -> Manifest | None:
        """The checkpoint of this step, where this attempt committed it and the store did not say so: a manifest that HEAD lists is not
        written again, for between that and the move of HEAD it would look damaged."""
        key = layout.checkpoint_manifest_key(self.prefix(step))
        digests = [line.sha256 for line in head.checkpoints if line.manifest == key]
        if not digests or not self.store.exists(key):
            return None
        data = self.store.get(key)
        manifest = Manifest.from_json(data) if digest_bytes(data) == digests[0] else None
        return manifest if manifest is not None and manifest.files == files else None

    def _move_head(self, head: Head, version: str | None, mine: Committed) -> None:
        """Raises `FencedError` when another moved it, `DamagedError` when the store says that it is moved and it is not."""
        try:
            moved = self.store.compare_and_swap(layout.head_key(self.train_key), head.to_json(), version)
        except StorageError:  # the answer may be lost and the write done: only HEAD itself tells
            if mine not in read_head(self.store, self.train_key)[0].checkpoints:
                raise
            moved = True
        found, _ = self.check_current()
        if not moved:
            raise FencedError(f"training {self.train_key[:12]}: HEAD was moved by another writer within attempt {self.epoch}")
        if found != head:
            key = layout.head_key(self.train_key)
            raise DamagedError(f"{self.store.url} said that {key!r} was written, but holds another: not committed")
        self.head = head

    def _read_back(self, key: str, data: bytes) -> None:
        try:
            found = self.store.get(key)
        except NotFoundError:
            found = b""
        if found != data:
            raise DamagedError(
                f"{self.store.url} said that {key!r} was written, but holds {len(found)} bytes of {len(data)}, or others: not committed"
            )

    def _delete(self, line: Committed) -> None:
        try:
            manifest = Manifest.from_json(self.store.get(line.manifest))
        except (NotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return  # damaged: `artifacts gc` finds its files by their place
        for entry in manifest.files:
            self.store.delete(f"{manifest.prefix}/{entry.path}")
        self.store.delete(line.manifest)
