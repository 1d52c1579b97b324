"""A Hugging Face hub on loopback: the four routes that huggingface_hub uses to list and fetch a repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeHub:
    """Repositories as `{repo: {commit: {file: bytes}}}`, branches as `{(repo, name): commit}`."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    """Files that are sent with one byte changed."""
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def commit(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(json.dumps([repo, {name: data.hex() for name, data in files.items()}]).encode()).hexdigest()
        self.repositories.setdefault(repo, {})[sha] = files
        self.branches[repo, branch] = sha
        return sha

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        return sorted(
            {path.split("/resolve/")[1].split("/", 1)[1] for path in self.requests if path.startswith("GET") and "/resolve/" in path}
        )


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                self._info(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
                self._tree(match[1], match[2])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(match[1], match[2], match[3])
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _commit(self, repo: str, revision: str) -> str | None:
            if repo not in hub.repositories:
                self._send(404, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})
                return None
            sha = revision if revision in hub.repositories[repo] else hub.branches.get((repo, revision))
            if sha is None:
                self._send(404, b'{"error":"Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
            return sha

        def _info(self, repo: str, revision: str) -> None:
            if sha := self._commit(repo, revision):
                self._send(200, json.dumps({"id": repo, "modelId": repo, "sha": sha, "siblings": [], "tags": []}).encode())

        def _tree(self, repo: str, revision: str) -> None:
            if sha := self._commit(repo, revision):
                items: list[dict[str, Any]] = []
                for name, data in hub.repositories[repo][sha].items():
                    item: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _blob_id(data)}
                    if is_large(name):
                        item["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                    items.append(item)
                self._send(200, json.dumps(items).encode())

        def _file(self, repo: str, revision: str, name: str) -> None:
            sha = self._commit(repo, revision)
            if sha is None:
                return
            data = hub.repositories[repo][sha][name]
            etag = hashlib.sha256(data).hexdigest() if is_large(name) else _blob_id(data)
            if name in hub.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": sha})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
