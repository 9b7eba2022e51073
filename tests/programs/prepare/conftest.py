"""A small checkpoint, the same one prepared, and a hub that has it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.checkpoints import fp32, int8, tokenizer
from engine.small_checkpoints import save_small
from huggingface_hub import close_session
from llama_engine.text.tokenizer import Tokenizer
from programs.prepare.hubs import LocalHub, running_hub
from triton_prepare.prepare import prepare

__all__ = ["fp32", "int8", "tokenizer"]


@pytest.fixture(scope="session")
def original(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("originals") / "small", tokenizer)


@pytest.fixture(scope="session")
def finished(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared checkpoint, not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "small-int8"
    prepare(str(original), None, folder, "cpu")
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "small-int8"))


@pytest.fixture
def hub(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub, an empty cache, and no token of the person who runs the tests."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    with running_hub(original) as running:
        reach(running.url, tmp_path / "cache", monkeypatch)
        yield running
    # Connections left for the garbage collector would warn.
    close_session()


def reach(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a process takes from HF_ENDPOINT and HF_HOME."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
