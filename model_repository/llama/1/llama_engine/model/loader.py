"""Loads a checkpoint: model, tokenizer and generation config, in the precision and on the device of the settings.

Loads safetensors only and never runs code from a checkpoint. On a CPU, floats and INT8 weights are read straight from
the files; nf4, LLM.int8()'s outliers and everything on a GPU go through transformers' modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from llama_engine.errors import CheckpointError, one_line
from llama_engine.kernels.gpu.gpu_kernels import STOCK, Kernels
from llama_engine.model.builder import ReadWeights, Tables, build_llama, float_linear, llama_around
from llama_engine.model.checkpoint_files import check_files
from llama_engine.model.cpu_runner import CompiledLlama, CpuRunner, build_compiled_llama
from llama_engine.model.exact_int8 import Int8Packer
from llama_engine.model.heads import head_dim, key_value_heads
from llama_engine.model.hub import resolve_folder
from llama_engine.model.kv_cache import BLOCK, KVCacheShape, gathered_bytes
from llama_engine.model.llama import Llama
from llama_engine.model.llama_config import read_config
from llama_engine.model.manifest import Manifest, verified_manifest
from llama_engine.model.model_info import BATCH, ModelInfo, read_model_info
from llama_engine.model.model_runner import ModelRunner
from llama_engine.model.precision import choose_cache_dtype, choose_dtype, choose_quantization
from llama_engine.model.rope import rope_tables
from llama_engine.model.torch_runner import TorchRunner
from llama_engine.model.transformers_reader import install_kernels, load_with_transformers
from llama_engine.model.weight_reader import WeightReader
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from llama_engine.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).resolve().parents[5] / "models" / "pydoc-llama"
"""The embedded checkpoint, beside the model repository."""

LONGEST_DEFAULT = 4096
"""Cap of the default max_model_len: a 128k-token checkpoint would otherwise need a huge cache by accident."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint; several engines may share one.

    name: path or hub id. max_model_len: tokens of prompt + completion. prepared: the manifest of a prepared checkpoint,
    else None. kernels: of its decode steps on a GPU.
    """

    name: str
    config: LlamaConfig
    model: Llama | CompiledLlama
    tokenizer: Tokenizer
    generation_config: GenerationConfig
    max_model_len: int
    info: ModelInfo
    prepared: Manifest | None
    kernels: Kernels = STOCK

    def cache_shape(self, slots: int, kv_cache_dtype: str = "auto", spare: int = 0) -> KVCacheShape:
        """Return the KV cache of `slots` slots. kv_cache_dtype: the setting."""
        compiled = isinstance(self.model, CompiledLlama)
        dim = self.model.padded_head_dim if isinstance(self.model, CompiledLlama) else head_dim(self.config)
        return KVCacheShape(
            layers=self.config.num_hidden_layers,
            slots=slots,
            key_value_heads=key_value_heads(self.config),
            max_model_len=self.max_model_len,
            head_dim=dim,
            dtype=choose_cache_dtype(kv_cache_dtype, compiled, self.info.dtype),
            spare=spare,
        )

    def attention_reserve(self, shape: KVCacheShape) -> int:
        """Return the bytes that the attention of a decode step holds, and the compiled kernels' scratch."""
        if isinstance(self.model, CompiledLlama):
            return self.model.scratch_bytes(shape)
        if self.info.device.type == "cpu" or self.kernels.attention is not None:
            return 0
        return gathered_bytes(shape, self.info.dtype)

    def runner(self, shape: KVCacheShape) -> ModelRunner:
        """Return a runner of the model with a KV cache of its own."""
        if isinstance(self.model, CompiledLlama):
            return CpuRunner(self.model, shape)
        return TorchRunner(self.model, shape, self.kernels.attention)


def load_checkpoint(settings: Settings, device: torch.device, show_progress: bool = False) -> Checkpoint:
    """Load the settings' checkpoint onto the device. Raises CheckpointError with the reason.

    show_progress: keep transformers' progress bars, for a terminal.
    """
    name = _resolve(settings.model)
    manifest = verified_manifest(Path(name), settings.revision)
    if device.type == "cuda":
        # Otherwise every instance creates a context on the first GPU, which no memory plan counts.
        torch.cuda.set_device(device)
    with loading(name, show_progress):
        folder = resolve_folder(name, settings.revision, show_progress)
        check_files(folder)
        return _load_files(name, folder, settings, device, manifest)


@contextmanager
def loading(name: str, show_progress: bool = False) -> Iterator[None]:
    """Raise a CheckpointError for whatever the libraries raise, and keep their noise from the log.

    name: of the checkpoint, for errors. show_progress: keep transformers' progress bars, for a terminal.
    """
    # Progress bars are noise in a server's log, and transformers' report of missing weights advises training: missing
    # weights are refused.
    set_verbosity_error()
    if not show_progress:
        disable_progress_bar()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # transformers, tokenizers, safetensors, bitsandbytes and accelerate raise errors of their own.
        raise CheckpointError(f"can't load {name}: {one_line(error)}") from error


def _resolve(model: str | None) -> str:
    """Return a local path or a hub id. A missing path that can't be a hub id is refused, not looked up on the hub."""
    if model is None:
        if not EMBEDDED.is_dir():
            raise CheckpointError(
                "no model is set and the embedded checkpoint models/pydoc-llama is not beside the model repository; "
                "set the parameter 'model' or LLAMA_MODEL to a path or hub id"
            )
        return str(EMBEDDED)
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"model is {model!r}: no such folder")
    return model


def _load_files(
    name: str, folder: Path, settings: Settings, device: torch.device, manifest: Manifest | None
) -> Checkpoint:
    """Load everything. Raises CheckpointError, and whatever the libraries raise."""
    config = read_config(folder, name)
    positions = config.max_position_embeddings
    max_model_len = settings.max_model_len or min(positions, LONGEST_DEFAULT)
    if max_model_len > positions:
        raise CheckpointError(f"max_model_len is {max_model_len}; {name} has {positions} positions")
    tokenizer = read_tokenizer(folder, config)
    model, info, kernels = _load_model(name, folder, config, settings, device, max_model_len)
    return Checkpoint(
        name=name,
        config=config,
        model=model,
        tokenizer=tokenizer,
        generation_config=_generation_config(folder, config),
        max_model_len=max_model_len,
        info=info,
        prepared=manifest,
        kernels=kernels,
    )


def _load_model(
    name: str, folder: Path, config: LlamaConfig, settings: Settings, device: torch.device, max_model_len: int
) -> tuple[Llama | CompiledLlama, ModelInfo, Kernels]:
    """Load the weights, and choose and verify how they are computed with."""
    # A cache in whole blocks, and the spare position of padding rows.
    tables = rope_tables(config, -(-(max_model_len + 1) // BLOCK) * BLOCK)
    dtype = choose_dtype(settings.dtype, device)
    quantization, threshold = choose_quantization(name, config, settings)
    int8 = quantization == "int8"
    if device.type != "cpu" or quantization == "nf4" or threshold:
        loaded = load_with_transformers(str(folder), config, settings, device, dtype)
        kernels = install_kernels(loaded, settings.kernels, settings.slots or 0)
        if (
            kernels.attention is not None
            and choose_cache_dtype(settings.kv_cache_dtype, compiled=False, dtype=dtype) != dtype
        ):
            raise CheckpointError(
                f"kv_cache_dtype is {settings.kv_cache_dtype!r}; the fused attention of kernels 'fused' reads a cache "
                f"in the model's {str(dtype).removeprefix('torch.')}: set kernels to 'stock' or that to 'auto'"
            )
        return llama_around(loaded, tables), read_model_info(loaded), kernels
    reader = WeightReader(folder, config, dtype, int8)
    read = ReadWeights()
    model: Llama | CompiledLlama
    if not int8:
        model, product, bits_depend_on = build_llama(reader, config, tables, float_linear, read), "", BATCH
    elif compiled := _compiled(reader, config, tables, settings, read):
        model, product, bits_depend_on = compiled, compiled.describe(), ""
    else:
        packer = Int8Packer(settings.int8_terms)
        model, product = build_llama(reader, config, tables, packer, read), packer.describe()
        # Around the products torch computes in the dtype: only in float32 are a row's bits its own.
        bits_depend_on = "" if packer.exact and dtype == torch.float32 else BATCH
    _return_freed_memory()
    info = ModelInfo(
        dict(read.linears),
        read.bytes,
        dtype,
        device,
        threshold,
        rounds_activations=False,
        product=product,
        bits_depend_on=bits_depend_on,
    )
    return model, info, STOCK


def _return_freed_memory() -> None:
    """Return the memory of weights before their packing to the system: glibc would keep up to as much again."""
    with suppress(AttributeError):
        # Other C libraries have no such function, and no such habit.
        ctypes.CDLL(None).malloc_trim(0)


def _compiled(
    reader: WeightReader, config: LlamaConfig, tables: Tables, settings: Settings, read: ReadWeights
) -> CompiledLlama | None:
    """Return the model in the form of the compiled kernels, None without them."""
    if settings.kernels == "stock":
        return None
    dtype = choose_cache_dtype(settings.kv_cache_dtype, compiled=True, dtype=torch.float32)
    return build_compiled_llama(reader, config, tables, settings.int8_terms, dtype, read)


def _generation_config(folder: Path, config: LlamaConfig) -> GenerationConfig:
    """Return the checkpoint's generation config, or the defaults of its model config if it has none."""
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)
