"""What a campaign of hostile requests does when a server hangs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from perf import hostile


class _Siege:
    """Two batches, of which the first ends the campaign, or the server stays busy after it."""

    def __init__(self, server: object, *, busy: bool) -> None:
        self.failures: list[str] = []
        self.figures: dict[int, dict[str, float]] = {}
        self.gone = False
        self.campaign = SimpleNamespace(sent=0, asked=0, ended=False, by_route=dict)
        self._busy = busy

    def run(self, batch: object) -> None:
        assert self.campaign.sent == 0, "another batch was sent"
        self.campaign.sent = 3
        if self._busy:
            raise AssertionError("0 run, 0 wait")
        self.campaign.ended = True
        self.failures.append("three attacks hang")

    def finish(self) -> None:
        pass

    def computed(self) -> float:
        return 1.0

    refused = computed


@pytest.mark.parametrize(("busy", "failure"), [(False, "three attacks hang"), (True, "after 3 attacks: 0 run, 0 wait")])
def test_a_server_that_hangs_ends_the_campaign_with_a_failure(
    monkeypatch: pytest.MonkeyPatch, busy: bool, failure: str
) -> None:
    monkeypatch.setattr(hostile, "local_triton", lambda **_: nullcontext())
    monkeypatch.setattr(hostile, "Siege", lambda server: _Siege(server, busy=busy))
    monkeypatch.setattr(hostile, "unary_of", lambda _: "llama")
    monkeypatch.setattr(hostile, "all_attacks", lambda _: None)
    monkeypatch.setattr(hostile, "drawn", lambda *_: None)
    survived = hostile.attack(requests=10, threads=1, variant="default", seed=1)
    assert (survived["attacks"], survived["failures"]) == (3, [failure])
