"""A small checkpoint, the same one prepared, and a hub that has it."""

from __future__ import annotations

import hashlib
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import httpx2
import pytest
from engine.checkpoints import fp32, save_small, tokenizer
from llama_engine.text.tokenizer import Tokenizer
from triton_prepare.prepare import prepare

__all__ = ["fp32", "tokenizer"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "example/small-llama"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@pytest.fixture(scope="session")
def original(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("originals") / "small", tokenizer)


@pytest.fixture(scope="session")
def finished(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared checkpoint, not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "small-int8"
    prepare(str(original), None, folder)
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "small-int8"))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the bytes of a file that this process writes: as on a disk that becomes full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Hub:
    """The part of the hub's HTTP that lists and downloads a model, without a network.

    It has one model, the files of a folder, in one commit, which is its default branch and the tag v1. token: required
    to read files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = COMMIT
        self.token = ""
        self.is_reachable = True
        self.requests: list[httpx2.Request] = []

    def downloads(self, name: str) -> list[httpx2.Request]:
        """Return the requests for a file's content."""
        path = f"/{MODEL}/resolve/{self.commit}/{name}"
        return [request for request in self.requests if (request.method, request.url.path) == ("GET", path)]

    def respond(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request, in place of the network."""
        self.requests.append(request)
        if not self.is_reachable:
            raise httpx2.ConnectError("Connection refused")
        match request.url.path.split("/"):
            case ["", "api", "models", owner, name, *rest]:
                return self._info(f"{owner}/{name}", *rest)
            case ["", _, _, "resolve", _, *name]:
                return self._file(request, "/".join(name))
        return _refusal(HTTPStatus.NOT_FOUND, "RepoNotFound")

    def _info(self, model: str, kind: str = "", revision: str = "main", *folder: str) -> httpx2.Response:
        if model != MODEL:
            return _refusal(HTTPStatus.NOT_FOUND, "RepoNotFound")
        if revision not in ("main", "v1", self.commit):
            return _refusal(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        if folder:
            return _refusal(HTTPStatus.NOT_FOUND, "EntryNotFound")
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(self.folder)): path.stat().st_size for path in files}
        tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes.items()]
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        info = {"id": model, "sha": self.commit, "siblings": siblings}
        return httpx2.Response(HTTPStatus.OK, json=tree if kind == "tree" else info)

    def _file(self, request: httpx2.Request, name: str) -> httpx2.Response:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refusal(HTTPStatus.UNAUTHORIZED, "GatedRepo")
        if not (self.folder / name).exists():
            return _refusal(HTTPStatus.NOT_FOUND, "EntryNotFound")
        content = (self.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.commit}
        headers |= {"Content-Length": str(len(content))}
        return httpx2.Response(HTTPStatus.OK, headers=headers, content=b"" if request.method == "HEAD" else content)


def _refusal(status: HTTPStatus, code: str) -> httpx2.Response:
    return httpx2.Response(status, headers={"X-Error-Code": code})


@pytest.fixture
def hub(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub, an empty cache, and no token of the person who runs the tests."""
    hub = Hub(original)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("httpx2.HTTPTransport.handle_request", lambda _, request: hub.respond(request))
    return hub
