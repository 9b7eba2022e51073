"""Two tenants of one server: nothing of one's requests is in the other's responses, or in what everyone can read.

Time is left out: docs/threats.md says what it shows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notes import Note
from server.metrics import fields, said
from server.servers import until
from server.tenants.campaign import KEYS, Campaign
from server.tenants.endpoint_requests import TEMPLATE
from server.tenants.sending import connected
from server.tenants.surroundings import surroundings
from triton_local.server import LocalTriton

SEED = 18
_ENDPOINT_COUNTS = re.compile(r" INFO (\S+) \S+: 200, .* prompt (\d+), completion (\d+) tokens$", re.MULTILINE)


@pytest.mark.parametrize(
    ("server", "faults", "requests", "repeated"),
    [
        pytest.param("streaming", False, 400, 40, id="some"),
        pytest.param("faulty", True, 10_000, 300, id="many", marks=pytest.mark.campaign),
    ],
    indirect=["server"],
)
async def test_nothing_of_a_request_is_in_anothers_response_or_in_logs_metrics_and_statistics(
    server: LocalTriton, faults: bool, requests: int, repeated: int, tmp_path: Path, note: Note
) -> None:
    """requests: of both tenants together. repeated: those that are sent again alone, and get the same response."""
    campaign = Campaign(SEED, faults)
    with surroundings(server, campaign.phrases, tmp_path, KEYS, TEMPLATE) as around:
        async with connected(server, around.url, KEYS) as tenants:
            await campaign.run(tenants, requests, around.look)
            same = await campaign.repeat(tenants, repeated)
        around.look()
        told = campaign.counts()

        def missing() -> set[str]:
            return told.keys() - _logged(server, around.log).keys()

        # A line is written after the answer is sent, and passes through Triton.
        until(lambda: not missing(), lambda: f"requests {missing()} are in a log")
        around.search_logs()
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(campaign.outcomes.items()))
    note(f"two tenants, {requests} requests, {campaign.refused} refused or failed, {same} again alone: {outcomes}")
    assert campaign.leaks == []
    assert campaign.wrong == []
    assert around.found == {}
    assert around.new_labels() == set()
    logged = _logged(server, around.log)
    assert {name: logged[name] for name in told} == {name: {count} for name, count in told.items()}
    # The search finds what is there.
    assert {"prompt", "phrase", "guide", "note", "tool", "value", "id"} <= campaign.own
    assert len(campaign.asked) == requests
    assert min(len(told), campaign.refused) > requests / 6


def _logged(server: LocalTriton, endpoint: Path) -> dict[str, set[tuple[int, int]]]:
    """Return the counts of tokens of prompt and text that both logs have for an id."""
    lines = [fields(message) for message in said(server)]
    answered = [line for line in lines if set(line["finish_reason"].split(",")) <= {"stop", "length"}]
    found = [(line["id"], line["input_tokens"], line["output_tokens"]) for line in answered]
    logged: dict[str, set[tuple[int, int]]] = {}
    for name, prompt, tokens in [*found, *_ENDPOINT_COUNTS.findall(endpoint.read_text())]:
        logged.setdefault(name, set()).add((int(prompt), int(tokens)))
    return logged
