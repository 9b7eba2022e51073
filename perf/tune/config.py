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
from perf.tune.points import Knobs

PREFILL = "prefill_tokens"


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
    has_batcher = config.HasField("dynamic_batching")
    # The other parameters are the model's to check.
    prefill = {name: value.string_value for name, value in config.parameters.items() if name == PREFILL}
    return Knobs(
        max_queue_delay_microseconds=batcher.max_queue_delay_microseconds if has_batcher else None,
        # Triton's default is the full batch.
        preferred_batch_size=(tuple(batcher.preferred_batch_size) or (config.max_batch_size,)) if has_batcher else None,
        slots=config.max_batch_size,
        prefill_tokens=Settings.parse(prefill, {}).prefill_tokens,
    )


def edited(text: str, knobs: Knobs) -> str:
    """Return the config's text with these settings and every other character unchanged.

    Raises ConfigError for a form that isn't understood, and for a batcher that would have to be added or removed.
    """
    wanted = parsed(text)
    has_batcher = knobs.preferred_batch_size is not None
    if wanted.HasField("dynamic_batching") != has_batcher:
        raise ConfigError("a dynamic batcher is neither added to a config nor removed from one")
    result = _set(text, r"max_batch_size\s*:\s*\d+", f"max_batch_size: {knobs.slots}")
    wanted.max_batch_size = knobs.slots
    if has_batcher:
        preferred = f"preferred_batch_size: [ {knobs.preferred(', ')} ]"
        result = _set(result, r"preferred_batch_size\s*:\s*\[[^\]]*\]", preferred, batcher=True)
        delay = f"max_queue_delay_microseconds: {knobs.max_queue_delay_microseconds}"
        result = _set(result, r"max_queue_delay_microseconds\s*:\s*\d+", delay, batcher=True)
        wanted.dynamic_batching.preferred_batch_size[:] = knobs.preferred_batch_size
        wanted.dynamic_batching.max_queue_delay_microseconds = knobs.max_queue_delay_microseconds
    if PREFILL in wanted.parameters or knobs.prefill_tokens != Settings.prefill_tokens:
        line = f'parameters: {{ key: "{PREFILL}", value: {{ string_value: "{knobs.prefill_tokens}" }} }}'
        value = r'value\s*:?\s*\{\s*string_value\s*:\s*"\d+"\s*\}'
        pattern = rf'parameters\s*:?\s*\{{\s*key\s*:\s*"{PREFILL}"\s*[,;]?\s*{value}\s*\}}'
        result = _set(result, pattern, line) if PREFILL in wanted.parameters else f"{result.rstrip()}\n{line}\n"
        wanted.parameters[PREFILL].string_value = str(knobs.prefill_tokens)
    if parsed(result) != wanted:
        raise ConfigError(
            f"the config can't be changed to {knobs.describe()} in place: write max_batch_size, preferred_batch_size "
            f"[ … ], max_queue_delay_microseconds and the parameter {PREFILL} as model_repository/llama/config.pbtxt "
            "does, each once and at the beginning of a line"
        )
    return result


def _set(text: str, pattern: str, line: str, batcher: bool = False) -> str:
    """Set a field that begins a line, where no comment or string has it. batcher: added to the batcher if missing."""
    found, count = re.subn(rf"^([ \t]*){pattern}", rf"\g<1>{line}", text, flags=re.MULTILINE)
    if count or not batcher:
        return found
    return re.sub(r"^dynamic_batching\s*:?\s*\{", rf"dynamic_batching {{\n  {line}\n", text, flags=re.MULTILINE)


def _config_file(repository: Path, variant: str) -> Path:
    model = repository / MODEL_NAME
    return model / "config.pbtxt" if variant == DEFAULT_VARIANT else model / "configs" / f"{variant}.pbtxt"
