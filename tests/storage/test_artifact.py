from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from storage.errors import DamagedError, StorageError
from storage.store import Store
from storage.transfer import upload_folder

SOURCE = SourceRef(name="rows", uri="s3://somewhere/rows.jsonl", digest="d" * 64)
PARENT = ArtifactRef(stage="encode", key="e" * 64, uri="s3://here/records/encode/e.json", digest="f" * 64)
FILES = {"data/one.bin": b"1" * 100, "two.txt": b"22", "report.json": b"{}"}


def make(store: Store, folder: Path, attempt: str, files: dict[str, bytes] = FILES, **changes: Any) -> ArtifactRecord:
    """Uploads an artifact under its attempt; not committed."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    record = ArtifactRecord(
        stage="pack",
        version=1,
        key="abc",
        attempt=attempt,
        recipe={"capacity": 8, "ratio": 0.1},
        inputs={"rows": SOURCE, "encoded": PARENT},
        files=(),
        summary={"rows": 3},
        provenance={"by": attempt},
    )
    record = replace(record, **changes)
    return replace(record, files=upload_folder(store, folder, record.prefix, volatile=["report.json"]))


def test_a_record_reads_back_equal(store: Store, tmp_path: Path) -> None:
    record = make(store, tmp_path / "a", "a1")
    assert commit_record(store, record) == (record, True)
    read = read_record(store, "pack", "abc")
    assert read == record
    assert read.inputs == {"rows": SOURCE, "encoded": PARENT}
    assert verify_record(store, record) == []
    assert ArtifactRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    ref = record.ref(store.url)
    assert ArtifactRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref
    assert ref.uri == f"{store.url}/records/pack/abc.json"
    assert ref.digest == record.digest
    assert store.exists(layout.record_key("pack", "abc"))


def test_what_was_never_made_has_no_record(store: Store) -> None:
    assert read_record(store, "pack", "abc") is None
    assert list(list_records(store)) == []


def test_same_content_has_the_same_digest_whoever_made_it_and_volatile_files_do_not_count(store: Store, tmp_path: Path) -> None:
    one = make(store, tmp_path / "a", "a1")
    two = make(store, tmp_path / "b", "b1", {**FILES, "report.json": b'{"seconds": 9}'}, key="other", provenance={"by": "else"})
    assert one.digest == two.digest
    assert one.files != two.files
    for other in ({**FILES, "two.txt": b"23"}, {**FILES, "three": b""}, {"renamed.txt": b"22", "report.json": b"{}"}):
        assert make(store, tmp_path / str(len(other)) / str(sorted(other.values())), "c1", other).digest != one.digest
    assert replace(one, stage="shard").digest != one.digest
    assert replace(one, files=tuple(reversed(one.files))).digest == one.digest


def test_a_key_is_of_the_recipe_and_the_content_of_inputs_only() -> None:
    def key(**changes: Any) -> str:
        base: dict[str, Any] = {"stage": "pack", "version": 1, "recipe": {"a": 1, "b": [2]}, "inputs": {"rows": SOURCE, "encoded": PARENT}}
        return artifact_key(**{**base, **changes})

    moved = {"encoded": replace(PARENT, uri="file:///elsewhere", key="0"), "rows": replace(SOURCE, uri="x", name="y")}
    assert key() == key(recipe={"b": [2], "a": 1}) == key(inputs=moved)
    changed = [
        key(stage="shard"),
        key(version=2),
        key(recipe={"a": 1, "b": [3]}),
        key(recipe={"a": 1}),
        key(inputs={"rows": SOURCE}),
        key(inputs={"rows": replace(SOURCE, digest="0"), "encoded": PARENT}),
        key(inputs={"rows": PARENT, "encoded": SOURCE}),
    ]
    assert len({key(), *changed}) == 8
    with pytest.raises(TypeError, match=r"value\['recipe'\]\['f'\]"):
        key(recipe={"f": len})


def test_the_key_of_a_known_recipe_keeps_for_ever() -> None:
    text = '{"inputs":{"rows":"' + "d" * 64 + '"},"recipe":{"a":1},"stage":"pack","version":1}'
    assert artifact_key("pack", 1, {"a": 1}, {"rows": SOURCE}) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_file_is_named(store: Store, tmp_path: Path, damage: str) -> None:
    record = make(store, tmp_path / "a", "a1")
    commit_record(store, record)
    key = f"{record.prefix}/data/one.bin"
    if damage == "missing":
        store.delete(key)
    else:
        store.put(key, b"1" * 99 if damage == "short" else b"1" * 99 + b"2")
    problems = verify_record(store, record)
    assert len(problems) == 1
    assert "data/one.bin" in problems[0]
    assert {"missing": "missing", "short": "99 bytes, not 100", "changed": "sha256"}[damage] in problems[0]


def test_a_damaged_volatile_file_is_named_too(store: Store, tmp_path: Path) -> None:
    record = make(store, tmp_path / "a", "a1")
    store.put(f"{record.prefix}/report.json", b"[]")
    assert [problem for problem in verify_record(store, record) if "report.json" in problem]


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_nothing_is_committed_while_a_file_is_missing_or_short(store: Store, tmp_path: Path, damage: str) -> None:
    record = make(store, tmp_path / "a", "a1")
    store.delete(f"{record.prefix}/two.txt") if damage == "missing" else store.put(f"{record.prefix}/two.txt", b"2")
    with pytest.raises(DamagedError, match=r"not committed.*two\.txt"):
        commit_record(store, record)
    assert read_record(store, "pack", "abc") is None
    assert store.list("records") == []


def test_of_four_racing_committers_one_wins_and_the_others_read_it(store: Store, tmp_path: Path) -> None:
    records = [make(store, tmp_path / str(index), f"a{index}") for index in range(4)]
    barrier, results = threading.Barrier(4), []

    def commit(record: ArtifactRecord) -> None:
        barrier.wait()
        results.append((record, *commit_record(store, record)))

    threads = [threading.Thread(target=commit, args=(record,)) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [record for record, _, ours in results if ours]
    assert len(results) == 4
    assert len(winners) == 1
    assert all(standing == winners[0] for _, standing, _ in results)
    assert read_record(store, "pack", "abc") == winners[0]


def test_committing_the_same_attempt_again_is_ours_still(store: Store, tmp_path: Path) -> None:
    record = make(store, tmp_path / "a", "a1")
    assert commit_record(store, record)[1]
    assert commit_record(store, record) == (record, True)


def test_a_damaged_record_is_replaced_once_and_only_while_it_stands(store: Store, tmp_path: Path) -> None:
    old, new, late = (make(store, tmp_path / name, name) for name in ("a1", "b1", "c1"))
    commit_record(store, old)
    assert commit_record(store, new) == (old, False)
    assert commit_record(store, new, replaces=old) == (new, True)
    assert commit_record(store, late, replaces=old) == (new, False)
    assert read_record(store, "pack", "abc") == new


@pytest.mark.parametrize("change", ["not json", "unknown field", "missing field", "wrong type", "digest", "other key", "climbing path"])
def test_a_record_that_cannot_be_read_is_damaged_and_superseded(store: Store, tmp_path: Path, change: str) -> None:
    record = make(store, tmp_path / "a", "a1")
    commit_record(store, record)
    data = record.to_json()
    if change == "unknown field":
        data["extra"] = 1
    elif change == "missing field":
        del data["summary"]
    elif change == "wrong type":
        data["version"] = True
    elif change == "digest":
        data["files"][0]["sha256"] = "0" * 64
    elif change == "other key":
        data["key"] = "xyz"
    elif change == "climbing path":
        data["files"][0]["path"] = "../../secret"
    text = "{" if change == "not json" else json.dumps(data)
    store.put(layout.record_key("pack", "abc"), text.encode())
    with pytest.raises(DamagedError, match=r"records/pack/abc\.json"):
        read_record(store, "pack", "abc")
    again = make(store, tmp_path / "b", "b1")
    assert commit_record(store, again) == (again, True)
    assert read_record(store, "pack", "abc") == again


def test_records_list_by_stage(store: Store, tmp_path: Path) -> None:
    for stage, key in (("pack", "b"), ("pack", "a"), ("encode", "c")):
        commit_record(store, make(store, tmp_path / stage / key, "a1", stage=stage, key=key))
    assert [(record.stage, record.key) for record in list_records(store)] == [("encode", "c"), ("pack", "a"), ("pack", "b")]
    assert [record.key for record in list_records(store, "pack")] == ["a", "b"]


def test_a_record_refuses_what_could_not_be_read_back(store: Store, tmp_path: Path) -> None:
    record = make(store, tmp_path / "a", "a1")
    with pytest.raises(TypeError, match="summary"):
        commit_record(store, replace(record, summary={"loss": float("nan")}))
    with pytest.raises(StorageError, match="twice"):
        replace(record, files=record.files + record.files[:1])
    with pytest.raises(StorageError, match="refused"):
        FileEntry(path="../x", size=0, sha256="0")
    assert store.list("records") == []
