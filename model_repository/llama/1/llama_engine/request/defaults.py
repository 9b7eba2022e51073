"""Defaults of missing request parameters: from the checkpoint's generation config, else from the parameter table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llama_engine.bounds import BoundError, show
from llama_engine.errors import CheckpointError
from llama_engine.request.parameters import PARAMETERS

if TYPE_CHECKING:
    from transformers import GenerationConfig

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Values of the generation config that apply only with `do_sample: true`."""

_SOURCE = "generation_config.json, or the model's config without one"


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's defaults. values: default by parameter name, for parameters that can have one in the checkpoint.

    end_tokens: ids of the tokens that end a completion. from_checkpoint: names of the values that the checkpoint has.
    """

    values: Mapping[str, object]
    end_tokens: frozenset[int] = frozenset()
    from_checkpoint: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: GenerationConfig, default_max_tokens: int, vocabulary: int) -> GenerationDefaults:
        """Read a checkpoint's generation config. Raises CheckpointError for a value outside a parameter's bound.

        default_max_tokens: the setting. vocabulary: number of token ids. With `do_sample: false`, the default of
        generation configs, the temperature is 0, whatever temperature the config has.
        """
        # With do_sample, a missing temperature is 1, as in transformers.
        missing: dict[str, object] = {"max_tokens": default_max_tokens, "temperature": 1.0}
        values: dict[str, object] = {}
        # do_sample chooses a temperature: 0, or 1 if there is no other.
        from_checkpoint = {"temperature"} if config.do_sample is not None else set()
        if not isinstance(config.do_sample, bool | None):
            raise CheckpointError(f"{_SOURCE}: do_sample is {show(config.do_sample)}; it must be a flag")
        for name, parameter in PARAMETERS.items():
            if not parameter.checkpoint:
                continue
            values[name] = parameter.default
            if config.do_sample or name not in _SAMPLING:
                raw = getattr(config, parameter.checkpoint)
                value = missing.get(name, parameter.default) if raw is None else raw
                from_checkpoint |= set() if raw is None else {name}
                try:
                    values[name] = parameter.bound.parse(value)
                except BoundError as error:
                    raise CheckpointError(f"{_SOURCE}: {parameter.checkpoint} {error}") from None
        end = config.eos_token_id
        end_tokens = tuple(end if isinstance(end, list) else [] if end is None else [end])
        if not all(type(token) is int and 0 <= token < vocabulary for token in end_tokens):
            raise CheckpointError(f"{_SOURCE}: eos_token_id is {show(end)}; it must be below {vocabulary}")
        return cls(values, frozenset(end_tokens), frozenset(from_checkpoint))

    def describe(self) -> str:
        """Return the defaults as one line, for the log."""
        values = " ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{values} end_tokens={sorted(self.end_tokens)}"
