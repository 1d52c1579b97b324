"""What only S3 can do wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage.errors import StorageError
from storage.store import Store, open_store
from tests.s3_proxy import Fault, Proxy, proxy_before, times

UPLOAD = """
import sys
from pathlib import Path
from storage.store import open_store
open_store(sys.argv[1]).upload(Path(sys.argv[2]), "k")
"""


@pytest.fixture
def proxy(s3_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_before(urlsplit(s3_settings["AWS_ENDPOINT_URL"]).netloc) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        yield server


@pytest.fixture
def direct(s3_settings: dict[str, str]) -> Store:
    """A store on the server itself; made before the proxy takes its place in the environment."""
    return open_store(f"s3://tests/{uuid.uuid4().hex}")


@pytest.fixture
def store(direct: Store, proxy: Proxy) -> Store:
    """The same place, through the proxy."""
    return open_store(direct.url)


def test_an_honest_proxy_changes_nothing(store: Store) -> None:
    store.probe()
    assert store.list() == []


@pytest.mark.parametrize("ignored", ["if-none-match", "if-match", "both"])
def test_a_server_that_ignores_conditional_writes_is_refused(store: Store, proxy: Proxy, ignored: str) -> None:
    proxy.dropped_headers = ("if-none-match", "if-match") if ignored == "both" else (ignored,)
    with pytest.raises(StorageError, match="cannot be used.*If-Match" if ignored == "if-match" else "cannot be used.*If-None-Match"):
        store.probe()
    assert proxy.num_misbehaved
    assert store.list() == []


def test_a_server_that_does_not_know_conditional_writes_is_refused(store: Store, proxy: Proxy) -> None:
    proxy.answer_instead = times(100, 501)
    with pytest.raises(StorageError, match="501"):
        store.probe()


def test_a_conflict_is_asked_again(store: Store, proxy: Proxy) -> None:
    proxy.answer_instead = times(2, 409)
    assert store.put_if_absent("k", b"1") is True
    proxy.answer_instead = times(2, 409)
    assert store.compare_and_swap("k", b"2", store.get_versioned("k")[1]) is True
    assert proxy.num_misbehaved == 4
    assert store.get("k") == b"2"


def test_conflicts_without_end_are_an_error(store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.s3.time.sleep", lambda seconds: None)
    proxy.answer_instead = times(100, 409)
    with pytest.raises(StorageError, match="409"):
        store.put_if_absent("k", b"1")


def test_a_write_whose_answer_was_lost_is_known_as_ours(store: Store, proxy: Proxy) -> None:
    proxy.answer_after = times(1, 500)  # the client repeats the request, and the repetition is told 412
    assert store.put_if_absent("k", b"1") is True
    version = store.get_versioned("k")[1]
    proxy.answer_after = times(1, 500)
    assert store.compare_and_swap("k", b"2", version) is True
    assert proxy.num_misbehaved == 2
    assert store.get("k") == b"2"
    proxy.answer_after = times(1, 500)
    assert store.put_if_absent("k", b"2") is False


@pytest.mark.parametrize("size", [10, 9 << 20], ids=["small", "multipart"])
def test_an_upload_that_the_server_breaks_off_is_never_visible(
    store: Store, direct: Store, proxy: Proxy, tmp_path: Path, size: int
) -> None:
    (tmp_path / "source").write_bytes(bytes(size))
    direct.put("k", b"before")
    proxy.answer_instead = lambda method, path: 400 if method == "PUT" and ("partNumber=2" in path or size == 10) else None
    with pytest.raises(StorageError, match="could not upload"):
        store.upload(tmp_path / "source", "k")
    with pytest.raises(StorageError, match="could not upload"):
        store.upload(tmp_path / "source", "new")
    assert direct.get("k") == b"before"
    assert [info.key for info in direct.list()] == ["k"]


def test_an_upload_killed_in_the_middle_is_never_visible(direct: Store, proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(9 << 20))
    stalled, end = threading.Event(), threading.Event()

    def stall(method: str, path: str) -> int | None:
        if "partNumber=2" not in path:
            return None
        stalled.set()
        end.wait(60)
        return 503

    proxy.answer_instead = stall
    process = subprocess.Popen([sys.executable, "-c", UPLOAD, direct.url, str(tmp_path / "source")], stderr=subprocess.DEVNULL)
    assert stalled.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    end.set()
    assert direct.list() == []
    assert not direct.exists("k")


@pytest.mark.parametrize("num_broken", [2, 3])
def test_an_answer_that_breaks_off_is_asked_for_again_and_is_never_taken_as_whole(
    direct: Store, store: Store, proxy: Proxy, num_broken: int
) -> None:
    direct.put("k", bytes(range(256)) * 8)
    left = [num_broken]

    def drop(method: str, path: str) -> Fault | None:
        left[0] -= method == "GET"
        return "drop answer" if method == "GET" and left[0] >= 0 else None

    proxy.fault = drop
    if num_broken == 2:
        assert store.get("k") == bytes(range(256)) * 8
    else:
        with pytest.raises(StorageError, match="could not read 'k'"):
            store.get("k")
    assert proxy.num_misbehaved == num_broken
    left[0] = num_broken
    with store.open("k") as file:
        if num_broken == 2:
            assert file.read() == bytes(range(256)) * 8
        else:
            with pytest.raises(StorageError, match="could not read bytes 0 to 2048 of 'k'"):
                file.read()


def test_a_server_that_does_not_answer_is_given_up(direct: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.s3.READ_SECONDS", 0.2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    proxy.fault = lambda method, path: "hang"
    with pytest.raises(StorageError, match="could not read 'k'.*[Tt]imeout"):
        open_store(direct.url).get("k")
    assert proxy.num_misbehaved == 2


def test_an_object_that_changes_while_it_is_read_is_an_error(direct: Store) -> None:
    direct.put("k", bytes(9 << 20))
    with direct.open("k") as file:
        assert file.read(5) == bytes(5)
        direct.put("k", b"1" * (9 << 20))
        file.seek(8 << 20)
        with pytest.raises(StorageError, match="read bytes"):
            file.read(5)


def test_a_server_that_is_not_there_or_has_no_bucket_is_named(s3_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = open_store("s3://no-such-bucket/x")
    with pytest.raises(StorageError, match="NoSuchBucket"):
        missing.probe()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError, match="s3://tests/x"):
        open_store("s3://tests/x").get("k")


@pytest.mark.slow  # a page is a thousand objects, and each is to be written
def test_a_listing_goes_on_past_the_thousand_of_a_page(direct: Store) -> None:
    keys = [f"many/{number:04d}" for number in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: direct.put(key, b""), keys))
    assert [info.key for info in direct.list("many")] == keys
