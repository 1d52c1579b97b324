"""The only cache: a stage's result is looked up by its key, believed when its bytes are verified, and computed otherwise.

key → record there and its files whole?    → reused
    → somebody alive computes it?          → wait, then look again
    → lease taken → compute → upload under an attempt's own name → one conditional put of the record
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage import layout
from storage.artifact import (
    ArtifactRecord,
    ArtifactRef,
    FileEntry,
    SourceRef,
    artifact_key,
    commit_record,
    list_records,
    read_record,
    verify_record,
)
from storage.errors import DamagedError
from storage.fingerprint import fingerprint
from storage.lease import Holder, acquire, read_lease
from storage.transfer import upload_folder
from tasks.context import Context, provenance

POLL_SECONDS = 1.0
MAX_SHOWN = 60
"""Characters of a setting shown in a difference."""
Inputs = Mapping[str, ArtifactRef | SourceRef]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the pipeline."""

    name: str
    version: int
    """Raised when the stage's output changes for the same recipe and inputs."""
    modules: tuple[str, ...]
    """Modules whose code makes the output; a test notices when they change without a new version."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An artifact that is asked for: what would make it."""

    stage: Stage
    recipe: dict[str, Any]
    inputs: Inputs

    @property
    def key(self) -> str:
        return artifact_key(self.stage.name, self.stage.version, self.recipe, self.inputs)


@dataclass(frozen=True, kw_only=True)
class Produced:
    """What a computation made."""

    summary: dict[str, Any] = field(default_factory=dict)
    volatile: Collection[str] = ()
    """Names of files that a replay does not repeat to the bit (clock times)."""
    stored: tuple[str, tuple[FileEntry, ...]] | None = None
    """(attempt, files) already in the store under the stage's data prefix; None uploads the work folder."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A stage's artifact, and how it came about."""

    ref: ArtifactRef
    record: ArtifactRecord
    reused: bool
    reason: str


def run_step(
    context: Context,
    wanted: Wanted,
    *,
    compute: Callable[[str, Path], Produced],
    say: Callable[[str], None],
    check: Callable[[ArtifactRecord], list[str]] = lambda _: [],
) -> StepResult:
    """The wanted artifact. `compute(key, work_folder)` runs only when it must.

    `check` names further reasons not to believe a record whose files are whole (a release that was deleted, say).
    """
    store, stage, key = context.store, wanted.stage.name, wanted.key
    # Marked before anything is looked up: `artifacts gc` leaves alone what a run in progress uses.
    store.put(layout.run_use_key(context.spec.run_id, stage, key), b"")
    waited = False
    while True:
        record, damage = sound_record(context, stage, key, check)
        if record is not None and not damage:
            return _reused(context, record)
        lease = acquire(store, layout.lease_key(stage, key), Holder.here())
        if lease is None:
            if not waited:
                say(f"{stage} {key[:12]} is being computed by {describe_holder(context, stage, key)}; waiting for it")
                waited = True
            time.sleep(POLL_SECONDS)
            continue
        with lease:
            # Another run may have committed between the look and the lease.
            record, damage = sound_record(context, stage, key, check)
            if record is not None and not damage:
                return _reused(context, record)
            reason = "; ".join(damage) if damage else explain(context, wanted)
            say(f"{stage}: computing ({reason})")
            made = _compute(context, wanted, compute, replaces=record)
        return StepResult(ref=made.ref(store.url), record=made, reused=False, reason=reason)


def _reused(context: Context, record: ArtifactRecord) -> StepResult:
    reason = f"reused {record.stage} {record.key[:12]} made by run {record.provenance.get('run_id', '?')}"
    return StepResult(ref=record.ref(context.store.url), record=record, reused=True, reason=reason)


def _compute(context: Context, wanted: Wanted, compute: Callable[[str, Path], Produced], replaces: ArtifactRecord | None) -> ArtifactRecord:
    stage, key = wanted.stage.name, wanted.key
    attempt = uuid.uuid4().hex[:12]
    work = context.scratch / f"{stage}-{key[:12]}-{attempt}"
    work.mkdir(parents=True)
    try:
        produced = compute(key, work)
        if produced.stored is not None:
            attempt, files = produced.stored
        else:
            files = upload_folder(context.store, work, layout.data_prefix(stage, key, attempt), volatile=produced.volatile)
        record = ArtifactRecord(
            stage=stage,
            version=wanted.stage.version,
            key=key,
            attempt=attempt,
            recipe=wanted.recipe,
            inputs=dict(wanted.inputs),
            files=files,
            summary=produced.summary,
            provenance=provenance(context.spec),
        )
        standing, _ = commit_record(context.store, record, replaces=replaces)
        return standing
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sound_record(
    context: Context, stage: str, key: str, check: Callable[[ArtifactRecord], list[str]] = lambda _: []
) -> tuple[ArtifactRecord | None, list[str]]:
    """The record under this key and what is wrong with it: (None, []) when there is none."""
    try:
        record = read_record(context.store, stage, key)
    except DamagedError as error:
        return None, [str(error)]
    if record is None:
        return None, []
    return record, verify_record(context.store, record) or check(record)


def explain(context: Context, wanted: Wanted) -> str:
    """Why there is no artifact to reuse: the field-level difference to the nearest existing one."""
    stage = wanted.stage
    mine = _facts(stage.version, wanted.recipe, wanted.inputs)
    best: tuple[int, float, list[str], str] | None = None
    for record in list_records(context.store, stage.name, skip_unreadable=True):
        theirs = _facts(record.version, record.recipe, record.inputs)
        changes = [
            f"{name}: {theirs.get(name)} → {mine.get(name)}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]
        candidate = (len(changes), -float(record.provenance.get("created", 0)), changes, record.key)
        best = candidate if best is None or candidate[:2] < best[:2] else best
    if best is None:
        return f"no {stage.name} artifact exists yet"
    return f"nearest is {best[3][:12]}, differing in " + "; ".join(best[2])


def _facts(version: int, recipe: Mapping[str, Any], inputs: Inputs) -> dict[str, str]:
    flat = {"VERSION": str(version)}
    _flatten(recipe, "", flat)
    for name, ref in inputs.items():
        flat[f"input {name}"] = ref.digest[:12]
    return flat


def _flatten(value: Any, path: str, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(inner, f"{path}.{key}" if path else key, into)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for i, inner in enumerate(value):
            _flatten(inner, f"{path}[{i}]", into)
    else:
        text = repr(value)
        into[path] = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}… ({fingerprint(value)[:8]})"


def describe_holder(context: Context, stage: str, key: str) -> str:
    """Who holds the lease, for people."""
    info = read_lease(context.store, layout.lease_key(stage, key))
    return f"process {info.holder.pid} on {info.holder.host}" if info is not None else "another run"
