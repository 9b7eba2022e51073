"""Downloads: of what is needed and suitable, once, resumed, from the cache when the hub is out of reach."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
from programs.prepare.conftest import COMMIT, MODEL, WEIGHTS, Hub, files_of_at_most
from triton_prepare.prepare import prepare
from triton_prepare.progress import PrepareError
from triton_prepare.source import fetch, find_source

ABSENT = "the hub has no example/else, or it is private: check the id, or set HF_TOKEN"


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_revision_is_resolved_to_its_commit_and_downloaded_once(
    hub: Hub, tmp_path: Path, revision: str | None
) -> None:
    manifest = prepare(MODEL, revision, tmp_path / "out", "cpu")
    assert (manifest.source.revision, manifest.source.asked_revision) == (COMMIT, revision)
    assert f"quantized from {MODEL} revision {COMMIT}, on " in manifest.describe()
    for other in (None, "v1"):
        fetch(MODEL, find_source(MODEL, other))
    assert len(hub.downloads(WEIGHTS)) == 1


def test_a_second_run_makes_no_request(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare(MODEL, "v1", out, "cpu")
    hub.requests.clear()
    for other in (None, "v2", "f" * 40):
        with pytest.raises(PrepareError, match=f"was prepared from {MODEL} revision {COMMIT}, not from {MODEL} rev"):
            prepare(MODEL, other, out)
    # Nor does it need what was downloaded.
    shutil.rmtree(tmp_path / "cache")
    for same in ("v1", COMMIT):
        assert prepare(MODEL, same, out) == first
    assert hub.requests == []


def test_a_broken_download_is_resumed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library loses a chunk that is incomplete, of 10 MB by default.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    # Only the weights are longer.
    hub.breaks_after = 1_200_000
    folder, _ = fetch(MODEL, find_source(MODEL, None))
    assert (folder / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()
    assert [request.headers.get("Range") for request in hub.downloads(WEIGHTS)] == [None, "bytes=1200000-"]


def test_a_download_without_room_is_refused_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    free = (hub.folder / WEIGHTS).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free - 1))
    with pytest.raises(PrepareError, match=rf"^{MODEL} needs 0\.00 GB in HF_HOME, which has 0\.00 GB left$"):
        fetch(MODEL, find_source(MODEL, None))
    assert hub.downloads(WEIGHTS) == []
    # What is in the cache needs no room.
    for left in (free, 0):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, left=left: SimpleNamespace(free=left))
        fetch(MODEL, find_source(MODEL, None))


@pytest.mark.parametrize(
    "download",
    [
        lambda out: prepare(MODEL, None, out, "cpu"),
        lambda out: load_checkpoint(Settings(model=MODEL, quantization="none"), torch.device("cpu")),
    ],
    ids=["prepare", "load"],
)
def test_a_download_that_does_not_fit_is_one_line(hub: Hub, tmp_path: Path, download: Callable[[Path], object]) -> None:
    with files_of_at_most(1 << 18), pytest.raises((PrepareError, CheckpointError), match="File too large") as refused:
        download(tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert len(hub.downloads(WEIGHTS)) >= 1


def test_a_hub_out_of_reach_is_one_line_though_the_cache_is_complete(hub: Hub, tmp_path: Path) -> None:
    """The branch or tag may have moved since."""
    fetch(MODEL, find_source(MODEL, "v1"))
    hub.is_reachable = False
    with pytest.raises(PrepareError, match=f"^{MODEL} at v1 can't be fetched: ConnectError: Connection refused$"):
        prepare(MODEL, "v1", tmp_path / "out")


def test_offline_only_a_complete_cache_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = fetch(MODEL, find_source(MODEL, "v1"))
    hub.requests.clear()
    # As a process takes it from HF_HUB_OFFLINE=1.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(MODEL, find_source(MODEL, "v1")) == online
    for revision in (None, "v1"):
        with pytest.raises(PrepareError, match=r"isn't in the cache as a whole, and HF_HUB_OFFLINE is set$"):
            prepare(MODEL, revision, tmp_path / "out")
        (online[0] / WEIGHTS).unlink(missing_ok=True)
    assert hub.requests == []


def test_a_gated_model_is_refused_until_the_token_has_access(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    for token, access in (("", "HF_TOKEN isn't set"), ("hf_wrong", "the account of HF_TOKEN has no access yet")):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(PrepareError) as refused:
            prepare(MODEL, None, tmp_path / "out")
        assert str(refused.value) == (
            f"{MODEL} is gated, and {access}: accept its terms, and set HF_TOKEN to that account's token"
        )
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert prepare(MODEL, None, tmp_path / "out", "cpu").source.revision == COMMIT


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("example/else", None, ABSENT),
        (MODEL, "v9", f"{MODEL} has no revision 'v9' on the hub"),
        ("not an id", None, "'not an id' is neither an existing folder nor a hub id (organisation/name)"),
        # Paths, which are not looked up on the hub.
        *((path, None, f"model is {path!r}: no such folder") for path in ("/no/such", "./absent", "~/absent", "a/b/c")),
    ],
)
def test_a_model_that_does_not_exist_is_refused(
    hub: Hub, tmp_path: Path, model: str, revision: str | None, message: str
) -> None:
    with pytest.raises(PrepareError) as refused:
        prepare(model, revision, tmp_path / "out")
    assert str(refused.value) == message
    assert (hub.requests == []) == ("such folder" in message or "neither" in message)
