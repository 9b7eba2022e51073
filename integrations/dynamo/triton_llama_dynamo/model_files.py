"""The files of a checkpoint that Dynamo's frontend reads, written from the model's description of itself."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path

from triton_llama_openai.triton.description import Description


def write_model_files(description: Description, folder: Path) -> None:
    """Write config, tokenizer and chat template as a Hugging Face checkpoint has them. folder: may exist.

    Raises:
        SystemExit: something else has the folder's name, or it is another user's.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise SystemExit(f"{folder} must be this user's folder: remove it, or set TMPDIR to another place")
    config = {
        # The frontend needs one, and uses none of a text model's.
        "architectures": ["LlamaForCausalLM"],
        "model_type": description.model_type,
        "eos_token_id": list(description.end_token_ids),
        "max_position_embeddings": description.max_model_len,
        "vocab_size": description.vocabulary,
    }
    tokenizer = {"tokenizer_class": description.tokenizer_class, **description.special_tokens}
    if "default" in description.chat_templates:
        tokenizer["chat_template"] = description.chat_templates["default"]
    files = {
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps({"eos_token_id": config["eos_token_id"]}),
        "tokenizer_config.json": json.dumps(tokenizer),
        "tokenizer.json": description.tokenizer,
    }
    for name, text in files.items():
        # Another worker may read or write the same file.
        written = folder / f".{name}.{os.getpid()}"
        written.write_text(text)
        written.replace(folder / name)
