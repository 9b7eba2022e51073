"""A hub on this machine: as much of the real one's HTTP as looking a model up and downloading it takes.

Small and well-behaved: revisions, one commit, sizes, ETags, ranges; and it can refuse, or break a connection off.
"""

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
MODEL = "somebody/small-llama"


class LocalHub(ThreadingHTTPServer):
    """Has one model, the files of a folder, in one commit, which is its default branch and the tag v1.

    token: who doesn't send it is refused the files. breaks_after: the connection of a file's first download ends after
    so many bytes. asked: method and path of every request.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.token = ""
        self.breaks_after: int | None = None
        self.asked: list[str] = []
        self.ranges: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, name: str) -> int:
        return self.asked.count(f"GET /{MODEL}/resolve/{COMMIT}/{name}")


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
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], found[2] or "main")
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/tree/.+", path):
            # Of folders inside it has none.
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[3])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")

    def _info(self, model: str, revision: str) -> None:
        if model != MODEL:
            return self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        files = [{"rfilename": path.name, "size": path.stat().st_size} for path in self.server.folder.iterdir()]
        content = json.dumps({"id": model, "sha": COMMIT, "siblings": files}).encode()
        return self._send(HTTPStatus.OK, content, {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self._refuse(HTTPStatus.UNAUTHORIZED, "GatedRepo")
        if not (self.server.folder / name).exists():
            return self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
        content = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
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
