"""The health probe works inside the container: with its user and limits, and without any Python package."""

from __future__ import annotations

import pytest
from compose.project import ComposeProject

# No step is that recent, so an idle server must generate a token.
PROBE = ("/srv/triton-llama/bin/health", "--timeout", "20", "--step-age", "0.000001")


@pytest.mark.parametrize(("flags", "word"), [((), "healthy"), (("--live",), "alive"), (("--ready",), "ready")])
def test_a_probe_gets_a_token_from_a_running_server(served: ComposeProject, flags: tuple[str, ...], word: str) -> None:
    probe = served.inside(*PROBE, *flags)
    assert probe.stdout.startswith(f"{word}: one token in ")
    assert "no metrics" not in probe.stdout
    assert (len(probe.stdout.splitlines()), probe.stderr) == (1, "")


def test_a_probe_of_an_absent_server_fails_in_one_line(served: ComposeProject) -> None:
    refused = served.inside(*PROBE, "--url", "127.0.0.1:1", check=False)
    assert refused.returncode == 1
    assert refused.stdout.startswith("unhealthy: 127.0.0.1:1 can't be asked: ")
    assert len(refused.stdout.splitlines()) == 1
