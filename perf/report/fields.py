"""JSON objects read by name and type: what is missing or of another type is named with where it was looked for.

Results are written by other programs, by older versions of them, and by people with an editor; a table that shows
something else than was measured is worse than none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class ResultError(ValueError):
    """A result's file doesn't say what is asked of it. The message names the file, the field and what is there."""


class Fields:
    """A JSON object and where it stands, e.g. "bench.json: measurements: article/equal/naive_fp16"."""

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, Mapping):
            raise ResultError(f"{where} is {_shown(content)}, not an object")
        self._content: Mapping[str, object] = content
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._content.get(name) is not None

    def names(self) -> list[str]:
        """Return the names of the fields, in the file's order."""
        return list(self._content)

    def plain(self, name: str) -> object:
        """Return a field of any type; ResultError if it is absent."""
        if name not in self:
            raise ResultError(f"{self.where} has no {name!r}")
        return self._content[name]

    def text(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self.plain(name)
        if not isinstance(value, str) or not value:
            raise ResultError(f"{self.where}: {name} is {_shown(value)}, not a text")
        return value

    def number(self, name: str) -> float:
        """Return a number."""
        value = self.plain(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ResultError(f"{self.where}: {name} is {_shown(value)}, not a number")
        return value

    def count(self, name: str) -> int:
        """Return a whole number."""
        value = self.number(name)
        if not isinstance(value, int):
            raise ResultError(f"{self.where}: {name} is {value}, not a whole number")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.plain(name)
        if not isinstance(value, bool):
            raise ResultError(f"{self.where}: {name} is {_shown(value)}, not true or false")
        return value

    def part(self, name: str) -> Fields:
        """Return an object inside this one."""
        return Fields(self.plain(name), f"{self.where}: {name}")

    def parts(self) -> Iterator[tuple[str, Fields]]:
        """Yield every field, each of which is an object."""
        for name in self._content:
            yield name, self.part(name)

    def listed(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        value = self.plain(name)
        if not isinstance(value, list):
            raise ResultError(f"{self.where}: {name} is {_shown(value)}, not a list")
        return [Fields(item, f"{self.where}: {name}[{index}]") for index, item in enumerate(value)]

    def optional_number(self, name: str) -> float | None:
        """Return a number, or None where the field is absent or null."""
        return self.number(name) if name in self else None

    def optional_text(self, name: str) -> str | None:
        """Return a string, or None where the field is absent or null."""
        return self.text(name) if name in self else None

    def optional_part(self, name: str) -> Fields | None:
        """Return an object inside this one, or None where the field is absent or null."""
        return self.part(name) if name in self else None


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
