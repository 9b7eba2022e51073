"""Runs with a hub id: its commit, its token, and no request for what is prepared already."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
from programs.prepare.conftest import COMMIT, MODEL, WEIGHTS, Hub, files_of_at_most
from triton_prepare.prepare import prepare
from triton_prepare.progress import PrepareError
from triton_prepare.source import fetch, find_source


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_revision_is_resolved_to_its_commit(hub: Hub, tmp_path: Path, revision: str | None) -> None:
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


def test_a_gated_model_is_refused_until_the_token_has_access(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(CheckpointError) as refused:
            prepare(MODEL, None, tmp_path / "out")
        assert "\n" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert prepare(MODEL, None, tmp_path / "out", "cpu").source.revision == COMMIT
