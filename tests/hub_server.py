"""Hugging Face's and ModelScope's hubs on loopback: the routes that their clients use to list and fetch a model or a dataset."""

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
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class FakeHubs:
    """Repositories as `{(repo, commit): {file: bytes}}`, branches as `{(repo, name): commit}`; both hubs serve the same ones."""

    repositories: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    """File → how many more times it is sent with one byte changed."""
    fetched: list[str] = field(default_factory=list)
    """Names of the files whose bytes were asked for, in order."""
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """The new commit, to which both names of the default branch now lead."""
        sha = hashlib.sha1(json.dumps([repo, {name: data.hex() for name, data in files.items()}]).encode()).hexdigest()
        self.repositories[repo, sha] = files
        self.branches[repo, "main"] = self.branches[repo, "master"] = sha
        return sha

    def body(self, repo: str, commit: str, name: str) -> bytes:
        self.fetched.append(name)
        data = self.repositories[repo, commit][name]
        if self.damaged.get(name, 0):
            self.damaged[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data


def is_large(name: str) -> bool:
    return name.endswith((".parquet", ".safetensors"))


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running_hubs() -> Iterator[FakeHubs]:
    hubs = FakeHubs()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hubs.requests.append(f"{self.command} {self.path}")
            url = urlsplit(self.path)
            path, query = unquote(url.path), {key: values[0] for key, values in parse_qs(url.query).items()}
            for pattern, answer in (
                (r"/api/(?:datasets|models)/([^/]+/[^/]+)/revision/([^/]+)", self._hf_info),
                (r"/api/models/([^/]+/[^/]+)()", self._hf_info),
                (r"/api/(?:datasets|models)/([^/]+/[^/]+)/tree/([^/]+)", self._hf_tree),
                (r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._hf_file),
            ):
                if match := re.fullmatch(pattern, path):
                    return answer(*match.groups())
            if match := re.fullmatch(r"/api/v1/(?:datasets/([^/]+/[^/]+)/repo/tree|models/([^/]+/[^/]+)/repo/files)", path):
                return self._ms_tree(match[1] or match[2], query)
            if match := re.fullmatch(r"/api/v1/(?:datasets|models)/([^/]+/[^/]+)/repo", path):
                return self._ms_file(match[1], query)
            self._send(404, {"Code": 404, "Success": False, "Message": f"no route {path}"})

        def _commit(self, repo: str, revision: str) -> str | None:
            if (repo, revision) in hubs.repositories:
                return revision
            sha = hubs.branches.get((repo, revision))
            if sha is None:
                known = any(name == repo for name, _ in hubs.repositories)
                body = {"error": "not found", "Code": 404, "Success": False, "Message": "not found"}
                self._send(404, body, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
            return sha

        def _hf_info(self, repo: str, revision: str) -> None:
            if sha := self._commit(repo, revision or "main"):
                self._send(200, {"id": repo, "modelId": repo, "sha": sha, "siblings": [], "tags": []})

        def _hf_tree(self, repo: str, revision: str) -> None:
            if sha := self._commit(repo, revision):
                items: list[dict[str, Any]] = [{"type": "directory", "path": "data", "oid": "0" * 40}]
                for name, data in hubs.repositories[repo, sha].items():
                    item: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
                    if is_large(name):
                        item["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                    items.append(item)
                self._send(200, items)

        def _hf_file(self, repo: str, revision: str, name: str) -> None:
            if sha := self._commit(repo, revision):
                data = hubs.repositories[repo, sha][name]
                etag = hashlib.sha256(data).hexdigest() if is_large(name) else blob_id(data)
                body = hubs.body(repo, sha, name) if self.command == "GET" else data
                self._send(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": sha})

        def _ms_tree(self, repo: str, query: dict[str, str]) -> None:
            if sha := self._commit(repo, query["Revision"]):
                files = [{"Path": "data", "Name": "data", "Type": "tree", "Size": 0}] + [
                    {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                    for name, data in hubs.repositories[repo, sha].items()
                ]
                size = int(query.get("PageSize", 3000))  # models are listed on one page
                start = (int(query.get("PageNumber", 1)) - 1) * size
                self._send(200, {"Code": 200, "Success": True, "Data": {"Files": files[start : start + size]}})

        def _ms_file(self, repo: str, query: dict[str, str]) -> None:
            if sha := self._commit(repo, query["Revision"]):
                name = query["FilePath"]
                self._send(200, hubs.body(repo, sha, name) if self.command == "GET" else hubs.repositories[repo, sha][name])

        def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    hubs.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hubs
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
