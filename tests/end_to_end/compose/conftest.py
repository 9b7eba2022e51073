"""Fixtures of the compose tests: the engine, a project, and a server.

The first test on a new machine starts the engine, downloads the wheels and builds the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from end_to_end.compose.docker_engine import ComposeProject, DockerEngine, compose_project, docker_engine
from end_to_end.compose.images import build_variables

NewProject = Callable[[Mapping[str, str]], AbstractContextManager[ComposeProject]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    with docker_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def new_project(engine: DockerEngine) -> NewProject:
    """Make a project, not up yet, on the stand-in image; the mapping adds variables to its .env."""
    # On a busy machine two threads that wait for each other are many times slower than one.
    base = {**build_variables(engine), "OMP_NUM_THREADS": "1"}
    return lambda variables: compose_project(engine, {**base, **variables})


@pytest.fixture(scope="session")
def served(new_project: NewProject) -> Iterator[ComposeProject]:
    """A healthy server with default settings. Tests share it: do not stop or break it."""
    with new_project({}) as project:
        project.up()
        yield project
