"""HEAD made anew from the manifests, when HEAD itself is damaged, gone, or put back to an older one.

Without HEAD nothing outside a manifest tells whether it is whole. It has to agree with the place where it lies and with the state file
that it names by digest; its files are verified before use, as always. A checkpoint that was written whole but not committed counts:
the same recipe and inputs made it. Steps and attempts are compared as numbers, and other names are left alone.
"""

from __future__ import annotations

import re

from storage import layout
from storage.errors import NotFoundError
from storage.fingerprint import digest_bytes
from storage.store import Store
from twinkle_core.checkpoint.manifest import Committed, Head, Manifest

STATE_FILE = "trainer_state.json"
UNSEEN_ATTEMPTS = 100
"""Attempts that may have begun, or still run, without a file that shows their number."""
_PLACE = re.compile(r"step-(\d+)-e(\d+)")


def rebuilt_head(store: Store, train_key: str, damage: str | None) -> tuple[Head, tuple[str, ...]]:
    """(HEAD, what to tell). `damage` is what is wrong with HEAD, None where it is missing.

    Where it is missing and nothing of the training is in the store, the training is new: an empty HEAD, and nothing to tell. A damaged one
    says that attempts have begun, whatever they left.
    """
    places = _places(store, train_key)
    if not places and damage is None:
        return Head(), ()
    reason = "is missing" if damage is None else f"was damaged ({damage})"
    lines, problems = [], [f"{layout.head_key(train_key)!r} {reason}; it is rebuilt from the checkpoints in {store.url}"]
    for step, epoch in places:
        key = layout.checkpoint_manifest_key(layout.checkpoint_prefix(train_key, step, epoch))
        try:
            data = store.get(key)
        except NotFoundError:
            continue  # a save that was cut off
        if problem := _problem(data, step, epoch, key):
            problems.append(f"checkpoint of step {step} is not used: {key} {problem}")
        else:
            lines.append(Committed(step=step, manifest=key, sha256=digest_bytes(data)))
    return Head(epoch=max((epoch for _, epoch in places), default=0) + UNSEEN_ATTEMPTS, checkpoints=tuple(lines)), tuple(problems)


def newest_writer(store: Store, train_key: str) -> int:
    """Number of the newest attempt that has files in the store; 0 where none has. HEAD knew it before it wrote the first."""
    return max((epoch for _, epoch in _places(store, train_key)), default=0)


def _places(store: Store, train_key: str) -> list[tuple[int, int]]:
    """(Step, attempt) of each checkpoint that was at least begun, newest first."""
    top = layout.attempts_prefix("train", train_key)
    names = {info.key[len(top) + 1 :].split("/")[0] for info in store.list(top)}
    return sorted(((int(found[1]), int(found[2])) for name in names if (found := _PLACE.fullmatch(name))), reverse=True)


def _problem(data: bytes, step: int, epoch: int, key: str) -> str | None:
    try:
        manifest = Manifest.from_json(data)
        state = digest_bytes(manifest.state.to_json())
        named = [entry.sha256 for entry in manifest.files if entry.path == STATE_FILE]
        if (manifest.step, manifest.epoch, manifest.key) != (step, epoch, key):
            return "says that it lies elsewhere"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"cannot be read ({error})"
    return None if named == [state] else f"disagrees with {STATE_FILE}"
