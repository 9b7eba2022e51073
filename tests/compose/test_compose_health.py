"""The probe inside the container: its user and its limits suffice, it needs no package, and it gets a token.

What becomes of a container whose model is dead is the supervisor's tests' business.
"""

from __future__ import annotations

import pytest
from compose.project import ComposeProject

# No step is that young: an idle server computes a token.
PROBE = ("/srv/triton-llama/bin/health", "--timeout", "20", "--step-age", "0.000001")


@pytest.mark.parametrize(("flags", "word"), [((), "healthy"), (("--live",), "alive"), (("--ready",), "ready")])
def test_a_probe_gets_no_token_from_a_server_that_serves(
    served: ComposeProject, flags: tuple[str, ...], word: str
) -> None:
    said = served.inside(*PROBE, *flags)
    assert said.stdout.startswith(f"{word}: one token in ")
    assert "no metrics" not in said.stdout
    assert (len(said.stdout.splitlines()), said.stderr) == (1, "")


def test_a_server_that_is_not_there_is_healthy_or_more_than_a_line(served: ComposeProject) -> None:
    refused = served.inside(*PROBE, "--url", "127.0.0.1:1", check=False)
    assert refused.returncode == 1
    assert refused.stdout.startswith("unhealthy: 127.0.0.1:1 can't be asked: ")
    assert len(refused.stdout.splitlines()) == 1
