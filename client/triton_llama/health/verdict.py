"""What a probe comes to."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """Yes or no, and why, in one line."""

    ok: bool
    reason: str
