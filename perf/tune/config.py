"""A model config with its tuned settings changed in place: comments and order stay.

The edited text is parsed with Triton's own protobuf and compared with the intended message: a config in a form that the
edit doesn't understand is refused, never changed wrongly.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from llama_engine.settings import Settings
from triton_local.repository import DEFAULT_VARIANT, MODEL_NAME, ModelRepository
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.environment import ROOT
from perf.tune.points import Batcher, Knobs, sizes

PREFILL = "prefill_tokens"
_DELAY = "max_queue_delay_microseconds"
_PREFERRED = "preferred_batch_size"


class ConfigError(Exception):
    """The config can't be tuned; the message gives the reason."""


@dataclass(frozen=True)
class Subject:
    """The config to tune. text: of the variant. model: folder or hub id. threads: of a server on a CPU."""

    variant: str
    text: str
    model: str
    threads: int

    @classmethod
    def of(cls, variant: str, model: str, threads: int) -> Subject:
        """Read a variant's config. Raises UnknownVariantError, or ConfigError if it can't be tuned."""
        repository = ModelRepository.at(ROOT / "model_repository")
        repository.check_variant(variant)
        subject = cls(variant, _config_file(repository.path, variant).read_text(), model, threads)
        # Checked before any time is spent: the present settings can be written back.
        edited(subject.text, subject.knobs)
        return subject

    @property
    def knobs(self) -> Knobs:
        """The present settings."""
        return knobs_of(parsed(self.text))

    @property
    def weights(self) -> str:
        """The weights' precision."""
        parameters = parsed(self.text).parameters
        kind = parameters["quantization"].string_value or "int8"
        kind = parameters["dtype"].string_value or "auto" if kind == "none" else kind
        return {"int8": "INT8", "nf4": "NF4", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}.get(kind, kind)

    @contextmanager
    def repository(self, knobs: Knobs) -> Iterator[Path]:
        """Provide a copy of the model repository whose config has these settings."""
        with tempfile.TemporaryDirectory(prefix="triton-llama-tune-") as folder:
            copy = Path(folder) / "model_repository"
            shutil.copytree(ROOT / "model_repository", copy, ignore=shutil.ignore_patterns("__pycache__"))
            _config_file(copy, self.variant).write_text(edited(self.text, knobs))
            yield copy


def parsed(text: str) -> ModelConfig:
    """Parse a config. Raises ConfigError with the place of a syntax error."""
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"Triton could not read the config: {error}") from error


def knobs_of(config: ModelConfig) -> Knobs:
    """Return a config's tuned settings, with the engine's defaults.

    Raises ConfigError for a config with a parameter `slots`: max_batch_size would have no effect.
    """
    if "slots" in config.parameters:
        raise ConfigError("the config has a parameter slots; remove it: max_batch_size is what is tuned")
    batcher = config.dynamic_batching
    # The other parameters are the model's to check.
    prefill = {name: value.string_value for name, value in config.parameters.items() if name == PREFILL}
    return Knobs(
        batcher=Batcher(
            batcher.max_queue_delay_microseconds,
            # Triton's default is the full batch.
            tuple(batcher.preferred_batch_size) or (config.max_batch_size,),
        )
        if config.HasField("dynamic_batching")
        else None,
        slots=config.max_batch_size,
        prefill_tokens=Settings.parse(prefill, {}).prefill_tokens,
    )


def edited(text: str, knobs: Knobs) -> str:
    """Return the config's text with these settings and every other character unchanged.

    Raises ConfigError for a form that isn't understood, and for a batcher that would have to be added or removed.
    """
    config = parsed(text)
    wanted = _intended(config, knobs)
    result = _set(text, r"max_batch_size\s*:\s*\d+", f"max_batch_size: {knobs.slots}")
    if knobs.batcher is not None:
        line = f"{_PREFERRED}: [ {sizes(knobs.batcher.preferred, ', ')} ]"
        result = _set_in_batcher(result, rf"{_PREFERRED}\s*:\s*\[[^\]]*\]", line)
        line = f"{_DELAY}: {knobs.batcher.delay_microseconds}"
        result = _set_in_batcher(result, rf"{_DELAY}\s*:\s*\d+", line)
    if PREFILL in wanted.parameters:
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


def _intended(config: ModelConfig, knobs: Knobs) -> ModelConfig:
    if config.HasField("dynamic_batching") != (knobs.batcher is not None):
        raise ConfigError("a dynamic batcher is neither added to a config nor removed from one")
    wanted = ModelConfig()
    wanted.CopyFrom(config)
    wanted.max_batch_size = knobs.slots
    if knobs.batcher is not None:
        wanted.dynamic_batching.preferred_batch_size[:] = knobs.batcher.preferred
        wanted.dynamic_batching.max_queue_delay_microseconds = knobs.batcher.delay_microseconds
    if PREFILL in config.parameters or knobs.prefill_tokens != Settings.prefill_tokens:
        wanted.parameters[PREFILL].string_value = str(knobs.prefill_tokens)
    return wanted


def _set_in_batcher(text: str, pattern: str, line: str) -> str:
    """Set a field of the batcher, added if missing."""
    if any(not match["other"] for match in _outside(pattern).finditer(text)):
        return _set(text, pattern, line)
    return _set(text, r"dynamic_batching\s*:?\s*\{", f"dynamic_batching {{\n  {line}\n")


def _set(text: str, pattern: str, line: str) -> str:
    return _outside(pattern).sub(lambda match: match[0] if match["other"] else line, text)


def _outside(pattern: str) -> re.Pattern[str]:
    """Return the pattern outside comments and strings, which match first as the group `other`."""
    return re.compile(rf'(?P<other>#[^\n]*|"(?:\\.|[^"\\\n])*")|{pattern}')


def _config_file(repository: Path, variant: str) -> Path:
    model = repository / MODEL_NAME
    return model / "config.pbtxt" if variant == DEFAULT_VARIANT else model / "configs" / f"{variant}.pbtxt"
