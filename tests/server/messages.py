"""What no error message may tell a client."""

from __future__ import annotations

from server.servers import ROOT

SECRET = "cuda:0 is on fire at 10.0.0.1"
"""What a fault's exception says; it belongs into the log and nowhere else."""


def assert_clean(message: str) -> None:
    """Check that a message tells a client nothing about the inside of the server, in one line."""
    for inside in ("Traceback", ".py", "site-packages", str(ROOT), "line ", SECRET, "\n"):
        assert inside not in message, message
    assert len(message) < 1000
