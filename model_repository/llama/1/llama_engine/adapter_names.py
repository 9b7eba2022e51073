"""Names of LoRA adapters, and where the setting `lora_adapters` says that they are."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from llama_engine.bounds import BoundError, Pattern, decode, show

MAX_NUMBER = 2**64 - 1
"""Maximum of an adapter's number, TensorRT-LLM's `lora_task_id`."""

_NAME = r"[A-Za-z0-9._/-]{1,128}"
_CHARACTERS = "1 to 128 characters of A-Z, a-z, 0-9, '.', '_', '/' and '-'"

ADAPTER_NAME = Pattern(f"{_CHARACTERS}, or empty for none", f"({_NAME})?")
"""The name of an adapter; empty is none."""

_SOURCE = re.compile(rf"({_NAME})(?::([0-9]{{1,20}}))?=(\S.*)", re.ASCII)


class AdapterSource(NamedTuple):
    """An adapter of the setting. number: 0 is none. source: a folder, or a hub id with or without @REVISION."""

    name: str
    number: int
    source: str

    def __repr__(self) -> str:
        """Return the adapter as in the setting, for the log."""
        return f"{self.name}{f':{self.number}' if self.number else ''}={self.source}"


@dataclass(frozen=True)
class AdapterSources:
    """Adapters by name, separated by commas; empty is none. No two have one name, or one number."""

    description = (
        "NAME=SOURCE or NAME:NUMBER=SOURCE, separated by commas, each name and number once; a name has "
        f"{_CHARACTERS}, a number is 1 to 2^64 - 1"
    )

    def parse(self, value: object) -> tuple[AdapterSource, ...]:
        """Return the adapters, or raise BoundError."""
        text = decode(value)
        sources = tuple(self._source(part.strip()) for part in text.split(",")) if text else ()
        names = Counter(source.name for source in sources)
        numbers = Counter(source.number for source in sources if source.number)
        if any(count > 1 for count in (*names.values(), *numbers.values())):
            raise BoundError(show(text), self.description)
        return sources

    def _source(self, text: str) -> AdapterSource:
        match = _SOURCE.fullmatch(text)
        number = int(match[2]) if match and match[2] else None
        if match is None or (number is not None and not 0 < number <= MAX_NUMBER):
            raise BoundError(show(text), self.description)
        return AdapterSource(match[1], number or 0, match[3])
