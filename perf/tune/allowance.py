"""How many measurements there is still time for. A measurement is begun if one as long as the longest so far fits."""

from __future__ import annotations

from collections.abc import Callable


class Allowance:
    """So many seconds and so many measurements; whichever is over first.

    spent: seconds that are over, on whatever clock.
    """

    def __init__(self, seconds: float, most: int, spent: Callable[[], float]) -> None:
        self._seconds = seconds
        self._spent = spent
        self._longest = 0.0
        self.most = most
        self.made = 0

    def permits(self, share: float = 1.0) -> bool:
        """Say whether another measurement fits into this share of the whole."""
        return self.made < share * self.most and self._spent() + self._longest < share * self._seconds

    def measuring(self) -> Callable[[], None]:
        """Note that a measurement begins; call what is returned when it has ended."""
        began = self._spent()
        self.made += 1

        def end() -> None:
            self._longest = max(self._longest, self._spent() - began)

        return end
