"""Print how a checkpoint would be served: the plan of a server that loads it, made before any weight is read.

    python -m triton_prepare.inspect MODEL [--revision REVISION]

Settings are the environment's LLAMA_*, as for a server, with the default config's number of slots. Of a hub id whose
weights aren't cached, only the config is read.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import llama_engine.libraries  # noqa: F401 - before anything that imports torch or transformers
import torch
from llama_engine.checkpoint.architecture import Architecture, read_architecture
from llama_engine.checkpoint.config import read_config
from llama_engine.checkpoint.gguf.tensors import GgufTensors
from llama_engine.checkpoint.headers import read_checkpoint_headers
from llama_engine.checkpoint.hub import missing_weights, resolve_folder
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.engine.memory_plan import plan_memory
from llama_engine.errors import CheckpointError, EngineError
from llama_engine.model.loader import LoadedModel, describe_checkpoint, loading, resolve_name
from llama_engine.model.precision import choose_device, saved_quantization
from llama_engine.request.defaults import GenerationDefaults
from llama_engine.request.end_tokens import describe_end_tokens, find_end_tokens
from llama_engine.settings import Settings
from transformers import PreTrainedConfig

from triton_prepare.prepare import refuse_revision

SLOTS = 32
"""The default config's max_batch_size."""


def inspect(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line, up to a refusal, which is raised as an EngineError."""
    name = resolve_name(settings.model)
    with loading(name):
        folder = resolve_folder(name, settings.revision, with_weights=False)
        if not Path(name).exists() and (missing := missing_weights(folder)):
            config = read_config(folder, name)
            yield "model", _model(name, config, read_architecture(config, name))
            raise CheckpointError(
                f"{len(missing)} files of weights aren't downloaded, first {missing[0]}; `hf download {name}` or a "
                f"server's start does that"
            )
        headers = read_checkpoint_headers(folder, name)
    yield "model", _model(name, headers.config, headers.architecture)
    yield "saved", _saved(headers.saved, headers.config)
    device = choose_device(settings.device, 0 if settings.device == "auto" and torch.cuda.is_available() else None)
    checkpoint = describe_checkpoint(name, headers, settings, device)
    yield "served", _served(checkpoint)
    ends = find_end_tokens(checkpoint.generation_config, checkpoint.config, checkpoint.tokenizer)
    yield "ends", f"a completion ends at {describe_end_tokens(ends, checkpoint.tokenizer)}"
    if checkpoint.pooling is not None:
        yield "embeds", checkpoint.pooling.describe()
    yield "chats", ", ".join(checkpoint.tokenizer.chat_templates) or "no chat template"
    defaults = GenerationDefaults.from_config(
        checkpoint.generation_config, settings.default_max_tokens, ends, headers.architecture.vocabulary
    )
    yield "defaults", defaults.describe()
    if defaults.ignored:
        yield "ignored", f"of the generation config: {defaults.describe_ignored()}"
    plan = plan_memory(checkpoint, settings, settings.slots or SLOTS)
    yield "memory", plan.describe().removeprefix("memory plan ")
    plan.check()


def _model(name: str, config: PreTrainedConfig, architecture: Architecture) -> str:
    return f"{name}: {architecture.describe()}, context {config.max_position_embeddings:,}"


def _saved(saved: SavedTensors, config: PreTrainedConfig) -> str:
    dtypes: Counter[str] = Counter()
    for name, tensor in saved.items():
        block = saved.block_type(name) if isinstance(saved, GgufTensors) else None
        dtypes[tensor.dtype if block is None else block.name] += tensor.end - tensor.begin
    parts = ", ".join(f"{dtype} {count / (1 << 20):,.1f} MiB" for dtype, count in dtypes.most_common())
    method = saved_quantization(config)
    return f"{'floats' if method == 'none' else method}; {parts}"


def _served(checkpoint: LoadedModel) -> str:
    info = checkpoint.info
    linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(info.linears.items()))
    dtype = str(info.dtype).removeprefix("torch.")
    now = saved_quantization(checkpoint.config) == "none" and set(info.linears) - {dtype}
    start = "; quantized at each start" if now else ""
    return f"{info.computation}; linear layers {linears}, everything else {dtype}{start}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect the checkpoint that the command line names; return the exit code: 0, or 1 if it would be refused."""
    parser = argparse.ArgumentParser(prog="inspect", description=__doc__.splitlines()[0])
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder, GGUF file or hub id (LLAMA_MODEL, else SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--revision", help="of a hub id: a commit, a tag or a branch (its default branch)")
    chosen = parser.parse_args(arguments)
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    try:
        settings = replace(Settings.parse({}, os.environ), **given)
        # LLAMA_REVISION beside a folder is ignored, as by a server.
        refuse_revision(resolve_name(settings.model), chosen.revision)
        for label, text in inspect(settings):
            print(f"{label:<8} {text}")
    except EngineError as error:
        print(f"refused  {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
