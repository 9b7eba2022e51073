"""Defaults of optional inputs: the checkpoint's generation config, else the contract's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from llama_engine.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import GenerationConfig

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class GenerationDefaults:
    """Resolved defaults, in the contract's units and bounds. end_tokens: ids that end a completion."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    end_tokens: frozenset[int] = frozenset()
    min_p: float = 0.0

    @classmethod
    def from_config(cls, config: GenerationConfig, default_max_tokens: int, vocabulary: int) -> GenerationDefaults:
        """Read a checkpoint's generation config. Raises CheckpointError for a value outside the contract's bounds.

        vocabulary: size of the model's vocabulary. `do_sample: false`, the config's own default, means temperature 0
        whatever the config's temperature.
        """
        end = config.eos_token_id
        defaults = cls(
            max_tokens=_given(config.max_new_tokens, default_max_tokens),
            min_tokens=_given(config.min_new_tokens, 0),
            temperature=float(_given(config.temperature, 1.0)) if config.do_sample else 0.0,
            top_k=_given(config.top_k, 0) if config.do_sample else 0,
            top_p=float(_given(config.top_p, 1.0)) if config.do_sample else 1.0,
            repetition_penalty=float(_given(config.repetition_penalty, 1.0)),
            end_tokens=frozenset(end if isinstance(end, list) else [] if end is None else [end]),
            min_p=float(_given(config.min_p, 0.0)) if config.do_sample else 0.0,
        )
        for name, inside, bound in (
            ("max_new_tokens", defaults.max_tokens >= 1, "at least 1"),
            ("min_new_tokens", defaults.min_tokens >= 0, "at least 0"),
            ("temperature", 0.0 <= defaults.temperature <= 2.0, "from 0 to 2"),
            ("top_k", defaults.top_k >= 0, "at least 0"),
            ("top_p", 0.0 < defaults.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= defaults.min_p <= 1.0, "from 0 to 1"),
            ("eos_token_id", all(0 <= token < vocabulary for token in defaults.end_tokens), f"below {vocabulary}"),
            ("repetition_penalty", 0.0 < defaults.repetition_penalty < float("inf"), "a finite number above 0"),
        ):
            if not inside:
                raise CheckpointError(f"generation_config.json: {name} is {getattr(config, name)}; it must be {bound}")
        return defaults

    def describe(self) -> str:
        """Return the defaults as one line, for the log."""
        return (
            f"max_tokens={self.max_tokens} temperature={self.temperature:g} top_k={self.top_k} top_p={self.top_p:g} "
            f"min_p={self.min_p:g} repetition_penalty={self.repetition_penalty:g} end_tokens={sorted(self.end_tokens)}"
        )


def _given(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
