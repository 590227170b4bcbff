"""A stand-in for the Hugging Face hub on loopback, with a second host for large files.

It answers what huggingface-hub asks for: ``/api/models/REPO/revision/REVISION``, ``/tree``, and
HEAD and GET of ``/REPO/resolve/REVISION/FILE``, which for large files redirects to the other host.
There ``Range`` is honoured, and a transfer can break off or wait in the middle.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE = (".safetensors", ".gguf", ".bin", ".onnx")
TOKEN = "hf_" + "a" * 34


@dataclass
class Repo:
    """A repository; ``files`` are those of its one commit, which branches and tags name."""

    files: dict[str, bytes]
    branches: tuple[str, ...] = ("main",)
    gated: bool = False
    denied: bool = False  # to every account
    private: bool = False
    gguf: dict[str, Any] | None = None

    @property
    def commit(self) -> str:
        names = "\n".join(f"{name} {_sha256(data)}" for name, data in sorted(self.files.items()))
        return hashlib.sha1(names.encode()).hexdigest()


@dataclass
class Request:
    """What a client sent, and the number of bytes of the body that it got."""

    method: str
    host: str  # "hub" or "files"
    path: str
    headers: Mapping[str, str]
    served: int = 0


@dataclass
class Hub:
    """The repositories, the requests so far, and what goes wrong."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    break_after: int | None = None  # bytes of a large file, after which the connection is reset
    stall_after: int | None = None  # bytes, after which nothing comes until ``go`` is set
    claimed_size: int | None = None  # of large files, in listings
    answer: tuple[int, dict[str, str], bytes] | None = None  # to every request
    answer_to: tuple[str, ...] = ("api", "resolve", "files")  # to which requests
    corrupt: bool = False  # the bytes of large files
    ports: dict[str, int] = field(default_factory=dict)
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['hub']}"

    @property
    def served(self) -> int:
        """Bytes of large files that were sent."""
        return sum(one.served for one in self.requests if one.host == "files")

    def add(self, name: str, files: Mapping[str, bytes] | Path, **options: Any) -> Repo:
        """A repository of these files, or of a folder's."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {str(path.relative_to(files)): path.read_bytes() for path in paths}
        self.repos[name] = Repo(dict(files), **options)
        return self.repos[name]

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that is to use this hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, host: str, *arguments: Any) -> None:
        self.hub = hub
        self.host = host
        super().__init__(*arguments)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[:2] == ["api", "agent-harnesses"]:
            self._send(404, {}, b"")
            return
        headers = {key.lower(): value for key, value in self.headers.items()}
        request = Request(self.command, self.host, self.path, headers)
        self.hub.requests.append(request)
        kind = "files" if self.host == "files" else "api" if parts[0] == "api" else "resolve"
        if self.hub.answer and kind in self.hub.answer_to:
            self._send(*self.hub.answer)
        elif self.host == "files":
            self._large(request, parts[0])
        elif parts[:2] == ["api", "models"]:
            self._api(parts[2:], parse_qs(url.query))
        else:
            self._resolve(parts)

    def _repo(self, name: str, revision: str, *, contents: bool) -> Repo | None:
        """The repository, or None after an error was sent."""
        repo = self.hub.repos.get(name)
        authorised = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if self.headers.get("authorization") and not authorised:
            self._error(401, None, "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not authorised):
            self._error(404 if authorised else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and contents and not authorised:
            self._error(401, "GatedRepo", f"Access to model {name} is restricted.")
        elif repo.denied and contents:
            self._error(403, "GatedRepo", "Your request is awaiting a review.")
        elif revision not in (*repo.branches, repo.commit):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _api(self, parts: list[str], query: Mapping[str, Any]) -> None:
        name, kind = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "revision"
        revision = "/".join(parts[3:]) or "main"
        repo = self._repo(name, revision, contents=False)
        if repo is None:
            return
        if kind == "tree":
            listed: Any = [self._entry(path, data) for path, data in repo.files.items()]
        else:
            listed = {
                **{"_id": "1", "id": name, "modelId": name, "sha": repo.commit},
                **{"gated": "auto" if repo.gated else False, "private": repo.private, "tags": []},
                "siblings": [self._sibling(*one, "blobs" in query) for one in repo.files.items()],
            }
            if repo.gguf is not None:
                listed["gguf"] = repo.gguf
        content = json.dumps(listed).encode()
        self._send(200, {"Content-Type": "application/json; charset=utf-8"}, content)

    def _size(self, path: str, data: bytes) -> int:
        claimed = self.hub.claimed_size if path.endswith(LARGE) else None
        return len(data) if claimed is None else claimed

    def _sibling(self, path: str, data: bytes, with_blobs: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"rfilename": path}
        if with_blobs:
            found |= {"size": self._size(path, data), "blobId": _git_sha1(data)}
            if path.endswith(LARGE):
                own = {"sha256": _sha256(data), "size": self._size(path, data)}
                found["lfs"] = {**own, "pointerSize": 135}
        return found

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        found = {"type": "file", "path": path, "size": len(data), "oid": _git_sha1(data)}
        if path.endswith(LARGE):
            found["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 135}
        return found

    def _resolve(self, parts: list[str]) -> None:
        at = parts.index("resolve") if "resolve" in parts else 0
        name, revision, path = "/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :])
        repo = self._repo(name, revision, contents=True)
        if repo is None:
            return
        own = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if path not in repo.files:
            self._error(404, "EntryNotFound", "Entry not found", own)
            return
        data = repo.files[path]
        if path.endswith(LARGE):
            digest = _sha256(data)
            own |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            own["Location"] = f"http://localhost:{self.hub.ports['files']}/{digest}?signature=1"
            self._send(302, own, b"Found. Redirecting")
        else:
            self._send(200, own | {"ETag": f'"{_git_sha1(data)}"'}, data)

    def _large(self, request: Request, digest: str) -> None:
        files = (data for repo in self.hub.repos.values() for data in repo.files.values())
        data = next(one for one in files if _sha256(one) == digest)
        if self.hub.corrupt:
            data = bytes(len(data))
        first = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        span = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        self.send_response(206 if first else 200)
        for key, value in (span | {"Content-Length": str(len(data) - first)}).items():
            self.send_header(key, value)
        self.end_headers()
        limits = [one for one in (self.hub.break_after, self.hub.stall_after) if one is not None]
        middle = min([first + one for one in limits], default=len(data))
        self._write(request, data[first:middle])
        if middle < len(data) and self.hub.stall_after is not None:
            self.hub.go.wait(60)
            self._write(request, data[middle:])
        elif middle < len(data):  # a reset, as of a connection that a router dropped
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())

    def _write(self, request: Request, data: bytes) -> None:
        for at in range(0, len(data), 1 << 16):
            self.wfile.write(data[at : at + (1 << 16)])
            request.served += len(data[at : at + (1 << 16)])

    def _error(
        self, status: int, code: str | None, message: str, more: dict[str, str] | None = None
    ) -> None:
        headers = {"X-Error-Message": message, **(more or {})}
        if code is not None:
            headers["X-Error-Code"] = code
        content = json.dumps({"error": message}).encode()
        self._send(status, {**headers, "Content-Type": "application/json"}, content)

    def _send(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""


@contextmanager
def running_hub() -> Generator[Hub]:
    """A hub without repositories, whose two hosts listen."""
    hub = Hub()
    servers = {
        host: _Server(("127.0.0.1", 0), partial(_Handler, hub, host)) for host in ("hub", "files")
    }
    for host, server in servers.items():
        hub.ports[host] = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.go.set()
        for server in servers.values():
            server.shutdown()
            server.server_close()


def use_hub(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface-hub in this process use the hub, with a cache in ``home``; its settings are
    read from the environment when it is imported.
    """
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
