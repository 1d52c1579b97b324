from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from storage.artifact import FileEntry
from storage.errors import DamagedError, StorageError
from storage.fingerprint import digest_bytes
from storage.store import Store, open_store
from storage.transfer import fetch_files, local_folder, upload_folder

FILES = {"a.txt": b"one", "b/c.bin": bytes(1000), "z": b""}


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "folder"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_comes_back_as_it_went(store: Store, folder: Path, tmp_path: Path) -> None:
    entries = upload_folder(store, folder, "p/q", volatile=["z"])
    assert entries == tuple(
        FileEntry(path=name, size=len(data), sha256=digest_bytes(data), volatile=name == "z") for name, data in sorted(FILES.items())
    )
    assert [info.key for info in store.list()] == ["p/q/a.txt", "p/q/b/c.bin", "p/q/z"]
    assert contents(fetch_files(store, "p/q", entries, tmp_path / "back")) == FILES
    assert contents(local_folder(store, "p/q", entries, tmp_path / "cache")) == FILES
    assert (tmp_path / "cache").exists() == store.url.startswith("memory")


def test_what_is_there_and_right_is_not_fetched_again_and_what_is_wrong_is(store: Store, folder: Path, tmp_path: Path) -> None:
    entries = upload_folder(store, folder, "p")
    into = fetch_files(store, "p", entries, tmp_path / "back")
    kept = (into / "b/c.bin").stat().st_ino
    (into / "a.txt").write_bytes(b"bad")
    store.delete("p/b/c.bin")
    fetch_files(store, "p", entries, into)
    assert contents(into) == FILES
    assert (into / "b/c.bin").stat().st_ino == kept


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_file_is_named_and_never_appears(store: Store, folder: Path, tmp_path: Path, damage: str) -> None:
    entries = upload_folder(store, folder, "p")
    if damage == "missing":
        store.delete("p/b/c.bin")
    else:
        store.put("p/b/c.bin", bytes(999) if damage == "short" else bytes(999) + b"x")
    for fetch in (fetch_files, local_folder):
        with pytest.raises(DamagedError, match=r"b/c\.bin"):
            fetch(store, "p", entries, tmp_path / "back")
    assert "b/c.bin" not in contents(tmp_path / "back")
    assert len(contents(tmp_path / "back")) <= 2


def test_links_empty_folders_and_unknown_volatile_names_are_refused(store: Store, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"reprot\.json"):
        upload_folder(store, folder, "p", volatile=["reprot.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="no file"):
        upload_folder(store, tmp_path / "empty", "p")
    (folder / "link").symlink_to("a.txt")
    with pytest.raises(StorageError, match="link"):
        upload_folder(store, folder, "p")
    assert store.list() == []


def test_an_entry_cannot_leave_the_folder_through_a_link(store: Store, folder: Path, tmp_path: Path) -> None:
    entries = upload_folder(store, folder, "p")
    into = tmp_path / "back"
    into.mkdir()
    (into / "b").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="leaves"):
        fetch_files(store, "p", entries, into)
    assert not (tmp_path / "c.bin").exists()
    with pytest.raises(StorageError, match="refused"):
        replace(entries[0], path="../a.txt")
