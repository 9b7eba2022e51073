"""Which files of a checkpoint are used, and whether it is one that can be prepared, before anything large is read.

Knows names and the small JSON files; where they come from, a folder or the hub, is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from triton_prepare.errors import SourceError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# A licence may ask to be handed on with the weights.
_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class CheckpointFiles:
    """Names of the files that are used. kept: those that the prepared checkpoint takes over as they are."""

    config: tuple[str, ...]
    weights: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def small(self) -> tuple[str, ...]:
        """Everything but the weights."""
        return (*self.config, *self.kept)

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.small, *self.weights)


def find_files(model: str, names: Collection[str], read: Callable[[str], str]) -> CheckpointFiles:
    """Return the files of a checkpoint. names: those there are. read: returns the text of one of them.

    Raises SourceError for what isn't a Llama in safetensors, unquantized.
    """
    if CONFIG not in names:
        raise SourceError(f"{model} has no {CONFIG}: it is no checkpoint")
    _check_config(model, _json(model, CONFIG, read))
    config, weights = [CONFIG], [_WEIGHTS]
    # As transformers chooses: a whole file goes before an index.
    if _WEIGHTS not in names:
        if _INDEX not in names:
            raise SourceError(_without_safetensors(model, names))
        config.append(_INDEX)
        weights = _shards(model, names, read)
    kept = [name for name in (GENERATION_CONFIG, *_TOKENIZER) if name in names]
    kept += sorted(name for name in names if name.startswith(_LEGAL) and "/" not in name)
    return CheckpointFiles(tuple(config), tuple(weights), tuple(kept))


def _check_config(model: str, config: dict[str, Any]) -> None:
    if config.get("model_type") != "llama":
        raise SourceError(f"{model} is a {config.get('model_type')!r} checkpoint; this project serves 'llama'")
    if config.get("quantization_config"):
        raise SourceError(f"{model} is quantized already: there is nothing to prepare, serve it as it is")


def _shards(model: str, names: Collection[str], read: Callable[[str], str]) -> list[str]:
    index = _json(model, _INDEX, read).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise SourceError(f"{model}: {_INDEX} has no weight_map")
    shards = sorted({str(name) for name in index.values()})
    if absent := [name for name in shards if name not in names]:
        raise SourceError(f"{model} lacks {len(absent)} of {len(shards)} files of weights, first {absent[0]}")
    return shards


def _without_safetensors(model: str, names: Collection[str]) -> str:
    pickled = sorted(name for name in names if name.endswith(_PICKLED))
    if pickled:
        return f"{model} has its weights in pickles only ({pickled[0]}), which can run code; safetensors are needed"
    return f"{model} has no weights in safetensors: neither {_WEIGHTS} nor {_INDEX}"


def _json(model: str, name: str, read: Callable[[str], str]) -> dict[str, Any]:
    try:
        content = json.loads(read(name))
    except ValueError as error:
        raise SourceError(f"{model}: {name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{model}: {name} is not a JSON object")
    return content
