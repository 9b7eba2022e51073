"""Say what a checkpoint is, how it would be served, and what it takes in memory, without loading its weights.

    python -m triton_prepare.inspect MODEL [--revision REVISION] [--json]

Settings are the environment's LLAMA_*, as for a server, with the default config's number of slots.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import llama_engine.libraries  # noqa: F401 - before anything that imports torch or transformers
import torch
from llama_engine.api.defaults import GenerationDefaults
from llama_engine.errors import EngineError
from llama_engine.model.architecture import Architecture
from llama_engine.model.checkpoint_headers import read_checkpoint_headers
from llama_engine.model.gguf.tensors import GgufTensors
from llama_engine.model.hub import resolve_headers
from llama_engine.model.loader import Checkpoint, describe_checkpoint, loading, resolve_name
from llama_engine.model.memory_plan import plan_memory
from llama_engine.model.precision import choose_device, quantization_config, saved_quantization
from llama_engine.model.saved_tensors import SavedTensors
from llama_engine.settings import Settings
from transformers import PreTrainedConfig

SLOTS = 32
"""The default config's max_batch_size."""

_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))

Line = tuple[str, str]
"""A label and a text."""


def inspect(settings: Settings, scratch: Path) -> Iterator[Line]:
    """Yield what is found out, line by line, up to a refusal, which is raised as an EngineError.

    scratch: an empty folder, for the headers of a hub id.
    """
    name = resolve_name(settings.model)
    folder = resolve_headers(name, settings.revision, scratch)
    with loading(name):
        headers = read_checkpoint_headers(folder, name)
    yield "model", _model(name, headers.architecture)
    yield "context", _context(headers.config, headers.architecture)
    yield "saved", _saved(headers.saved, headers.config)
    device = choose_device(settings.device, 0 if settings.device == "auto" and torch.cuda.is_available() else None)
    checkpoint = describe_checkpoint(name, headers, settings, device)
    yield "served", _served(checkpoint)
    defaults = GenerationDefaults.from_config(
        checkpoint.generation_config, settings.default_max_tokens, headers.architecture.vocabulary
    )
    yield "chat", _chat(checkpoint, defaults)
    plan = plan_memory(checkpoint, settings, settings.slots or SLOTS)
    yield "memory", plan.describe().removeprefix("memory plan ")
    plan.check()


def _model(name: str, architecture: Architecture) -> str:
    return (
        f"{name}: {architecture.model_type}, {architecture.layers} layers, hidden {architecture.hidden:,}, "
        f"{architecture.heads} heads ({architecture.kv_heads} KV) of {architecture.head_dim}, "
        f"vocabulary {architecture.vocabulary:,}"
    )


def _context(config: PreTrainedConfig, architecture: Architecture) -> str:
    parameters = config.rope_parameters or {}
    # One for all layers, or one for each kind of them.
    kinds = [parameters] if "rope_type" in parameters else [part for part in parameters.values() if part]
    ropes = sorted({str(kind["rope_type"]) for kind in kinds if isinstance(kind, dict) and "rope_type" in kind})
    text = f"{config.max_position_embeddings:,} tokens (RoPE {', '.join(ropes) or 'none'})"
    for window, count in sorted(Counter(window for window in architecture.windows if window is not None).items()):
        text += f", the last {window:,} in {count} layers"
    return text


def _saved(saved: SavedTensors, config: PreTrainedConfig) -> str:
    method, values = saved_quantization(config), quantization_config(config) or {}
    details = [f"{values['bits']} bits"] if "bits" in values else []
    details += [f"groups of {values['group_size']}"] if values.get("group_size") else []
    dtypes: Counter[str] = Counter()
    for name, tensor in saved.items():
        block = saved.block_type(name) if isinstance(saved, GgufTensors) else None
        dtypes[tensor.dtype if block is None else block.name] += tensor.end - tensor.begin
    files = len({tensor.path for tensor in saved.values()})
    parts = ", ".join(f"{dtype} {_size(count)}" for dtype, count in dtypes.most_common())
    kind = ", ".join(["floats" if method == "none" else method, *details])
    return f"{kind}; {parts} in {files} {'file' if files == 1 else 'files'}"


def _served(checkpoint: Checkpoint) -> str:
    info = checkpoint.info
    linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(info.linears.items()))
    dtype = str(info.dtype).removeprefix("torch.")
    now = saved_quantization(checkpoint.config) == "none" and set(info.linears) - {dtype}
    start = "; quantized at each start" if now else ""
    return (
        f"{info.computation}; linear layers {linears}, everything else {dtype}{start}; "
        f"{_size(info.weight_bytes)} of weights on {info.device}"
    )


def _chat(checkpoint: Checkpoint, defaults: GenerationDefaults) -> str:
    template = checkpoint.tokenizer.pretrained.chat_template
    kind = "no template" if template is None else "template"
    if "enable_thinking" in str(template):
        kind += " with enable_thinking"
    return f"{kind}; end tokens {', '.join(map(str, sorted(defaults.end_tokens))) or 'none'}"


def _size(count: int) -> str:
    power, unit = next((power, unit) for power, unit in _UNITS if count >= 1 << power or not power)
    return f"{count / (1 << power):.{power // 15}f} {unit}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect the checkpoint that the command line names; return the exit code: 0, or 1 if it would be refused."""
    parser = argparse.ArgumentParser(prog="inspect", description=__doc__.splitlines()[0])
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder, GGUF file or hub id (LLAMA_MODEL, else the embedded one)",
    )
    parser.add_argument("--revision", help="of a hub id: a commit, a tag or a branch (its default branch)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    chosen = parser.parse_args(arguments)
    lines: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            given = {name: value for name in ("model", "revision") if (value := getattr(chosen, name)) is not None}
            settings = replace(Settings.parse({}, os.environ), **given)
            for label, text in inspect(settings, Path(scratch)):
                lines[label] = text
        except EngineError as error:
            lines["refused"] = str(error)
    if chosen.json:
        print(json.dumps(lines, ensure_ascii=False))
    else:
        for label, text in lines.items():
            print(f"{label:<8} {text}")
    return int("refused" in lines)


if __name__ == "__main__":
    sys.exit(main())
