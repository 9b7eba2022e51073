"""A fake Triton and an endpoint in front of it for all tests; every test begins with a fresh state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from frontend.descriptions import description_of
from frontend.endpoints import Endpoint, Serve, endpoint
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from model_families import FAMILIES


@pytest.fixture(scope="session")
def shared_triton() -> Iterator[FakeTriton]:
    with fake_triton() as triton:
        yield triton


@pytest.fixture(scope="session")
def shared_endpoint(shared_triton: FakeTriton) -> Iterator[Endpoint]:
    with endpoint(shared_triton.port) as served:
        yield served


@pytest.fixture
def triton(shared_triton: FakeTriton) -> FakeTriton:
    """The fake, as if it had just started, but for the models of other tests' endpoints."""
    shared_triton.reset()
    shared_triton.models["llama"], shared_triton.adapters = description_of(), {}
    return shared_triton


@pytest.fixture
def served(triton: FakeTriton, shared_endpoint: Endpoint) -> Endpoint:
    """The endpoint with default settings."""
    return shared_endpoint


@pytest.fixture
def own() -> Iterator[FakeTriton]:
    """A Triton that may die, and whose model can be exchanged: no other test's endpoint asks it."""
    with fake_triton() as triton:
        yield triton


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with three API keys."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# the team's\nsk-first\n\nsk-second\nschlüssel\n", encoding="utf-8")
    return file


@pytest.fixture
def keyed(triton: FakeTriton, keys: Path) -> Iterator[Endpoint]:
    """An endpoint that asks for a key."""
    with endpoint(triton.port, api_keys_file=keys, lora_updates="on") as served:
        yield served


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of each family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        family.save(folder / family.name)
    return folder


@pytest.fixture(scope="session")
def families_endpoint(shared_triton: FakeTriton, checkpoints: Path) -> Iterator[Endpoint]:
    names = [family.name for family in FAMILIES]
    shared_triton.reset()
    shared_triton.models |= {name: description_of(checkpoints / name) for name in names}
    file = checkpoints / "models.json"
    file.write_text(json.dumps([{"triton_model": name, "served_name": name} for name in names]))
    with endpoint(shared_triton.port, models_file=file) as served:
        # On a slow machine it serves before it has read all tokenizers.
        shared_triton.wait_for(lambda _: len(served.http.get("/v1/models").json().get("data", [])) == len(names))
        yield served


@pytest.fixture
def serve(triton: FakeTriton, families_endpoint: Endpoint) -> Serve:
    """Return the endpoint with a family's model for its requests."""
    return lambda name: replace(families_endpoint, model=name)


@pytest.fixture
def qwen3(serve: Serve) -> Endpoint:
    """The endpoint for a model that reasons."""
    return serve("qwen3")
