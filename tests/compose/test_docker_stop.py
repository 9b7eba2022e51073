"""`docker stop` loses no accepted request; `make stops` runs every other situation, too."""

from __future__ import annotations

import pytest
from compose.container import docker_stop
from compose.engine import DockerEngine
from notes import Note
from server.stops.cells import CONFIGS, run
from server.stops.situations import SITUATIONS


@pytest.mark.campaign
@pytest.mark.parametrize("config", CONFIGS)
async def test_docker_stop_loses_no_accepted_request_in_any_situation(
    engine: DockerEngine, config: str, note: Note
) -> None:
    with docker_stop(engine) as stop:
        cell = await run(stop, SITUATIONS["everything"], config)
    assert cell.failures == [], cell.log
    assert cell.code == 0
    note(f"docker stop, {config}: {cell.accepted} requests accepted, {cell.outcomes}; {cell.seconds:g} s")
