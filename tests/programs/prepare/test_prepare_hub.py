"""Downloads: once, resumed, from the cache when the hub is out of reach."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import close_session
from programs.prepare.conftest import reach
from programs.prepare.hubs import COMMIT, MODEL, LocalHub
from triton_prepare.prepare import prepare
from triton_prepare.progress import PrepareError
from triton_prepare.source import fetch, find_source

WEIGHTS = "model.safetensors"
NOWHERE = "http://127.0.0.1:9"


def test_a_second_run_makes_no_request(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = prepare(MODEL, "v1", out, "cpu")
    asked = len(hub.asked)
    for other in (None, "v2", "f" * 40):
        with pytest.raises(PrepareError, match=f"was prepared from {MODEL} revision {COMMIT}, not from {MODEL} rev"):
            prepare(MODEL, other, out)
    # Nor does it need what was downloaded.
    reach(NOWHERE, tmp_path / "no-cache", monkeypatch)
    for same in ("v1", COMMIT):
        assert prepare(MODEL, same, out) == first
    assert len(hub.asked) == asked


def test_files_in_the_cache_are_not_downloaded_again(hub: LocalHub) -> None:
    folders = {fetch(MODEL, find_source(MODEL, revision))[0] for revision in (None, "v1")}
    assert len(folders) == 1
    assert hub.downloads(WEIGHTS) == 1


def test_a_broken_download_is_resumed(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library loses a chunk that is incomplete, of 10 MB by default.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    # Only the weights are longer.
    hub.breaks_after = 1_200_000
    folder, _ = fetch(MODEL, find_source(MODEL, None))
    assert (folder / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()
    assert hub.ranges == ["bytes=1200000-"]


@pytest.mark.parametrize("cached", [False, True])
def test_a_hub_out_of_reach_is_one_line(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if cached:
        # The branch or tag may have moved since.
        fetch(MODEL, find_source(MODEL, "v1"))
    reach(NOWHERE, tmp_path / "cache", monkeypatch)
    with pytest.raises(PrepareError, match=f"^{MODEL} at v1 can't be fetched: ConnectError: ") as refused:
        prepare(MODEL, "v1", tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_a_download_without_room_is_refused_first(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    free = (hub.folder / WEIGHTS).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free - 1))
    with pytest.raises(PrepareError, match=rf"^{MODEL} needs 0\.00 GB in HF_HOME, and its volume has 0\.00 GB left$"):
        fetch(MODEL, find_source(MODEL, None))
    assert hub.downloads(WEIGHTS) == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    fetch(MODEL, find_source(MODEL, None))
    # What is in the cache needs no room.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    fetch(MODEL, find_source(MODEL, None))


def test_offline_only_a_complete_cache_is_used(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = fetch(MODEL, find_source(MODEL, "v1"))
    asked = len(hub.asked)
    # As a process takes it from HF_HUB_OFFLINE=1.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()
    assert fetch(MODEL, find_source(MODEL, "v1")) == online
    for name, revision in ((None, None), (WEIGHTS, "v1")):
        if name is not None:
            (online[0] / name).unlink()
        with pytest.raises(PrepareError, match=r"isn't in the cache as a whole, and HF_HUB_OFFLINE is set$"):
            prepare(MODEL, revision, tmp_path / "out")
    assert len(hub.asked) == asked
