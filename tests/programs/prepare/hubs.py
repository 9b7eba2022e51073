"""A local hub: the part of the real one's HTTP that lists and downloads a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "example/small-llama"


class LocalHub(ThreadingHTTPServer):
    """Has one model, the files of a folder, in one commit, which is its default branch and the tag v1.

    token: required to read files. breaks_after: bytes after which the next longer download loses its connection, once.
    asked: method and path of every request.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.commit = COMMIT
        self.token = ""
        self.breaks_after: int | None = None
        self.asked: list[str] = []
        self.ranges: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, name: str) -> int:
        return self.asked.count(f"GET /{MODEL}/resolve/{self.commit}/{name}")


@contextmanager
def running_hub(folder: Path) -> Iterator[LocalHub]:
    with LocalHub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._info(found[1], found[2], found[3] or "main")
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/tree/.+", path):
            # It has no folders.
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
        elif found := re.fullmatch(r"/[^/]+/[^/]+/resolve/[^/]+/(.+)", path):
            self._file(found[1])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _info(self, model: str, kind: str | None, revision: str) -> None:
        if model != MODEL:
            return self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")
        if revision not in ("main", "v1", self.server.commit):
            return self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        sizes = {path.name: path.stat().st_size for path in self.server.folder.iterdir()}
        tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes.items()]
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        info = {"id": model, "sha": self.server.commit, "siblings": siblings}
        content = json.dumps(tree if kind == "tree" else info).encode()
        return self._send(HTTPStatus.OK, content, {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self._refuse(HTTPStatus.UNAUTHORIZED, "GatedRepo")
        if not (self.server.folder / name).exists():
            return self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
        content = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.server.commit}
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            self.server.ranges.append(wanted[0])
            first = int(wanted[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self._send(HTTPStatus.PARTIAL_CONTENT, content[first:], headers)
        return self._send(HTTPStatus.OK, content, headers)

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: HTTPStatus, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server.breaks_after
        if cut is not None and cut < len(content) and "Content-Range" not in headers:
            self.server.breaks_after = None
            content, self.close_connection = content[:cut], True
        self.wfile.write(content)
