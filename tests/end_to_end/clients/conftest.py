"""The endpoint in front of a real server under the config streaming, for clients as they are published."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.openai_endpoint import in_front_of
from end_to_end.plans import copy_repository
from end_to_end.servers import new_server


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a client of OpenAI's protocol is given."""
    # On a busy machine the tokens of a quick answer come in one event.
    repository = copy_repository(tmp_path_factory.mktemp("repository"), "slow_model")
    with (
        new_server("streaming", repository=repository) as server,
        in_front_of(server, stream_interval_ms=0) as endpoint,
    ):
        yield endpoint.base_url
