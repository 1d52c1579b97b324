"""Artifacts: named by what made them, done when their record is there.

Files go to an attempt-scoped prefix, are verified, and one conditional put of the record commits them. A half-written
artifact has no record and so is invisible; the loser of a race reads the winner's record; a damaged one is replaced by
compare-and-swap.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from storage import layout
from storage.errors import DamagedError, NotFoundError, StorageError
from storage.fingerprint import fingerprint
from storage.store import Store
from storage.uri import check_key, join


@dataclass(frozen=True, kw_only=True)
class ArtifactRef:
    """All that travels between tasks."""

    stage: str
    key: str  # sha256 hex of what made it, see `artifact_key`
    uri: str  # of the record, for people; readers ask the store for (stage, key)
    digest: str  # sha256 hex of the content

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ArtifactRef:
        return cls(**_text_fields(cls, data))


@dataclass(frozen=True, kw_only=True)
class SourceRef:
    """An input from outside, by content."""

    name: str  # for people: no local path
    uri: str
    digest: str  # sha256 hex of the content

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceRef:
        return cls(**_text_fields(cls, data))


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of an artifact."""

    path: str  # relative to the artifact's prefix, 'a/b.txt'
    size: int  # bytes
    sha256: str
    volatile: bool = False  # timing, reports: verified, but no part of the content digest

    def __post_init__(self) -> None:
        check_key(self.path, what="file name")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileEntry:
        values = _only(cls, data)
        path, size, sha256, volatile = values["path"], values["size"], values["sha256"], values["volatile"]
        if not (isinstance(path, str) and type(size) is int and isinstance(sha256, str) and isinstance(volatile, bool)):
            raise DamagedError(f"a file entry has a field of the wrong type: {dict(data)!r}")
        return cls(path=path, size=size, sha256=sha256, volatile=volatile)


Inputs = Mapping[str, ArtifactRef | SourceRef]


@dataclass(frozen=True, kw_only=True)
class ArtifactRecord:
    """What was made, from what, by which attempt, and what it consists of."""

    stage: str
    version: int  # of the stage's code: raised when its output changes
    key: str
    attempt: str  # never used twice
    recipe: dict[str, Any]
    inputs: Inputs
    files: tuple[FileEntry, ...]
    summary: dict[str, Any]  # numbers for people and for later stages
    provenance: dict[str, Any]  # who, when, with which versions; never in the key

    def __post_init__(self) -> None:
        names = [entry.path for entry in self.files]
        if len(set(names)) != len(names):
            raise StorageError(f"the record of {self.stage} {self.key} lists a file twice: {sorted(names)}")

    @property
    def prefix(self) -> str:
        """Where its files are in the store."""
        return layout.data_prefix(self.stage, self.key, self.attempt)

    @property
    def digest(self) -> str:
        """sha256 over the stage and the non-volatile (path, sha256) pairs: same content, same digest, whoever made it."""
        return fingerprint({"stage": self.stage, "files": sorted([entry.path, entry.sha256] for entry in self.files if not entry.volatile)})

    def ref(self, store_url: str) -> ArtifactRef:
        uri = join(store_url, layout.record_key(self.stage, self.key))
        return ArtifactRef(stage=self.stage, key=self.key, uri=uri, digest=self.digest)

    def to_json(self) -> dict[str, Any]:
        inputs = {name: {"kind": _KINDS[type(ref)], **ref.to_json()} for name, ref in sorted(self.inputs.items())}
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "inputs": inputs, "files": [entry.to_json() for entry in self.files], "digest": self.digest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ArtifactRecord:
        """DamagedError for an unknown or missing field, a wrong type, or a digest that the files do not give."""
        values = _only(cls, data, "digest")
        wanted = {"version": int, "inputs": dict, "files": list, "recipe": dict, "summary": dict, "provenance": dict}
        for name, value in values.items():
            if type(value) is not wanted.get(name, str):
                raise DamagedError(f"field {name!r} of a record is a {type(value).__name__}, not a {wanted.get(name, str).__name__}")
        digest = values.pop("digest")
        values["inputs"] = {name: _input_from_json(name, ref) for name, ref in values["inputs"].items()}
        values["files"] = tuple(FileEntry.from_json(entry) for entry in values["files"])
        record = cls(**values)
        if record.digest != digest:
            raise DamagedError(f"the record of {record.stage} {record.key} states the digest {digest}, its files give {record.digest}")
        return record


_KINDS: Mapping[type[ArtifactRef | SourceRef], str] = {ArtifactRef: "artifact", SourceRef: "source"}


def artifact_key(stage: str, version: int, recipe: dict[str, Any], inputs: Inputs) -> str:
    """sha256 hex of what makes the artifact; of inputs only the digests enter, never where they lie."""
    digests = {name: ref.digest for name, ref in inputs.items()}
    return fingerprint({"stage": stage, "version": version, "recipe": recipe, "inputs": digests})


def read_record(store: Store, stage: str, key: str) -> ArtifactRecord | None:
    """None when the artifact was not made; DamagedError when its record cannot be read."""
    return _read(store, stage, key)[0]


def verify_record(store: Store, record: ArtifactRecord) -> list[str]:
    """Reads every file. Problems, one sentence each naming the file; [] means sound."""
    return verify_files(store, record.prefix, record.files)


def verify_files(store: Store, prefix: str, files: Iterable[FileEntry]) -> list[str]:
    """As `verify_record`, for files under any prefix."""
    files = tuple(files)
    problems = _problems_of_size(store, prefix, files)
    if problems:
        return problems
    for entry in files:
        try:
            with store.open(join(prefix, entry.path)) as file:
                digest = _digest_stream(file)
        except NotFoundError:
            problems.append(f"{entry.path!r} in {prefix} was deleted just now")
            continue
        if digest != entry.sha256:
            problems.append(f"{entry.path!r} in {prefix} is changed: sha256 {digest}, not {entry.sha256}")
    return problems


def commit_record(store: Store, record: ArtifactRecord, replaces: ArtifactRecord | None = None) -> tuple[ArtifactRecord, bool]:
    """(the record that stands, whether it is ours). DamagedError, and nothing committed, when a file is missing or short.

    `replaces` is the damaged record that this one supersedes: it is swapped only while that very attempt stands. A
    record that cannot be read at all is superseded without asking. Committing the same attempt again is no error.
    """
    problems = _problems_of_size(store, record.prefix, record.files)
    if problems:
        raise DamagedError("not committed: " + "; ".join(problems))
    target, data = layout.record_key(record.stage, record.key), _dumps(record)
    for _ in range(8):  # each turn but the last means that somebody else moved the record in between
        try:
            standing, version = _read(store, record.stage, record.key)
        except DamagedError:
            standing, version = None, store.get_versioned(target)[1]
        if standing is not None and (replaces is None or standing.attempt != replaces.attempt):
            return standing, standing.attempt == record.attempt
        if store.compare_and_swap(target, data, version):
            return record, True
    raise StorageError(f"the record {target!r} in {store.url} keeps changing: several programs replace it in turn")


def list_records(store: Store, stage: str | None = None, *, skip_unreadable: bool = False) -> Iterator[ArtifactRecord]:
    """Every record, in order of stage and key. DamagedError at one that cannot be read, unless those are passed over."""
    for info in store.list(layout.artifacts_prefix(stage)):
        record_stage, name = info.key.split("/")[-2:]
        try:
            record = read_record(store, record_stage, name.removesuffix(".json"))
        except DamagedError:
            if not skip_unreadable:
                raise
            continue
        if record is not None:
            yield record


def _read(store: Store, stage: str, key: str) -> tuple[ArtifactRecord | None, str | None]:
    target = layout.record_key(stage, key)
    try:
        data, version = store.get_versioned(target)
    except NotFoundError:
        return None, None
    try:
        record = ArtifactRecord.from_json(json.loads(data))
    except (ValueError, StorageError) as error:
        raise DamagedError(f"the record {target!r} in {store.url} cannot be read: {error}") from error
    if (record.stage, record.key) != (stage, key):
        raise DamagedError(f"the record {target!r} in {store.url} is that of {record.stage} {record.key}")
    return record, version


def _dumps(record: ArtifactRecord) -> bytes:
    """JSON that reads back equal; TypeError naming what in the recipe, summary or provenance has no such form."""
    data = record.to_json()
    fingerprint(data)
    return json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False).encode()


def _problems_of_size(store: Store, prefix: str, files: Iterable[FileEntry]) -> list[str]:
    problems = []
    for entry in files:
        size = store.size(join(prefix, entry.path))
        if size is None:
            problems.append(f"{entry.path!r} in {prefix} is missing from {store.url}")
        elif size != entry.size:
            problems.append(f"{entry.path!r} in {prefix} has {size} bytes, not {entry.size}")
    return problems


def _digest_stream(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _only(cls: type[Any], data: Any, *extra: str) -> dict[str, Any]:
    """The fields of a dataclass and no others, as a dict; DamagedError."""
    names = {field.name for field in fields(cls)} | set(extra)
    if not isinstance(data, Mapping) or set(data) != names:
        got = sorted(data) if isinstance(data, Mapping) else data
        raise DamagedError(f"{cls.__name__} has the fields {sorted(names)}, not {got!r}")
    return dict(data)


def _text_fields(cls: type[Any], data: Any) -> dict[str, str]:
    values = _only(cls, data)
    for name, value in values.items():
        if not isinstance(value, str):
            raise DamagedError(f"field {name!r} of {cls.__name__} is {value!r}, not text")
    return values


def _input_from_json(name: str, data: Any) -> ArtifactRef | SourceRef:
    kind = data.get("kind") if isinstance(data, Mapping) else None
    for cls, known in _KINDS.items():
        if kind == known:
            return cls.from_json({field: value for field, value in data.items() if field != "kind"})
    raise DamagedError(f"input {name!r} of a record has the kind {kind!r}, not one of {sorted(_KINDS.values())}")
