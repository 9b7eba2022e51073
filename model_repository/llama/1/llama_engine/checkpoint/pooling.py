"""How a checkpoint's hidden states become an embedding: its sentence-transformers files, or its GGUF metadata.

modules.json lists modules of sentence-transformers: the transformer, then Pooling, with a config in its folder, and
Normalize where embeddings have the L2 norm 1. Older configs have a flag for each mode of pooling, newer ones
`pooling_mode`. Source: sentence_transformers/sentence_transformer/modules/pooling.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_engine.bounds import show
from llama_engine.checkpoint.files import MODULES, POOLING, TRANSFORMER
from llama_engine.checkpoint.headers import CheckpointHeaders
from llama_engine.checkpoint.json_files import file_error, read_json, read_object

_MODES: Mapping[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""The names of newer configs, and what follows `pooling_mode_` in the flags of older ones."""

_FLAG = "pooling_mode_"

_GGUF_MODES: Mapping[int, Literal["last", "mean"]] = {1: "mean", 3: "last"}
"""llama.cpp's numbers; 0 is none, 2 the first token, 4 a classifier."""

_ADVICE = "; the setting pooling, last, mean or off, overrides it"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pooling:
    """mode: which hidden states an embedding is made of. normalizes: whether its L2 norm is 1."""

    mode: Literal["last", "mean"]
    normalizes: bool = True

    def describe(self) -> str:
        """Return a description for the log."""
        states = "mean of all hidden states" if self.mode == "mean" else "last hidden state"
        return f"{states}{', L2 norm 1' if self.normalizes else ''}"


def choose_pooling(setting: str, headers: CheckpointHeaders) -> Pooling | None:
    """Return the pooling that the setting `pooling` selects for a checkpoint; None is off.

    Raises CheckpointError under `auto` for a module or a mode of pooling that isn't served.
    """
    if setting in ("last", "mean"):
        return Pooling("last" if setting == "last" else "mean")
    if setting == "off":
        return None
    if headers.gguf is not None:
        kind = headers.gguf.count("pooling_type", 0)
        if kind and kind not in _GGUF_MODES:
            raise headers.gguf.error(f"pooling_type is {kind}; this engine serves 1, mean, and 3, last{_ADVICE}")
        return Pooling(_GGUF_MODES[kind]) if kind else None
    path = headers.folder / MODULES
    return _read_modules(path) if path.exists() else None


def _read_modules(path: Path) -> Pooling:
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise file_error(path, "it is not a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        served = "Transformer, Pooling and perhaps Normalize"
        raise file_error(path, f"its modules are {show(', '.join(kinds))}; this engine serves {served}{_ADVICE}")
    if (name := modules[1].get("path")) != POOLING:
        raise file_error(path, f"the path of Pooling is {show(name)}; it must be {POOLING}{_ADVICE}")
    if (transformer := path.with_name(TRANSFORMER)).exists():
        _check_transformer(transformer)
    return Pooling(_read_mode(path.parent / POOLING / "config.json"), normalizes=len(kinds) == 3)


def _check_transformer(path: Path) -> None:
    """Refuse texts that sentence-transformers changes before it tokenizes them."""
    config = read_object(path)
    modalities = config.get("modality_config", {})
    if not isinstance(modalities, dict):
        raise file_error(path, f"modality_config is {show(modalities)}; it must be an object{_ADVICE}")
    if "message" in modalities:
        reason = "modality_config has 'message': its texts are chats, and this engine embeds a text as it is"
        raise file_error(path, f"{reason}{_ADVICE}")
    if lowers := config.get("do_lower_case", False):
        raise file_error(path, f"do_lower_case is {show(lowers)}; this engine embeds a text as it is{_ADVICE}")


def _read_mode(path: Path) -> Literal["last", "mean"]:
    config = read_object(path)
    modes = _modes(path, config)
    if len(modes) != 1 or modes[0] not in _MODES:
        names = ", ".join(modes)
        raise file_error(path, f"pooling_mode is {show(names)}; this engine serves lasttoken and mean{_ADVICE}")
    if config.get("include_prompt") is False:
        _log.warning("%s: include_prompt is false; an embedding includes the whole text all the same", path)
    return _MODES[modes[0]]


def _modes(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the names of all modes, which sentence-transformers concatenates; a config without any means mean."""
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        return list(map(str, mode)) if isinstance(mode, list) else [str(mode)]
    flags = {key: value for key, value in config.items() if key.startswith(_FLAG)}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise file_error(path, f"{key} is {show(value)}; it must be true or false{_ADVICE}")
    if flags and not any(flags.values()):
        raise file_error(path, f"{', '.join(flags)} is false; one of these must be true{_ADVICE}")
    return [key.removeprefix(_FLAG) for key, value in flags.items() if value] if flags else ["mean"]
