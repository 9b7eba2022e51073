"""The server's side of a receipt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONTRACT = 1
"""Version of the arithmetic. A release that changes the bits of an exact path raises it."""


@dataclass(frozen=True)
class Origin:
    """What determines tokens besides the request. checkpoint: digest. settings: those that change bits, as served."""

    checkpoint: str
    settings: Mapping[str, str]
    contract: int = CONTRACT
