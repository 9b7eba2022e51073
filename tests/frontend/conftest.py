"""A fake Triton and an endpoint in front of it for each module; every test begins with a fresh state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import pytest
from frontend.descriptions import description_of
from frontend.endpoints import Endpoint, Serve, endpoint
from frontend.fake_server import fake_triton
from frontend.fake_triton import FakeTriton
from model_families import BY_NAME


@pytest.fixture(scope="module")
def module_triton() -> Iterator[FakeTriton]:
    with fake_triton() as triton:
        yield triton


@pytest.fixture(scope="module")
def module_endpoint(module_triton: FakeTriton) -> Iterator[Endpoint]:
    with endpoint(module_triton.port) as served:
        yield served


@pytest.fixture
def triton(module_triton: FakeTriton) -> FakeTriton:
    """The fake, as if it had just started."""
    fresh = FakeTriton(module_triton.port, module_triton.server)
    for field in fields(FakeTriton):
        setattr(module_triton, field.name, getattr(fresh, field.name))
    return module_triton


@pytest.fixture
def served(triton: FakeTriton, module_endpoint: Endpoint) -> Endpoint:
    """The endpoint with default settings."""
    return module_endpoint


@pytest.fixture
def own() -> Iterator[FakeTriton]:
    """A Triton that may die, and whose model can be exchanged: no other test's endpoint asks it."""
    with fake_triton() as triton:
        yield triton


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with two API keys."""
    file = tmp_path / "keys"
    file.write_text("sk-first\nsk-second\n")
    return file


@pytest.fixture
def serve(triton: FakeTriton, tmp_path: Path) -> Iterator[Serve]:
    """Start the endpoint for a family's checkpoint."""
    with ExitStack() as stack:

        def started(name: str) -> Endpoint:
            # Under another name, beside the model of other tests' endpoints.
            triton.models[name] = description_of(BY_NAME[name].save(tmp_path / name))
            return stack.enter_context(endpoint(triton.port, model=name, served_name="pydoc-llama"))

        yield started


@pytest.fixture
def qwen3(serve: Serve) -> Endpoint:
    """The endpoint for a model that reasons."""
    return serve("qwen3")
