"""From an `ArtifactRef` to its record and its files on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage.artifact import ArtifactRecord, ArtifactRef, SourceRef, read_record
from storage.errors import NotFoundError
from storage.transfer import local_folder
from tasks.context import Context


def record_of(context: Context, ref: ArtifactRef) -> ArtifactRecord:
    """The record behind a ref. Raises `NotFoundError` when it is gone."""
    record = read_record(context.store, ref.stage, ref.key)
    if record is None:
        raise NotFoundError(f"artifact {ref.stage} {ref.key[:12]} is no longer in {context.settings.store_url}; run the flow again")
    return record


def folder_of(context: Context, ref: ArtifactRef) -> Path:
    """The artifact's files as a local folder: in place where the store is local, else fetched once and verified."""
    record = record_of(context, ref)
    return local_folder(context.store, record.prefix, record.files, context.cache / "artifacts")


def read_json(context: Context, ref: ArtifactRef, name: str) -> Any:
    """One JSON file of an artifact."""
    return json.loads((folder_of(context, ref) / name).read_text(encoding="utf-8"))


def lineage(context: Context, ref: ArtifactRef) -> Iterator[tuple[str, ArtifactRecord | SourceRef]]:
    """(name, record or source) of everything an artifact was made from, itself first, each once."""
    seen: set[str] = set()
    waiting: list[tuple[str, ArtifactRef | SourceRef]] = [(ref.stage, ref)]
    while waiting:
        name, node = waiting.pop(0)
        identity = node.key if isinstance(node, ArtifactRef) else f"{node.name} {node.digest}"
        if identity in seen:
            continue
        seen.add(identity)
        if isinstance(node, SourceRef):
            yield name, node
            continue
        record = record_of(context, node)
        yield name, record
        waiting += list(record.inputs.items())
