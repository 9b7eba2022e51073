"""Defaults of missing request parameters: from the checkpoint's generation config, else from the parameter table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llama_engine.bounds import BoundError, show
from llama_engine.errors import CheckpointError
from llama_engine.request.collection_bounds import TokenIds
from llama_engine.request.parameters import PARAMETERS

if TYPE_CHECKING:
    from transformers import GenerationConfig

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Values of the generation config that apply only with `do_sample: true`."""

_HONOURED = {
    *(parameter.checkpoint for parameter in PARAMETERS.values()),
    *("do_sample", "eos_token_id", "suppress_tokens", "bad_words_ids"),
    # Without an effect on the tokens of a decoder.
    *(
        "bos_token_id",
        "pad_token_id",
        "cache_implementation",
        "use_cache",
        "transformers_version",
        "_from_model_config",
    ),
}
"""Fields of the generation config that aren't named as ignored."""

_NEUTRAL = (None, 0, 1)
"""Values that turn a field off, such as one beam; flags change nothing without beams."""

_SOURCE = "generation_config.json, or the model's config without one"


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's defaults. values: default by parameter name, for parameters that can have one in the checkpoint.

    end_tokens: ids of the tokens that end a completion, with their sources. from_checkpoint: names of the values that
    the checkpoint has. suppressed: ids of tokens that are never sampled. ignored: fields of the generation config that
    have no effect.
    """

    values: Mapping[str, object]
    end_tokens: Mapping[int, str] = field(default_factory=dict)
    from_checkpoint: frozenset[str] = frozenset()
    suppressed: tuple[int, ...] = ()
    ignored: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls, config: GenerationConfig, default_max_tokens: int, end_tokens: Mapping[int, str], vocabulary: int
    ) -> GenerationDefaults:
        """Read a checkpoint's generation config.

        Raises CheckpointError for a value outside a parameter's bound and for a suppressed token beyond the vocabulary.

        default_max_tokens: the setting. end_tokens: see `find_end_tokens`. vocabulary: number of token ids. With
        `do_sample: false`, the default of generation configs, the temperature is 0, and the config's temperature,
        top_k, top_p and min_p don't apply.
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
        suppressed = _suppressed(config)
        if any(token >= vocabulary for token in suppressed):
            message = f"suppress_tokens and bad_words_ids have {max(suppressed)}; they must be below {vocabulary}"
            raise CheckpointError(f"{_SOURCE}: {message}, the size of the vocabulary")
        return cls(values, end_tokens, frozenset(from_checkpoint), suppressed, _ignored(config))

    def describe(self) -> str:
        """Return the defaults as one line, for the log."""
        return " ".join(f"{name}={value}" for name, value in self.values.items())

    def describe_ignored(self) -> str:
        """Return the ignored fields as one line, empty without any."""
        return ", ".join(f"{name} {show(value)}" for name, value in self.ignored.items())


def _suppressed(config: GenerationConfig) -> tuple[int, ...]:
    """Return the ids of `suppress_tokens`, and of the `bad_words_ids` of one token."""
    tokens = _tokens("suppress_tokens", config.suppress_tokens or [])
    words = config.bad_words_ids or []
    if not isinstance(words, list):
        raise CheckpointError(f"{_SOURCE}: bad_words_ids is {show(words)}; it must be a list of lists of token ids")
    single = [word for word in (_tokens("bad_words_ids", word) for word in words) if len(word) == 1]
    return tuple(dict.fromkeys([*tokens, *(token for (token,) in single)]))


def _tokens(name: str, value: object) -> tuple[int, ...]:
    try:
        return TokenIds().parse(value)
    except BoundError as error:
        raise CheckpointError(f"{_SOURCE}: {name} {error}") from None


def _ignored(config: GenerationConfig) -> Mapping[str, object]:
    """Return the fields that have no effect here and would have one in transformers."""
    fields = {
        name: value
        for name, value in config.to_diff_dict().items()
        if (name not in _HONOURED or (name in _SAMPLING and not config.do_sample)) and value not in _NEUTRAL
    }
    words = [word for word in config.bad_words_ids or [] if len(word) > 1]
    return {**fields, **({"bad_words_ids": words} if words else {})}
