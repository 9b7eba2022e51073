"""A model config with its tuned settings changed in place: comments and order stay.

The edited text is parsed with Triton's own protobuf and compared with the intended message: a config in a form that the
edit doesn't understand is refused, never changed wrongly.
"""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from llama_engine.settings import Settings
from triton_local.repository import DEFAULT_VARIANT, MODEL_NAME
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.tune.points import Knobs

PREFILL = "prefill_tokens"


class ConfigError(Exception):
    """The config can't be tuned; the message gives the reason."""


def config_file(repository: Path, variant: str) -> Path:
    """Return the path of a variant's config."""
    model = repository / MODEL_NAME
    return model / "config.pbtxt" if variant == DEFAULT_VARIANT else model / "configs" / f"{variant}.pbtxt"


def parsed(text: str) -> ModelConfig:
    """Parse a config. Raises ConfigError with the place of a syntax error."""
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"Triton could not read the config: {error}") from error


def knobs_of(config: ModelConfig) -> Knobs:
    """Return a config's tuned settings, with the engine's defaults.

    Raises ConfigError without a dynamic batcher, and with a parameter `slots`: max_batch_size would have no effect.
    """
    if "slots" in config.parameters:
        raise ConfigError("the config has a parameter slots; remove it: max_batch_size is what is tuned")
    if not config.HasField("dynamic_batching"):
        raise ConfigError("the config has no dynamic_batching, whose settings are tuned")
    batcher = config.dynamic_batching
    # The other parameters are the model's to check.
    prefill = {name: value.string_value for name, value in config.parameters.items() if name == PREFILL}
    return Knobs(
        max_queue_delay_microseconds=batcher.max_queue_delay_microseconds,
        # Triton's default is the full batch.
        preferred_batch_size=tuple(batcher.preferred_batch_size) or (config.max_batch_size,),
        slots=config.max_batch_size,
        prefill_tokens=Settings.parse(prefill, {}).prefill_tokens,
    )


def edited(text: str, knobs: Knobs) -> str:
    """Return the config's text with these settings and every other character unchanged.

    Raises ConfigError for a form that isn't understood.
    """
    wanted = parsed(text)
    sizes, delay = ", ".join(map(str, knobs.preferred_batch_size)), knobs.max_queue_delay_microseconds
    fields = {
        r"max_batch_size\s*:\s*\d+": f"max_batch_size: {knobs.slots}",
        r"preferred_batch_size\s*:\s*\[[^\]]*\]": f"preferred_batch_size: [ {sizes} ]",
        r"max_queue_delay_microseconds\s*:\s*\d+": f"max_queue_delay_microseconds: {delay}",
    }
    result = text
    for pattern, field in fields.items():
        # At the beginning of a line, where no comment or string has it.
        result = re.sub(rf"^([ \t]*){pattern}", rf"\g<1>{field}", result, flags=re.MULTILINE)
    if knobs.prefill_tokens != knobs_of(wanted).prefill_tokens:
        parameter = f'parameters: {{ key: "{PREFILL}", value: {{ string_value: "{knobs.prefill_tokens}" }} }}'
        others = re.sub(rf'^parameters: \{{ key: "{PREFILL}".*\n', "", result, flags=re.MULTILINE)
        result = f"{others.rstrip()}\n{parameter}\n"
        wanted.parameters[PREFILL].string_value = str(knobs.prefill_tokens)
    wanted.max_batch_size = knobs.slots
    wanted.dynamic_batching.preferred_batch_size[:] = knobs.preferred_batch_size
    wanted.dynamic_batching.max_queue_delay_microseconds = delay
    if parsed(result) != wanted:
        raise ConfigError(
            f"the config can't be changed to {knobs} in place: write max_batch_size, preferred_batch_size [ … ], "
            f"max_queue_delay_microseconds and the parameter {PREFILL} as model_repository/llama/config.pbtxt does, "
            "each once and at the beginning of a line"
        )
    return result
