"""Datasets of Hugging Face's hub (hf://) and of ModelScope's (ms://), at a pinned revision, read by our own readers.

The readers of `datasets` round long integers to floats and merge the tools of different rows; only its choice of files is used.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.sources.data_file import DataFile, LocalContent, typed
from twinkle_core.preprocessor.sources.file_source import digest_of, rows_of
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row, raising
from twinkle_core.preprocessor.sources.split_files import CARDS, split_files

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """What a hub states of one file."""

    size: int
    """Bytes."""
    sha256: str | None
    blob_id: str | None
    """git's name of the content, where the hub states no sha256."""


class DatasetHub(Protocol):
    """One hub. All raise `ConfigError` for what is not there, and `StorageError` when the hub cannot be used."""

    def commit(self, repo: str, revision: str) -> str:
        """What `revision` stands for: the commit, or the revision itself where the hub tells none."""
        ...

    def files(self, repo: str, commit: str) -> dict[str, HubFile]:
        """All files of the repository, by name."""
        ...

    def fetch(self, repo: str, commit: str, name: str, stated: HubFile, cache: Path | None) -> Path:
        """The file on this machine, verified. Raises `DamagedError` when its bytes are not as stated."""
        ...


@dataclass(frozen=True, kw_only=True)
class HubAddress:
    """'hf://org/name@revision?subset=…&split=…', in parts."""

    scheme: str
    repo: str
    revision: str
    subset: str | None
    split: str | None

    @classmethod
    def parse(cls, source: str, uri: str) -> HubAddress:
        """Raises `ConfigError` naming the part that is wrong or missing."""
        scheme, _, rest = uri.partition("://")
        path, _, query = rest.partition("?")
        repo, _, revision = path.partition("@")
        form = f"{scheme}://organisation/name@revision?subset=…&split=…"
        if not _REPOSITORY.fullmatch(repo):
            raise ConfigError(f"source '{source}': {uri!r} names no dataset; write {form}")
        if not revision:
            raise ConfigError(
                f"source '{source}': {uri!r} has no revision, and what a dataset holds changes over time; write {scheme}://{repo}@REVISION "
                "with a commit (40 hex digits), or a tag or branch, which is looked up anew for each run"
            )
        pairs = parse_qsl(query, keep_blank_values=True)
        values = dict(pairs)
        if len(values) != len(pairs) or not all(values.values()) or not set(values) <= {"subset", "split"}:
            raise ConfigError(f"source '{source}': {uri!r} may have subset and split after '?', each once and not empty; write {form}")
        return cls(scheme=scheme, repo=repo, revision=revision, subset=values.get("subset"), split=values.get("split"))


class HubSource:
    """The rows of one split of a dataset. The hub is asked at the first use, and its answer then stays."""

    def __init__(self, name: str, address: HubAddress, hub: DatasetHub, cache: Path | None) -> None:
        self.name, self.address, self.hub, self.cache = name, address, hub, cache

    @classmethod
    def parse(cls, name: str, uri: str, cache: Path | None) -> HubSource:
        """From 'hf://…' or 'ms://…'. Raises `ConfigError` for an address without a revision, or otherwise wrong."""
        address = HubAddress.parse(name, uri)
        return cls(name, address, _hub(address.scheme), cache)

    @cached_property
    def commit(self) -> str:
        """The commit that the revision stood for when it was asked."""
        pinned = _COMMIT.fullmatch(self.address.revision)
        return self.address.revision if pinned else self.hub.commit(self.address.repo, self.address.revision)

    @property
    def pinned_uri(self) -> str:
        """The address with the commit, for records: others find the same rows there."""
        parts = {"subset": self.address.subset, "split": self.address.split}
        query = "&".join(f"{key}={value}" for key, value in parts.items() if value)
        return f"{self.address.scheme}://{self.address.repo}@{self.commit}" + (f"?{query}" if query else "")

    @cached_property
    def files(self) -> list[DataFile]:
        """The split's files, fetched and verified."""
        where = f"{self.address.scheme}://{self.address.repo}@{self.commit}"
        stated = self._stated()
        cards = {name: self._fetch(name, stated).read_bytes() for name in CARDS if name in stated}
        names = split_files(where, stated, cards, self.address.subset, self.address.split)
        types = [typed(self.name, name) for name in names]  # before anything large is fetched
        return [
            DataFile(name, LocalContent(self._fetch(name, stated)), kind, loose_json=True) for name, kind in zip(names, types, strict=True)
        ]

    def digest(self) -> str:
        """Of the files' bytes, as for files that lie anywhere else."""
        return digest_of(self.files)

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[Place, Row]]:
        """Rows as `Source` says. Raises `DataError` when there are none."""
        return rows_of(self.name, self.files, on_bad_row or raising(self.name))

    def _fetch(self, name: str, stated: dict[str, HubFile]) -> Path:
        return self.hub.fetch(self.address.repo, self.commit, name, stated[name], self.cache)

    def _stated(self) -> dict[str, HubFile]:
        """The repository's files; those of a commit are written down, so that it is asked for once."""
        if self.cache is None or not _COMMIT.fullmatch(self.commit):
            return self.hub.files(self.address.repo, self.commit)
        listing = self.cache / "listings" / f"{self.address.scheme}--{self.address.repo.replace('/', '--')}@{self.commit}.json"
        try:
            return {name: HubFile(**file) for name, file in json.loads(listing.read_text(encoding="utf-8")).items()}
        except (FileNotFoundError, ValueError, TypeError):
            files = self.hub.files(self.address.repo, self.commit)
        listing.parent.mkdir(parents=True, exist_ok=True)
        temporary = listing.with_name(f".{uuid.uuid4().hex}")
        temporary.write_text(json.dumps({name: asdict(file) for name, file in files.items()}), encoding="utf-8")
        os.replace(temporary, listing)
        return files


def _hub(scheme: str) -> DatasetHub:
    client = {"hf": "huggingface_hub", "ms": "modelscope_hub"}[scheme]
    if missing := [name for name in ("datasets", client) if find_spec(name) is None]:
        raise ConfigError(f"{scheme}:// needs {' and '.join(missing)}: run `pip install 'twinkle-flows[data]'`")
    if scheme == "ms":
        from twinkle_core.preprocessor.sources.modelscope import ModelScopeHub

        return ModelScopeHub()
    from twinkle_core.preprocessor.sources.huggingface import HuggingFaceHub

    return HuggingFaceHub()
