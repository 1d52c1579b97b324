"""Stands in front of an S3 server and misbehaves as told."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["hang", "drop request", "drop answer", "keep nothing", "keep half", "keep other bytes"]
"""hang: no answer. drop request: the connection ends before the server sees it. drop answer: it ends in the middle of the body, or,
where that is empty, before the answer, which tells of something done.
keep …: the answer is that all went well."""


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.dropped_headers: tuple[str, ...] = ()
        self.answer_instead: Callable[[str, str], int | None] = lambda method, path: None  # before the server sees it
        self.answer_after: Callable[[str, str], int | None] = lambda method, path: None  # after the server did it
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self.num_misbehaved = 0
        self.end_of_hanging = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (status := self.server.answer_instead(self.command, self.path)) is not None:
            return self._send(status)
        fault = self.server.fault(self.command, self.path)
        self.server.num_misbehaved += fault is not None
        if fault == "hang":
            self.server.end_of_hanging.wait()
        if fault in ("hang", "drop request"):
            return self._hang_up()
        if fault == "keep nothing":
            return self._send(200, counts=False)
        if fault in ("keep half", "keep other bytes"):
            body = body[: len(body) // 2] if fault == "keep half" else bytes(len(body))
        checks = ("content-length", "content-md5", "x-amz-checksum-crc32", "x-amz-content-sha256") if fault else ()
        dropped = (*self.server.dropped_headers, "expect", *checks)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        self.server.num_misbehaved += len(headers) < len(self.headers) - ("Expect" in self.headers) and not checks
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if (status := self.server.answer_after(self.command, self.path)) is not None:
            return self._send(status)
        if fault == "drop answer" and self.command != "GET":
            return self._hang_up()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if self.command == "HEAD" or answer.getheader("Content-Length"):
            self.end_headers()
        else:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == "drop answer" else data)
        if fault == "drop answer":
            self._hang_up()

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def _send(self, status: int, counts: bool = True) -> None:
        self.server.num_misbehaved += counts
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("ETag", '"d41d8cd98f00b204e9800998ecf8427e"')
        self.end_headers()

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def proxy_before(netloc: str) -> Iterator[Proxy]:
    """A proxy on a free loopback port, in front of the server at `netloc`."""
    with Proxy(netloc) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.end_of_hanging.set()
        server.shutdown()


def times(number: int, status: int, wanted_method: str = "PUT") -> Callable[[str, str], int | None]:
    """Misbehaves on the first `number` requests of a method."""
    left = [number]

    def answer(method: str, path: str) -> int | None:
        if method != wanted_method or left[0] == 0:
            return None
        left[0] -= 1
        return status

    return answer
