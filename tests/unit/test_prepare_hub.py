"""A checkpoint from the hub: resolved to a commit, downloaded once, gone on with, and refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.small_checkpoints import save_small
from huggingface_hub import close_session
from llama_engine.model.manifest import Manifest, Source
from llama_engine.text.tokenizer import Tokenizer
from triton_prepare.errors import HubError, MismatchError, SourceError
from triton_prepare.hub import Hub
from triton_prepare.origin import HubOriginal
from triton_prepare.run import Order, prepare
from unit.hubs import COMMIT, MODEL, LocalHub, running_hub
from unit.prepared import NOWHERE, states

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("hub") / "small", tokenizer)


@pytest.fixture
def hub(original: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub, and no token of the person who runs the tests."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    with running_hub(original) as running:
        yield running
    # Its connections would be left for the garbage collector, which warns.
    close_session()


@pytest.fixture
def cached(hub: LocalHub, tmp_path: Path) -> Hub:
    """The hub, with a cache that is empty."""
    return Hub(hub.url, tmp_path / "cache")


def _order(out: Path, revision: str | None = None, model: str = MODEL) -> Order:
    return Order(model, revision, out, "cpu")


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_the_commit_is_another_one_or_not_noted(cached: Hub, tmp_path: Path, revision: str | None) -> None:
    original = HubOriginal(cached, MODEL, revision)
    assert original.fetch().source == Source("hub", MODEL, COMMIT, revision)


def test_the_manifest_says_something_else_than_where_it_is_from(hub: LocalHub, cached: Hub, tmp_path: Path) -> None:
    manifest = prepare(_order(tmp_path / "out", "v1"), cached)
    assert manifest == Manifest.read(tmp_path / "out")
    assert manifest.source == Source("hub", MODEL, COMMIT, "v1")
    assert f"quantized from {MODEL} revision {COMMIT}, on " in manifest.describe()


def test_a_second_run_asks_the_hub(hub: LocalHub, cached: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(_order(out, "v1"), cached)
    before, asked = states(out), len(hub.asked)
    for revision in ("v1", COMMIT):
        # Not even one that can't be reached, and without what was downloaded.
        prepare(_order(out, revision), Hub(NOWHERE, tmp_path / "no-cache"))
    assert len(hub.asked) == asked
    assert states(out) == before
    for other in (None, "v2", "f" * 40):
        with pytest.raises(MismatchError, match=f"was prepared from {MODEL} revision {COMMIT}, not from {MODEL} at "):
            prepare(_order(out, other), cached)


def test_what_was_downloaded_before_is_downloaded_again(hub: LocalHub, cached: Hub) -> None:
    first, second = (HubOriginal(cached, MODEL, revision).fetch() for revision in (None, "v1"))
    assert first.folder == second.folder
    assert hub.downloads(WEIGHTS) == 1


def test_a_connection_that_breaks_begins_anew_or_ends_the_run(
    hub: LocalHub, cached: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is short of one of its pieces is lost; they are of 10 MB otherwise.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    # Of all the files only the weights are longer.
    hub.breaks_after = 1_200_000
    fetched = HubOriginal(cached, MODEL, None).fetch()
    assert (fetched.folder / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()
    assert hub.downloads(WEIGHTS) == 2
    assert hub.ranges == ["bytes=1200000-"]


def test_pickles_are_downloaded(hub: LocalHub, cached: Hub, tmp_path: Path) -> None:
    hub.folder = tmp_path / "pickled"
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text('{"model_type": "llama"}')
    (hub.folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(SourceError, match="has its weights in pickles only"):
        prepare(_order(tmp_path / "out"), cached)
    assert hub.downloads("pytorch_model.bin") == 0
    assert not (tmp_path / "out.part").exists()


def test_a_gated_model_ends_in_a_traceback_or_a_token_is_of_no_use(
    hub: LocalHub, cached: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    for token, why in ((None, "HF_TOKEN isn't set"), ("hf_wrong", "the account of HF_TOKEN has no access yet")):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(HubError) as refused:
            prepare(_order(tmp_path / "out"), cached)
        assert str(refused.value) == (
            f"{MODEL} is gated, and {why}: accept its terms on the hub, and set HF_TOKEN to that account's token"
        )
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert HubOriginal(cached, MODEL, None).fetch().source.revision == COMMIT


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
        ("somebody/else", None, "the hub has no somebody/else, or it is private: check the id, or set HF_TOKEN"),
        (MODEL, "v9", f"{MODEL} has no revision 'v9' on the hub"),
        ("not an id", None, "'not an id' is neither an existing folder nor a hub id (organisation/name)"),
    ],
)
def test_what_the_hub_does_not_have_ends_in_a_traceback(
    cached: Hub, tmp_path: Path, model: str, revision: str | None, said: str
) -> None:
    with pytest.raises(HubError) as refused:
        prepare(_order(tmp_path / "out", revision, model), cached)
    assert str(refused.value) == said


def test_a_hub_that_cannot_be_reached_ends_in_a_traceback(hub: LocalHub, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=f"^{MODEL} at v1 can't be fetched: ConnectError: ") as refused:
        prepare(_order(tmp_path / "out", "v1"), Hub(NOWHERE, tmp_path / "cache"))
    assert "\n" not in str(refused.value)


def test_the_cache_is_of_no_use_without_the_hub(
    hub: LocalHub, cached: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HubOriginal(cached, MODEL, "v1")
    online = original.fetch()
    asked = len(hub.asked)
    # As HF_HUB_OFFLINE=1 has it from the start of a process.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()
    assert original.fetch() == online
    with pytest.raises(HubError) as refused:
        prepare(_order(tmp_path / "third"), cached)
    assert str(refused.value) == f"{MODEL} isn't in the cache as a whole, and HF_HUB_OFFLINE is set"
    assert len(hub.asked) == asked
