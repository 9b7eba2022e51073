"""A model config's text with its tuned settings changed, and nothing else: its comments and its order stay.

The text is edited in place; then it is parsed with Triton's own protobuf and compared with the message that was meant,
so that a config written in a way that the edit doesn't understand is refused and never changed wrongly. What the
settings do isn't known here.
"""

from __future__ import annotations

import re

from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from llama_engine.settings import Settings
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.tune.knobs import Batcher, Knobs, sizes

PREFILL = "prefill_tokens"
_DELAY = "max_queue_delay_microseconds"
_PREFERRED = "preferred_batch_size"


class ConfigError(Exception):
    """The config can't be tuned; the message says why."""


def parsed(text: str) -> ModelConfig:
    """Return a config's text as Triton's message. Raises ConfigError with the place that can't be read."""
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"no config that Triton could read: {error}") from error


def knobs_of(config: ModelConfig) -> Knobs:
    """Return the tuned settings of a config, with the engine's defaults where it has none.

    Raises ConfigError if it sets `slots` by itself: the search would change max_batch_size without effect.
    """
    if "slots" in config.parameters:
        raise ConfigError("the config has a parameter slots; take it out: the slots that are tuned are max_batch_size")
    batcher = config.dynamic_batching
    return Knobs(
        batcher=Batcher(
            batcher.max_queue_delay_microseconds,
            # Where there is none Triton itself puts the full batch, as the config that it shows says.
            tuple(batcher.preferred_batch_size) or (config.max_batch_size,),
        )
        if config.HasField("dynamic_batching")
        else None,
        slots=config.max_batch_size,
        prefill_tokens=Settings.parse(_own_parameters(config), {}).prefill_tokens,
    )


def intended(config: ModelConfig, knobs: Knobs) -> ModelConfig:
    """Return a copy of a config with these settings. Raises ConfigError if only one of the two has a batcher."""
    if config.HasField("dynamic_batching") != (knobs.batcher is not None):
        raise ConfigError("a dynamic batcher is neither added to a config nor taken out of one")
    wanted = ModelConfig()
    wanted.CopyFrom(config)
    wanted.max_batch_size = knobs.slots
    if knobs.batcher is not None:
        wanted.dynamic_batching.preferred_batch_size[:] = knobs.batcher.preferred
        wanted.dynamic_batching.max_queue_delay_microseconds = knobs.batcher.delay_microseconds
    if _needs_prefill(config, knobs):
        wanted.parameters[PREFILL].string_value = str(knobs.prefill_tokens)
    return wanted


def edited(text: str, knobs: Knobs) -> str:
    """Return the config's text with these settings; every other character stays where it was.

    Raises ConfigError if the text is written in a way that isn't understood here.
    """
    config = parsed(text)
    wanted = intended(config, knobs)
    result = _set(text, r"max_batch_size\s*:\s*\d+", f"max_batch_size: {knobs.slots}")
    if knobs.batcher is not None:
        line = f"{_PREFERRED}: [ {sizes(knobs.batcher.preferred, ', ')} ]"
        result = _set_in_batcher(result, rf"{_PREFERRED}\s*:\s*\[[^\]]*\]", line)
        line = f"{_DELAY}: {knobs.batcher.delay_microseconds}"
        result = _set_in_batcher(result, rf"{_DELAY}\s*:\s*\d+", line)
    if _needs_prefill(config, knobs):
        line = f'parameters: {{ key: "{PREFILL}", value: {{ string_value: "{knobs.prefill_tokens}" }} }}'
        value = r'value\s*:?\s*\{\s*string_value\s*:\s*"\d+"\s*\}'
        pattern = rf'parameters\s*:?\s*\{{\s*key\s*:\s*"{PREFILL}"\s*[,;]?\s*{value}\s*\}}'
        result = _set(result, pattern, line) if PREFILL in config.parameters else f"{result.rstrip()}\n{line}\n"
    if parsed(result) != wanted:
        raise ConfigError(
            f"the config can't be changed to {knobs.describe()} in place: write max_batch_size, {_PREFERRED} [ … ], "
            f"{_DELAY} and the parameter {PREFILL} as model_repository/llama/config.pbtxt does, each once"
        )
    return result


def _needs_prefill(config: ModelConfig, knobs: Knobs) -> bool:
    return PREFILL in config.parameters or knobs.prefill_tokens != Settings.prefill_tokens


def _own_parameters(config: ModelConfig) -> dict[str, str]:
    """Return what the config says about the bound of prompt tokens; the other settings are the model's to check."""
    return {name: value.string_value for name, value in config.parameters.items() if name == PREFILL}


def _set_in_batcher(text: str, pattern: str, line: str) -> str:
    """Set a field of the batcher; it needn't be there."""
    if any(not match["other"] for match in _outside(pattern).finditer(text)):
        return _set(text, pattern, line)
    return _set(text, r"dynamic_batching\s*:?\s*\{", f"dynamic_batching {{\n  {line}\n")


def _set(text: str, pattern: str, line: str) -> str:
    """Replace what the pattern finds."""
    return _outside(pattern).sub(lambda match: match[0] if match["other"] else line, text)


def _outside(pattern: str) -> re.Pattern[str]:
    """Return the pattern such that comments and strings are matched first, as the group `other`."""
    return re.compile(rf'(?P<other>#[^\n]*|"(?:\\.|[^"\\\n])*")|{pattern}')
