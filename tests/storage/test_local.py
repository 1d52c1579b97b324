from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage import local
from storage.errors import StorageError
from storage.store import Store, open_store

# Uploads a file whose copy never ends, so that the kill comes in the middle.
SLOW_UPLOAD = """
import shutil, sys, time
from pathlib import Path
from storage.store import open_store

def copy_half(source, target):
    with open(target, "wb") as file:
        file.write(Path(source).read_bytes()[:5])
        file.flush()
        print("half", flush=True)
        time.sleep(60)

shutil.copyfile = copy_half
open_store(sys.argv[1]).upload(Path(sys.argv[2]), "k")
"""

SWAPPER = """
import sys
from storage.store import open_store
store = open_store(sys.argv[1])
added = 0
while added < 10:
    data, version = store.get_versioned("counter")
    added += store.compare_and_swap("counter", b"%d" % (int(data) + 1), version)
"""


def test_an_upload_killed_in_the_middle_is_never_visible(store: Store, tmp_path: Path) -> None:
    store.put("k", b"before")
    (tmp_path / "source").write_bytes(b"0123456789")
    process = subprocess.Popen([sys.executable, "-c", SLOW_UPLOAD, store.url, str(tmp_path / "source")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    left = list((tmp_path / "store" / ".tmp").iterdir())
    assert [path.read_bytes() for path in left] == [b"01234"]  # the kill did come in the middle
    assert store.get("k") == b"before"
    assert [info.key for info in store.list()] == ["k"]


def test_unfinished_files_are_no_keys(store: Store) -> None:
    store.put("k", b"1")
    for key in (".tmp/x", ".tmp"):
        with pytest.raises(StorageError, match="unfinished"):
            store.get(key)
        with pytest.raises(StorageError, match="unfinished"):
            store.put(key, b"1")


def test_swaps_of_several_processes_lose_no_count(store: Store) -> None:
    store.put("counter", b"0")
    processes = [subprocess.Popen([sys.executable, "-c", SWAPPER, store.url]) for _ in range(4)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert store.get("counter") == b"40"


def test_links_out_of_the_folder_are_not_followed(store: Store, tmp_path: Path) -> None:
    store.put("inside", b"1")
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret")
    for act in (lambda: store.get("link"), lambda: store.put("link", b"2"), lambda: store.delete("link")):
        with pytest.raises(StorageError, match="leaves"):
            act()
    assert (tmp_path / "secret").read_bytes() == b"s"
    assert [info.key for info in store.list()] == ["inside"]


def test_commits_are_on_disk_before_they_are_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def note(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", note)
    root = str(store.local_path("x")).removesuffix("/x")
    assert store.put_if_absent("a/b/k", b"1")
    assert synced[-1] == f"{root}/a/b"
    assert {root, f"{root}/a"} <= set(synced)
    assert any(path.startswith(f"{root}/.tmp/") for path in synced)
    version = store.get_versioned("a/b/k")[1]
    synced.clear()
    assert store.compare_and_swap("a/b/k", b"2", version)
    assert len(synced) == 2
    assert synced[0].startswith(f"{root}/.tmp/")
    assert synced[1] == f"{root}/a/b"


def test_a_folder_that_cannot_be_written_fails_the_probe(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written"):
        open_store(str(tmp_path / "file")).probe()


def test_a_listing_has_the_time_of_the_write(store: Store) -> None:
    store.put("k", b"1")
    assert abs(store.list()[0].modified - time.time()) < 60


def test_a_process_that_is_stopped_inside_a_swap_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.2)
    store = open_store(str(tmp_path))
    assert store.compare_and_swap("HEAD.json", b"0", None)
    assert store.compare_and_swap("HEAD.json", b"1", store.get_versioned("HEAD.json")[1])
    (lock,) = (tmp_path / ".tmp").glob("lock-*")
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="has held the lock"):
            store.compare_and_swap("HEAD.json", b"2", store.get_versioned("HEAD.json")[1])
    assert store.get("HEAD.json") == b"1"
    assert store.compare_and_swap("HEAD.json", b"2", store.get_versioned("HEAD.json")[1])
