"""The description of the served model: all that a client of the model needs of its checkpoint, as one JSON document.

With it a client tokenizes, renders chats and knows the limits as the model does, without the checkpoint's files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.model.loader import LoadedModel
from llama_engine.request.adapter_choice import Adapter, adapters_json
from llama_engine.request.defaults import GenerationDefaults

FORMAT = 1
"""Version of the document; a field more doesn't change it."""


@dataclass(frozen=True)
class ModelDescription:
    """The document, and some of its fields. digest: the SHA-256 of the other fields but `serving`.

    labels: those of the metric `llama_model_info`.
    """

    name: str
    digest: str
    tasks: list[str]
    labels: dict[str, str]
    document: str

    @classmethod
    def of(
        cls, loaded: LoadedModel, shape: KVCacheShape, defaults: GenerationDefaults, memory: str
    ) -> ModelDescription:
        """Describe a model as an engine with this KV cache serves it. docs/api.md lists the fields.

        memory: the memory plan for people. The digest leaves it out: replicas may differ in their memory.
        """
        pretrained, info = loaded.tokenizer.pretrained, loaded.info
        # Without an output head a model doesn't generate.
        served = {"generate": loaded.architecture.has_head, "embed": loaded.pooling is not None}
        name, tasks = _name(loaded.name), [task for task, is_served in served.items() if is_served]
        serving = {
            "model": loaded.architecture.describe(),
            "served": info.describe(),
            "memory": memory,
            "defaults on Triton's ports": defaults.describe(),
        }
        fields = {
            "format": FORMAT,
            "name": name,
            "model_type": loaded.architecture.model_type,
            "max_model_len": shape.max_model_len,
            "vocabulary": loaded.architecture.vocabulary,
            "embedding_size": loaded.architecture.hidden,
            "pooling": loaded.pooling.mode if loaded.pooling else "",
            "tasks": tasks,
            "end_token_ids": sorted(defaults.end_tokens),
            "special_tokens": pretrained.special_tokens_map,
            "chat_templates": loaded.tokenizer.chat_templates,
            "defaults": dict(defaults.values),
            "checkpoint_defaults": sorted(defaults.from_checkpoint),
            "weights": {"linears": sorted(info.linears), "digest": loaded.weights_digest},
            "computation": info.computation,
            "batch_invariant": info.batch_invariant,
            "dtype": _dtype(info.dtype),
            "kv_cache_dtype": _dtype(shape.dtype),
            "device": info.device.type,
            "tokenizer_class": type(pretrained).__name__,
            "tokenizer": pretrained.backend_tokenizer.to_str(),
        }
        digest = hashlib.sha256(_json(fields).encode()).hexdigest()
        labels = {"computation": info.computation, "kv_cache_dtype": _dtype(shape.dtype), "device": str(info.device)}
        return cls(name, digest, tasks, labels, _json({"digest": digest, "serving": serving, **fields}))

    def reply(self, known_digest: str, adapters: Iterable[Adapter]) -> str:
        """Return the document, or its digest for a client that has the document; and in both the loaded adapters."""
        fields = _json({"digest": self.digest}) if known_digest == self.digest else self.document
        return f'{fields[:-1]},"adapters":{adapters_json(adapters)}}}'


def _name(name: str) -> str:
    """Return the name of a checkpoint's folder, that of a GGUF file without its ending, or a hub id."""
    path = Path(name)
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else name


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
