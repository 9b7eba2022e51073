"""One entry of the table of request parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from llama_engine.bounds import Bound, Flag, Integer, Real
from llama_engine.request.collection_bounds import Numbers, TokenIds, Words

_T = TypeVar("_T")
_TYPES = {Integer: "INT32", TokenIds: "INT32", Real: "FP32", Numbers: "FP32", Flag: "BOOL"}


@dataclass(frozen=True)
class Parameter:
    """One entry of the table.

    meaning: description for the documentation. aliases: alternative names of the input. checkpoint: key of its default
    in generation_config.json; empty if that has none.
    """

    default: object
    bound: Bound[object]
    meaning: str
    aliases: tuple[str, ...] = ()
    checkpoint: str = ""

    @property
    def type(self) -> str:
        """Triton data type without the prefix TYPE_, such as INT32."""
        is_long = isinstance(self.bound, Integer) and self.bound.high is not None and self.bound.high >= 1 << 32
        return "UINT64" if is_long else _TYPES.get(type(self.bound), "STRING")

    @cached_property
    def is_list(self) -> bool:
        """Whether the parameter has a variable number of values; else it has one."""
        return isinstance(self.bound, (Words, Numbers, TokenIds))


def parameter(
    default: _T, bound: Bound[_T], meaning: str, *, aliases: tuple[str, ...] = (), checkpoint: str = ""
) -> _T:
    """Return a field of `RequestParameters` with its entry of the table."""
    entry = Parameter(default, bound, meaning, aliases, checkpoint)
    # repr=False keeps prompts, words and guides out of logs.
    return field(default=default, repr=entry.type != "STRING", metadata={"parameter": entry})
