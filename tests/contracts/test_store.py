"""One suite for every store: what callers may rely on, whatever is behind."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import NotFoundError, StorageError
from storage.store import Store, open_store

BAD_KEYS = ["", "..", "a/../b", "/a", "a/", "a//b", "a\\b", "./a", "a/.", "a\0b", "a\nb"]


def race(number: int, act: Callable[[int], object]) -> list[object]:
    """What `number` threads that start together got, by their index."""
    barrier, results = threading.Barrier(number), [None] * number

    def run(index: int) -> None:
        barrier.wait()
        results[index] = act(index)  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(results)


def test_what_is_put_is_what_is_got(store: Store) -> None:
    for data in (b"", b"x", bytes(range(256)) * 40):
        store.put("a/b.bin", data)
        assert store.get("a/b.bin") == data
        assert store.get_versioned("a/b.bin")[0] == data
        assert store.size("a/b.bin") == len(data)
    assert store.exists("a/b.bin")
    assert not store.exists("a/c.bin")
    assert not store.exists("a")


def test_what_is_absent_is_named(store: Store) -> None:
    for read in (store.get, store.get_versioned, store.open):
        with pytest.raises(NotFoundError, match="nothing/here"):
            read("nothing/here")
    assert store.size("nothing/here") is None
    store.delete("nothing/here")


def test_a_folder_is_no_object(store: Store) -> None:
    store.put("folder/file", b"1")
    with pytest.raises(NotFoundError):
        store.get("folder")
    assert store.size("folder") is None


def test_put_if_absent_never_overwrites(store: Store) -> None:
    assert store.put_if_absent("k", b"first") is True
    assert store.put_if_absent("k", b"second") is False
    assert store.put_if_absent("k", b"first") is False  # the same bytes are another write all the same
    assert store.get("k") == b"first"
    store.delete("k")
    assert store.put_if_absent("k", b"third") is True


def test_of_racing_creators_one_wins_and_its_bytes_stand(store: Store) -> None:
    results = race(8, lambda index: store.put_if_absent("race", b"%d" % index))
    assert results.count(True) == 1
    assert results.count(False) == 7
    assert store.get("race") == b"%d" % results.index(True)


def test_compare_and_swap_writes_only_from_the_version_it_read(store: Store) -> None:
    assert store.compare_and_swap("k", b"0", "no such version") is False
    assert not store.exists("k")
    assert store.compare_and_swap("k", b"0", None) is True
    assert store.compare_and_swap("k", b"x", None) is False
    old = store.get_versioned("k")[1]
    assert store.compare_and_swap("k", b"1", old) is True
    assert store.compare_and_swap("k", b"2", old) is False
    assert store.get("k") == b"1"
    store.delete("k")
    assert store.compare_and_swap("k", b"3", old) is False


def test_racing_swaps_lose_no_count(store: Store) -> None:
    store.put("counter", b"0")
    refused = []

    def add_three(index: int) -> None:
        added = 0
        while added < 3:
            data, version = store.get_versioned("counter")
            time.sleep(0.005)
            done = store.compare_and_swap("counter", b"%d" % (int(data) + 1), version)
            added += done
            if not done:
                refused.append(index)

    race(4, add_three)
    assert store.get("counter") == b"12"
    assert refused  # or nothing raced


def test_a_listing_is_complete_sorted_recursive_and_by_folder(store: Store) -> None:
    keys = ["a.txt", "a/1", "a/b/2", "ab/3", "z", "é/5"]
    for number, key in enumerate(keys):
        store.put(key, b"." * number)
    assert [(info.key, info.size) for info in store.list()] == [(key, number) for number, key in enumerate(keys)]
    assert [info.key for info in store.list("a")] == ["a/1", "a/b/2"]
    assert store.list("nothing") == []
    assert all(abs(info.modified - time.time()) < 60 for info in store.list())


def test_a_listing_sees_at_once_what_another_client_wrote(store: Store) -> None:
    other = open_store(store.url)
    assert store.list("a") == []
    assert not store.exists("a/1")
    other.put("a/1", b"1")
    assert [info.key for info in store.list("a")] == ["a/1"]
    assert store.exists("a/1")
    other.delete("a/1")
    assert store.list("a") == []
    assert not store.exists("a/1")


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_are_no_plain_names_are_refused(store: Store, key: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1")
    for act in (
        lambda: store.get(key),
        lambda: store.put(key, b"1"),
        lambda: store.put_if_absent(key, b"1"),
        lambda: store.compare_and_swap(key, b"1", "version"),
        lambda: store.size(key),
        lambda: store.delete(key),
        lambda: store.upload(source, key),
        lambda: store.open(key),
    ):
        with pytest.raises(StorageError, match="refused"):
            act()
    assert store.list() == []


@pytest.mark.parametrize("size", [0, 10, 9 << 20], ids=["empty", "small", "multipart"])
def test_a_file_comes_back_as_it_went(store: Store, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "folder" / "target"
    source.write_bytes((b"0123456789abcde\n" * (size // 16 + 1))[:size])
    store.upload(source, "files/one")
    assert store.size("files/one") == size
    store.download("files/one", target)
    assert target.read_bytes() == source.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_an_upload_that_fails_leaves_what_was_there(store: Store, tmp_path: Path) -> None:
    store.put("k", b"before")
    with pytest.raises(OSError):
        store.upload(tmp_path / "missing", "k")
    with pytest.raises(OSError):
        store.upload(tmp_path / "missing", "new")
    assert store.get("k") == b"before"
    assert [info.key for info in store.list()] == ["k"]


def test_a_download_that_fails_leaves_what_was_there(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "downloads" / "target"
    target.parent.mkdir()
    target.write_bytes(b"before")
    with pytest.raises(NotFoundError):
        store.download("missing", target)
    assert target.read_bytes() == b"before"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_an_open_object_reads_and_seeks_like_a_file(store: Store) -> None:
    data = bytes(range(256)) * 100
    store.put("k", data)
    with store.open("k") as file:
        assert file.seekable()
        assert file.readable()
        assert file.read(10) == data[:10]
        assert file.seek(-5, 2) == len(data) - 5
        assert file.read() == data[-5:]
        assert file.read() == b""
        assert file.seek(300) == 300
        assert file.tell() == 300
        assert file.read(7) == data[300:307]
        file.seek(0)
        assert file.read() == data


def test_an_open_text_object_gives_its_lines(store: Store) -> None:
    store.put("k", b"one\ntwo\n\nfour")
    with store.open("k") as file:
        assert list(file) == [b"one\n", b"two\n", b"\n", b"four"]


def test_stores_under_one_root_do_not_see_each_other(store: Store) -> None:
    inner = open_store(store.url + "/inner")
    inner.put("k", b"1")
    assert [info.key for info in inner.list()] == ["k"]
    assert [info.key for info in store.list()] == ["inner/k"]
    assert open_store(store.url + "/inn").list() == []


def test_a_store_goes_to_another_process_by_its_url(store: Store) -> None:
    store.put("k", b"1")
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own bytes
    assert copy.url == store.url
    assert copy.get("k") == b"1"


def test_a_local_path_is_given_by_a_local_store_only(store: Store) -> None:
    store.put("a/k", b"1")
    path = store.local_path("a/k")
    assert (path is not None) == store.url.startswith("file://")
    assert path is None or path.read_bytes() == b"1"


def test_a_sound_store_passes_the_probe_and_keeps_nothing_of_it(store: Store) -> None:
    store.probe()
    assert store.list() == []
