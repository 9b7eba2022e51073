"""Writes a checkpoint that AutoModelForCausalLM and AutoTokenizer load; no reader sees half a file."""

import json
import shutil
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def publish(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, training: dict[str, object]
) -> None:
    """Write beside `out`, then move in file by file; `training` becomes training.json. Other files in `out` stay."""
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    _portable_tokenizer_config(staging / "tokenizer_config.json")
    (staging / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(staging.iterdir()):
        file.chmod(0o644)  # safetensors writes 0600, and a server runs as another user
        file.replace(out / file.name)
    staging.rmdir()


def _portable_tokenizer_config(file: Path) -> None:
    """Drop what describes the loading of our own temporary copy, and name the class as every release knows it."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
