"""What the compose tests share: an engine, a base image, wheels, and one server that is up for all that only look."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path

import pytest
from compose.engine import DockerEngine, docker_engine
from compose.project import ComposeProject, compose_project
from compose.stand_in import build_stand_in, collect_wheels

REPOSITORY = Path(__file__).resolve().parents[2]

NewProject = Callable[[Mapping[str, str]], AbstractContextManager[ComposeProject]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a fresh machine brings up the engine, downloads the wheels and builds the image."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    with docker_engine(REPOSITORY) as engine:
        yield engine


@pytest.fixture(scope="session")
def new_project(engine: DockerEngine) -> NewProject:
    """Make a project, not up yet, on the stand-in image; the mapping holds further variables of its .env."""
    extra = [line for line in metadata.requires("triton-llama") or () if line.endswith('extra == "server"')]
    base = {
        "TRITON_IMAGE": build_stand_in(engine),
        "TRITON_WHEELS": str(collect_wheels(REPOSITORY, [line.split(";")[0].strip() for line in extra])),
        "PIP_NO_INDEX": "1",
        # On a busy machine two threads that wait for each other are many times slower than one.
        "OMP_NUM_THREADS": "1",
    }
    return lambda variables: compose_project(engine, REPOSITORY, {**base, **variables})


@pytest.fixture(scope="session")
def served(new_project: NewProject) -> Iterator[ComposeProject]:
    """The server with nothing set, up and healthy. Don't stop it and don't break it: other tests use it, too."""
    with new_project({}) as project:
        project.up()
        yield project
