"""Hugging Face's and ModelScope's hubs on loopback: the routes that their clients use to list, fetch and upload a model or a dataset."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
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
    token: str = ""
    """What a POST has to bring, where it is set. The address of a large file is enough for its PUT."""
    cut: dict[str, int] = field(default_factory=dict)
    """Part of a path → how many more such uploads end with the connection cut before the hub has done anything."""
    lost: dict[str, int] = field(default_factory=dict)
    """Part of a path → how many more such uploads are done without the client ever hearing of it."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Uploaded large files by sha256; none of them is visible until a commit names it."""
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

    def visible(self, repo: str) -> dict[str, bytes]:
        """The files of the default branch, {} where there is no such repository."""
        return self.repositories.get((repo, self.branches.get((repo, "main"), "")), {})

    def strikes(self, faults: dict[str, int], path: str) -> bool:
        for part, count in faults.items():
            if part in path and count:
                faults[part] -= 1
                return True
        return False


def is_large(name: str) -> bool:
    return name.endswith((".parquet", ".safetensors"))


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def upload_answer(hubs: FakeHubs, path: str, data: bytes) -> tuple[int, Any]:
    """Status and body for a POST of an upload."""
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if path in ("/api/repos/create", "/api/v1/models"):
        asked = json.loads(data)
        repo = f"{asked.get('organization') or asked.get('Path')}/{asked.get('name') or asked['Name']}"
        if (repo, "main") in hubs.branches:
            return (
                (409, {"error": "exists", "url": f"{hubs.endpoint}/{repo}"})
                if "repos" in path
                else (400, {"Code": 400, "Message": "repository already exists"})
            )
        hubs.commit(repo, {".gitattributes": b""})
        return 200, {"url": f"{hubs.endpoint}/{repo}", "Code": 200, "Success": True, "Data": {"Path": repo}}
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": remote_oid(hubs.visible(match[1]), file["path"]),
            }
            for file in json.loads(data)["files"]
        ]
        return 200, {"files": files}
    if re.fullmatch(r"(/api/v1/repos/models)?/[^/]+/[^/]+?(\.git)?/info/lfs/objects/batch", path):
        objects: list[dict[str, Any]] = [
            {**item, "actions": {"upload": {"href": f"{hubs.endpoint}/large/{item['oid']}", "header": {}}}}
            for item in json.loads(data)["objects"]
            if item["oid"] not in hubs.blobs
        ]
        return 200, {"transfer": "basic", "objects": objects, "Code": 200, "Success": True, "Data": {"objects": objects}}
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
        lines = [json.loads(line) for line in data.splitlines()]
        changes = [{**line["value"], "key": line["key"]} for line in lines if line["key"] != "header"]
        return commit_answer(hubs, match[1], changes)
    if match := re.fullmatch(r"/api/v1/repos/models/([^/]+/[^/]+)/commit/master", path):
        return commit_answer(hubs, match[1], json.loads(data)["actions"])
    return 404, {"Code": 404, "Success": False, "Message": f"no route {path}", "error": "no route"}


def remote_oid(files: dict[str, bytes], name: str) -> str | None:
    if name not in files:
        return None
    return hashlib.sha256(files[name]).hexdigest() if is_large(name) else blob_id(files[name])


def commit_answer(hubs: FakeHubs, repo: str, changes: list[dict[str, Any]]) -> tuple[int, Any]:
    files = dict(hubs.visible(repo))
    for change in changes:
        oid = change.get("oid") or change.get("sha256")
        if oid and oid not in hubs.blobs:
            return 400, {"error": f"no blob {oid}", "Code": 400, "Message": f"no blob {oid}"}
        files[change["path"]] = hubs.blobs[oid] if oid else base64.b64decode(change["content"])
    sha = hubs.commit(repo, files)
    return 200, {"commitUrl": f"{hubs.endpoint}/{repo}", "commitOid": sha, "Code": 200, "Success": True, "Data": {"oid": sha}}


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

        def do_PUT(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            hubs.requests.append(f"{self.command} {self.path}")
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            if hubs.strikes(hubs.cut, path):
                return self._hang_up()
            if self.command == "POST" and hubs.token and self.headers.get("Authorization") != f"Bearer {hubs.token}":
                return self._send(401, {"error": "Invalid credentials", "Code": 401, "Success": False, "Message": "no such token"})
            if self.command == "PUT":
                oid = path.rpartition("/")[2]
                is_whole = hashlib.sha256(data).hexdigest() == oid
                if is_whole:
                    hubs.blobs[oid] = data
                answer: tuple[int, Any] = (200 if is_whole else 400, {"Code": 200, "Success": True})
            else:
                answer = upload_answer(hubs, path, data)
            if hubs.strikes(hubs.lost, path):
                return self._hang_up()
            self._send(*answer)

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

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
