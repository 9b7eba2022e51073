"""The server's side of a receipt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONTRACT = 2
"""Version of the arithmetic and the guides. A release that changes the bits of an exact path, or the texts that a guide
allows, raises it.
"""


@dataclass(frozen=True)
class Origin:
    """What determines tokens besides the request. checkpoint: digest. settings: those that change bits, as served."""

    checkpoint: str
    settings: Mapping[str, str]
    contract: int = CONTRACT

    def difference(self, other: Origin) -> tuple[str, str, str] | None:
        """Return what differs first, its value here and that of the other, as texts; None if nothing does."""
        here, there = self._facts(), other._facts()
        names = (name for name in {**here, **there} if here.get(name) != there.get(name))
        return next(((name, str(here.get(name)), str(there.get(name))) for name in names), None)

    def _facts(self) -> Mapping[str, str]:
        settings = {f"setting {name}": value for name, value in self.settings.items()}
        return {"contract": str(self.contract), "checkpoint": self.checkpoint, **settings}
