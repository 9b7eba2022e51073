"""What is tuned: one config of the model repository and a checkpoint; and the repository's copies with it changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triton_local.repository import DEFAULT_VARIANT, MODEL_NAME, ModelRepository

from perf.environment import ROOT
from perf.tune.config import edited, knobs_of, parsed
from perf.tune.knobs import Knobs


@dataclass(frozen=True)
class Subject:
    """text: of the variant's config as it is. model: folder or hub id. threads: of a server on a CPU."""

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
        # Before any time is spent: what is there already can be written back.
        edited(subject.text, subject.knobs)
        return subject

    @property
    def knobs(self) -> Knobs:
        """The settings of the config as it is."""
        return knobs_of(parsed(self.text))

    @property
    def weights(self) -> str:
        """The weights' precision, as the config asks for it."""
        parameters = parsed(self.text).parameters
        kind = parameters["quantization"].string_value or "int8"
        kind = parameters["dtype"].string_value or "auto" if kind == "none" else kind
        return {"int8": "INT8", "nf4": "NF4", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}.get(kind, kind)

    @contextmanager
    def repository(self, knobs: Knobs) -> Iterator[Path]:
        """Have a copy of the model repository whose config has these settings, for as long as the block lasts."""
        with tempfile.TemporaryDirectory(prefix="triton-llama-tune-") as folder:
            copy = Path(folder) / "model_repository"
            shutil.copytree(ROOT / "model_repository", copy, ignore=shutil.ignore_patterns("__pycache__"))
            _config_file(copy, self.variant).write_text(edited(self.text, knobs))
            yield copy


def _config_file(repository: Path, variant: str) -> Path:
    model = repository / MODEL_NAME
    return model / "config.pbtxt" if variant == DEFAULT_VARIANT else model / "configs" / f"{variant}.pbtxt"
