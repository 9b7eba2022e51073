"""The description of a checkpoint, as a server has it that serves the checkpoint."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "pydoc-llama"
CONTEXT = 2048


@cache
def description_of(folder: Path = EMBEDDED) -> dict[str, object]:
    """Return the document of the checkpoint in a folder."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return described(
        name=folder.name,
        model_type="llama",
        vocabulary=3072,
        max_model_len=CONTEXT,
        end_token_ids=[2],
        special_tokens={name: token for name, token in config.items() if name.endswith("_token") and token},
        chat_templates={"default": (folder / "chat_template.jinja").read_text()},
        tokenizer_class=config["tokenizer_class"],
        tokenizer=(folder / "tokenizer.json").read_text(),
        checkpoint_defaults=["temperature", "top_p"],
        tasks=["generate", "embed"],
        embedding_size=4,
    )


def described(**fields: object) -> dict[str, object]:
    """Return a document with its digest."""
    fields = {"format": 1, **fields}
    return {**fields, "digest": hashlib.sha256(json.dumps(fields).encode()).hexdigest()}


def changed(**fields: object) -> dict[str, object]:
    """Return the embedded checkpoint's document with other fields."""
    return described(**{**description_of(), **fields})
