"""What only S3 can do wrong. A proxy stands in front of the server and misbehaves as told."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage.errors import StorageError
from storage.store import Store, open_store

UPLOAD = """
import sys
from pathlib import Path
from storage.store import open_store
open_store(sys.argv[1]).upload(Path(sys.argv[2]), "k")
"""


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.dropped_headers: tuple[str, ...] = ()
        self.answer_instead: Callable[[str, str], int | None] = lambda method, path: None  # before the server sees it
        self.answer_after: Callable[[str, str], int | None] = lambda method, path: None  # after the server did it
        self.num_misbehaved = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (status := self.server.answer_instead(self.command, self.path)) is not None:
            return self._send(status)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (*self.server.dropped_headers, "expect")}
        self.server.num_misbehaved += len(headers) < len(self.headers) - ("Expect" in self.headers)
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if (status := self.server.answer_after(self.command, self.path)) is not None:
            return self._send(status)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if self.command == "HEAD" or answer.getheader("Content-Length"):
            self.end_headers()
        else:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
        self.wfile.write(data)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def _send(self, status: int) -> None:
        self.server.num_misbehaved += 1
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def proxy(s3_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(urlsplit(s3_settings["AWS_ENDPOINT_URL"]).netloc) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()


@pytest.fixture
def direct(s3_settings: dict[str, str]) -> Store:
    """A store on the server itself; made before the proxy takes its place in the environment."""
    return open_store(f"s3://tests/{uuid.uuid4().hex}")


@pytest.fixture
def store(direct: Store, proxy: Proxy) -> Store:
    """The same place, through the proxy."""
    return open_store(direct.url)


def times(number: int, status: int, wanted_method: str = "PUT") -> Callable[[str, str], int | None]:
    """Misbehaves on the first `number` requests of a method."""
    left = [number]

    def answer(method: str, path: str) -> int | None:
        if method != wanted_method or left[0] == 0:
            return None
        left[0] -= 1
        return status

    return answer


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
