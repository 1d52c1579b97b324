from __future__ import annotations

import errno
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage.artifact import FileEntry
from storage.fingerprint import digest_bytes
from storage.store import Store, open_store
from storage.transfer import upload_folder
from tests.servers import create_bucket, s3_server
from tests.sharding.cache_reader import slow_store
from tests.sharding.shard_files import assert_same, random_rows, write_folder
from twinkle_core.dataloader import DataLoader
from twinkle_core.errors import ConfigError, DamagedError, StorageError
from twinkle_core.sharding import PackedDataset, ShardCache
from twinkle_core.sharding.cache import DISK_SLACK_BYTES
from twinkle_core.types import PackedRow

SIZE = 10_000


def put_files(store: Store, number: int) -> list[FileEntry]:
    """Objects of SIZE bytes under data/."""
    entries = []
    for index in range(number):
        data = np.random.default_rng(index).bytes(SIZE)
        store.put(f"data/f{index}", data)
        entries.append(FileEntry(path=f"f{index}", size=SIZE, sha256=digest_bytes(data)))
    store.put("entries.json", json.dumps([entry.to_json() for entry in entries]).encode())
    return entries


def held(cache: ShardCache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir() if not path.suffix and path.name != "lock")


def used_bytes(cache: ShardCache) -> int:
    with cache._locked():
        return sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def fetches(root: Path) -> Counter[str]:
    log = root / "fetches.log"
    return Counter(log.read_text().split()) if log.exists() else Counter()


def test_the_least_recently_opened_files_make_room(tmp_path: Path) -> None:
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", 3 * SIZE)
    entries = put_files(store, 5)
    for number in (0, 1, 2, 0, 3):
        with cache.open(store, "data", entries[number]) as file:
            assert digest_bytes(file.read()) == entries[number].sha256
    assert held(cache) == sorted(entries[number].sha256 for number in (0, 2, 3))
    assert used_bytes(cache) == 3 * SIZE
    with pytest.raises(ConfigError, match=r"f0 has 10000 bytes, more than the whole shard cache of 9999"):
        ShardCache(tmp_path / "small", SIZE - 1).open(store, "data", entries[0])


def test_files_that_nobody_has_open_make_room_first(tmp_path: Path) -> None:
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", 3 * SIZE)
    entries = put_files(store, 5)
    with cache.open(store, "data", entries[0]):
        for number in (1, 2, 3):
            cache.open(store, "data", entries[number]).close()
        assert held(cache) == sorted(entries[number].sha256 for number in (0, 2, 3))
    cache.open(store, "data", entries[4]).close()
    assert held(cache) == sorted(entries[number].sha256 for number in (2, 3, 4))


def test_an_open_file_is_read_on_after_it_made_room(tmp_path: Path) -> None:
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", SIZE)
    entries = put_files(store, 2)
    with cache.open(store, "data", entries[0]) as first, cache.open(store, "data", entries[1]):
        assert held(cache) == [entries[1].sha256]
        assert digest_bytes(first.read()) == entries[0].sha256


@pytest.mark.parametrize("damage", ["changed", "short", "missing"])
def test_a_damaged_object_is_named_and_nothing_of_it_stays(tmp_path: Path, damage: str) -> None:
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", 3 * SIZE)
    entry = put_files(store, 1)[0]
    good = store.get("data/f0")
    store.delete("data/f0") if damage == "missing" else store.put("data/f0", good[:-1] + (b"" if damage == "short" else b"?"))
    with pytest.raises(DamagedError, match=r"'data/f0' .*(is changed: sha256|has 9999 bytes|is missing)"):
        cache.open(store, "data", entry)
    assert [path.name for path in cache.folder.iterdir()] == ["lock"]
    store.put("data/f0", good)
    assert cache.open(store, "data", entry).read() == good


def test_a_cached_file_that_lost_its_end_is_fetched_again(tmp_path: Path) -> None:
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", 3 * SIZE)
    entry = put_files(store, 1)[0]
    cache.open(store, "data", entry).close()
    os.truncate(cache.folder / entry.sha256, 100)
    assert digest_bytes(cache.open(store, "data", entry).read()) == entry.sha256


def test_threads_fetch_a_file_once_and_wait_for_room(tmp_path: Path) -> None:
    store, cache = slow_store(tmp_path / "store", 0.05), ShardCache(tmp_path / "cache", 2 * SIZE)
    entries = put_files(store, 2)

    def read(number: int) -> str:
        with cache.open(store, "data", entries[number % 2]) as file:
            return digest_bytes(file.read())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(16))) == [entries[number % 2].sha256 for number in range(16)]
    assert fetches(tmp_path) == {"data/f0": 1, "data/f1": 1}
    narrow = ShardCache(tmp_path / "narrow", SIZE)  # two fetches at a time do not fit
    with ThreadPoolExecutor(2) as pool:
        assert len({file.read() for file in pool.map(lambda entry: narrow.open(store, "data", entry), entries)}) == 2
    assert used_bytes(narrow) == SIZE


def start(tmp_path: Path, max_bytes: int, seconds: float, seed: int, num_opens: int) -> subprocess.Popen[str]:
    arguments = [str(tmp_path / "store"), str(tmp_path / "cache"), str(max_bytes), str(seconds), str(seed), str(num_opens)]
    return subprocess.Popen([sys.executable, "-m", "tests.sharding.cache_reader", *arguments], stdout=subprocess.PIPE, text=True)


def wait_until(what: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_fetch_holds_nothing(tmp_path: Path) -> None:
    """Neither the file it was at nor its room: another process takes both at once."""
    store, cache = slow_store(tmp_path / "store", 0), ShardCache(tmp_path / "cache", SIZE)
    entries = put_files(store, 1)
    process = start(tmp_path, SIZE, 60, 0, 1)
    wait_until(lambda: any(path.stat().st_size > 0 for path in (tmp_path / "cache").rglob("*.part/.*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(cache.folder.glob("*.part"))
    other = put_files(store, 2)[1]
    cache.open(store, "data", other).close()
    assert [path.name for path in cache.folder.glob("*.*")] == []
    assert digest_bytes(cache.open(store, "data", entries[0]).read()) == entries[0].sha256
    assert used_bytes(cache) == SIZE


@pytest.mark.slow
def test_processes_share_the_cache_whoever_is_killed(tmp_path: Path) -> None:
    put_files(slow_store(tmp_path / "store", 0), 8)
    cache, rng = ShardCache(tmp_path / "cache", 3 * SIZE + 5), random.Random(1)
    readers = [start(tmp_path, cache.max_bytes, 0.03, seed, 60) for seed in range(4)]
    wait_until(lambda: (tmp_path / "cache" / "lock").exists())
    killed, most = 0, 0
    while any(reader.poll() is None for reader in readers):
        most = max(most, used_bytes(cache))
        if killed < 5 and rng.random() < 0.05:
            number = rng.randrange(len(readers))
            if readers[number].poll() is None:
                readers[number].kill()
                killed += 1
                readers[number].communicate()
                readers[number] = start(tmp_path, cache.max_bytes, 0.03, 100 + killed, 60)
        time.sleep(0.02)
    assert [reader.communicate()[0] for reader in readers] == ["whole\n"] * 4
    assert [reader.returncode for reader in readers] == [0] * 4
    assert killed == 5
    assert 2 * SIZE < most <= cache.max_bytes
    assert fetches(tmp_path).total() > 8


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Store, list[PackedRow], tuple[FileEntry, ...]]:
    """40 rows in 10 shards, in a store that is not local."""
    store = open_store(f"memory://{tmp_path.name}-{os.getpid()}")
    rows = random_rows(40)
    return store, rows, upload_folder(store, write_folder(tmp_path / "shards", rows, 4), "data/shard/k/a")


def shard_bytes(files: tuple[FileEntry, ...]) -> int:
    return max(entry.size for entry in files if entry.path.startswith("shard-"))


def ids(batches: Iterator[list[PackedRow]] | DataLoader) -> list[list[int]]:
    return [[int(row.input_ids[0]) for row in batch] for batch in batches]


@pytest.mark.parametrize("num_shards", [1, 2, 10])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_remote_rows_are_those_of_the_folder_whatever_the_cache_holds(stored, tmp_path: Path, num_shards: int, num_workers: int) -> None:
    store, rows, files = stored
    cache = ShardCache(tmp_path / "cache", num_shards * shard_bytes(files))
    remote = PackedDataset.open(store, "data/shard/k/a", files, cache)
    for number in (39, 0, 17):
        assert_same(remote[number], rows[number])
    settings = {"batch_size": 3, "num_epochs": 2, "shuffle_shards": 2}
    expected = ids(DataLoader(PackedDataset(tmp_path / "shards"), **settings))
    assert ids(DataLoader(remote, num_workers=num_workers, **settings)) == expected
    assert used_bytes(cache) <= cache.max_bytes


def test_the_next_shards_come_before_their_rows_are_asked_for(stored, tmp_path: Path) -> None:
    store, rows, files = stored
    cache = ShardCache(tmp_path / "cache", 3 * shard_bytes(files))
    remote = PackedDataset.open(store, "data/shard/k/a", files, cache)
    with remote.reading([np.arange(40)]):
        wait_until(lambda: len(held(cache)) == 3)
        time.sleep(0.05)
        names = {entry.path: entry.sha256 for entry in files}
        assert held(cache) == sorted(names[f"shard-0000{number}.arrow"] for number in range(3))
        for number in range(4):
            assert_same(remote[number], rows[number])
        wait_until(lambda: names["shard-00003.arrow"] in held(cache))  # the first shard is done with
        assert names["shard-00000.arrow"] not in held(cache)
    for path in cache.folder.iterdir():
        if path.is_file():
            path.unlink()
    with remote.reading([np.array([39, 38]), np.array([0])]):
        wait_until(lambda: {names["shard-00009.arrow"], names["shard-00000.arrow"]} <= {*held(cache)})


def test_damage_is_named_where_the_row_is_read(stored, tmp_path: Path) -> None:
    store, _, files = stored
    store.put("data/shard/k/a/shard-00003.arrow", b"?" * files[4].size)
    remote = PackedDataset.open(store, "data/shard/k/a", files, ShardCache(tmp_path / "cache", 1 << 20))
    batches = iter(DataLoader(remote, batch_size=2, shuffle=False, num_epochs=1, num_workers=2))
    assert [len(next(batches)) for _ in range(6)] == [2] * 6
    with pytest.raises(DamagedError, match=r"data/shard/k/a/shard-00003.arrow"):
        next(batches)
    for name in ("rows.arrow", "index.json"):
        data = store.get(f"data/shard/k/a/{name}")
        store.put(f"data/shard/k/a/{name}", data + b" ")
        with pytest.raises(DamagedError, match=rf"{name}.* is changed"):
            PackedDataset.open(store, "data/shard/k/a", files, ShardCache(tmp_path / "cache", 1 << 20))
        store.put(f"data/shard/k/a/{name}", data)
    lies = tuple(FileEntry(path=e.path, size=e.size, sha256="0" * 64) if e.path == "shard-00000.arrow" else e for e in files)
    with pytest.raises(DamagedError, match=r"differ about shard-00000.arrow"):
        PackedDataset.open(store, "data/shard/k/a", lies, ShardCache(tmp_path / "cache", 1 << 20))


def test_a_local_store_is_read_in_place(tmp_path: Path) -> None:
    store, rows = open_store(str(tmp_path / "store")), random_rows(6)
    files = upload_folder(store, write_folder(tmp_path / "shards", rows, 4), "data/shard/k/a")
    cache = ShardCache(tmp_path / "cache", 1 << 20)
    assert_same(PackedDataset.open(store, "data/shard/k/a", files, cache)[5], rows[5])
    assert not cache.folder.exists()
    store.put("data/shard/k/a/shard-00001.arrow", b"?")
    with pytest.raises(DamagedError, match=r"shard-00001.arrow"):
        PackedDataset.open(store, "data/shard/k/a", files, cache)


def test_a_cache_too_small_for_the_shuffle_is_refused(stored, tmp_path: Path) -> None:
    store, _, files = stored
    remote = PackedDataset.open(store, "data/shard/k/a", files, ShardCache(tmp_path / "cache", 4 * shard_bytes(files)))
    remote.check_cache(4)
    with pytest.raises(ConfigError, match=r"among 10 shards at a time, which may have \d+ bytes"):
        remote.check_cache(10)


@pytest.mark.slow
def test_rows_come_from_s3_cold_and_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(30)
    folder = write_folder(tmp_path / "shards", rows, 4)
    with s3_server() as environment:
        create_bucket(environment, "shards")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://shards/store")
        files = upload_folder(store, folder, "data/shard/k/a")
        remote = PackedDataset.open(store, "data/shard/k/a", files, ShardCache(tmp_path / "cache", 1 << 20))
        cold = ids(DataLoader(remote, batch_size=4, num_epochs=2, num_workers=2))
        assert cold == ids(DataLoader(PackedDataset(folder), batch_size=4, num_epochs=2))
        for info in store.list("data/shard/k/a"):
            if "shard-" in info.key:
                store.delete(info.key)
        warm = PackedDataset.open(store, "data/shard/k/a", files, ShardCache(tmp_path / "cache", 1 << 20))
        assert ids(DataLoader(warm, batch_size=4, num_epochs=2)) == cold


class SmallDisk:
    """A disk of `num_bytes` on which the cache lies: what is linked in its folder takes room, and nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, num_bytes: int) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.failed = 0
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=self.free() + DISK_SLACK_BYTES))
        download = Store.download

        def write(store: Store, key: str, path: Path) -> None:
            if folder in path.parents and store.size(key) > self.free():
                self.failed += 1
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            download(store, key, path)

        monkeypatch.setattr(Store, "download", write)

    def free(self) -> int:
        used = 0
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names if not name.endswith("lock")):
                with suppress(FileNotFoundError):
                    used += path.stat().st_size
        return self.num_bytes - used


def test_a_damaged_file_is_fetched_again_by_the_next_process(tmp_path: Path) -> None:
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", 3 * SIZE)
    entry = put_files(store, 1)[0]
    cache.open(store, "data", entry).close()
    with (cache.folder / entry.sha256).open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"damaged")
    for other in (
        pickle.loads(pickle.dumps(cache)),  # noqa: S301  # our own bytes
        ShardCache(cache.folder, 3 * SIZE),
    ):
        with other.open(store, "data", entry) as file:
            assert digest_bytes(file.read()) == entry.sha256
    assert held(cache) == [entry.sha256]


def test_on_a_disk_smaller_than_the_cache_files_that_nobody_reads_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", 100 * SIZE)
    entries = put_files(store, 6)
    disk = SmallDisk(monkeypatch, cache.folder, 3 * SIZE)
    with cache.open(store, "data", entries[0]):
        for number in (1, 2, 3, 4):
            cache.open(store, "data", entries[number]).close()
        assert held(cache) == sorted(entries[number].sha256 for number in (0, 3, 4))
    assert disk.failed == 0


def test_a_full_disk_is_told_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the lock of the file nor a part of it stays, wherever the write fails."""
    store, cache = open_store(str(tmp_path / "store")), ShardCache(tmp_path / "cache", 3 * SIZE)
    entry = put_files(store, 1)[0]
    message = r"disk of the shard cache .* is full: 75535 bytes are free, and f0 of 10000 bytes is to be fetched"
    with monkeypatch.context() as patch:
        SmallDisk(patch, cache.folder, SIZE - 1)
        with pytest.raises(StorageError, match=message):
            cache.open(store, "data", entry)

        def full(handle: int, data: bytes, at: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=message):
            cache.open(store, "data", entry)
    assert [path.name for path in cache.folder.iterdir()] == ["lock"]
    with ThreadPoolExecutor(1) as pool:
        assert digest_bytes(pool.submit(cache.open, store, "data", entry).result(timeout=20).read()) == entry.sha256


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_read_whole_on_a_disk_smaller_than_the_cache(
    stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    store, _, files = stored
    cache = ShardCache(tmp_path / "cache", 1 << 30)
    settings = {"batch_size": 3, "num_epochs": 2, "shuffle_shards": 2}
    expected = ids(DataLoader(PackedDataset(tmp_path / "shards"), **settings))
    remote = PackedDataset.open(store, "data/shard/k/a", files, cache)
    disk = SmallDisk(monkeypatch, cache.folder, 3 * shard_bytes(files))
    assert ids(DataLoader(remote, num_workers=num_workers, **settings)) == expected
    assert disk.num_bytes < sum(entry.size for entry in files if entry.path.startswith("shard-"))
