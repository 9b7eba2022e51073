"""Loads a checkpoint: model, tokenizer and generation config, in the precision and on the device of the settings.

Loads safetensors and GGUF only and never runs code from a checkpoint. `load_plan` chooses the implementation of the
layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.formats.bitsandbytes_nf4 import BitsandbytesNf4
from llama_engine.checkpoint.headers import CheckpointHeaders, read_checkpoint_headers
from llama_engine.checkpoint.hub import parse_gguf_name, resolve_folder
from llama_engine.checkpoint.pooling import Pooling, choose_pooling
from llama_engine.checkpoint.rope import max_positions
from llama_engine.checkpoint.tensor_names import all_linears
from llama_engine.errors import CheckpointError, one_line
from llama_engine.kernels.cache_shape import CPU_PAGE_SIZE, GPU_PAGE_SIZE, KVCacheShape, gathered_bytes
from llama_engine.kernels.cpu.forward import PackedLlama
from llama_engine.kernels.cpu.lora import packed_lora_bytes
from llama_engine.kernels.gpu.varlen_attention import VarlenAttention
from llama_engine.kernels.lora_layout import NO_LORAS, LoraLimits
from llama_engine.model.builder import ReadWeights, build_llama
from llama_engine.model.cpu_runner import CpuRunner, build_packed_llama
from llama_engine.model.dry_run import describe_model
from llama_engine.model.llama import Llama
from llama_engine.model.load_plan import LoadPlan, ModelParts, plan_load
from llama_engine.model.model_info import ModelInfo
from llama_engine.model.model_runner import ModelRunner
from llama_engine.model.precision import choose_cache_dtype
from llama_engine.model.torch_loras import stacked_lora_bytes
from llama_engine.model.torch_runner import TorchRunner
from llama_engine.settings import MAX_MODEL_LEN, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llama_engine.text.tokenizer import Tokenizer

DEFAULT_MODEL = Path(__file__).resolve().parents[5] / "models" / "SmolLM2-135M-Instruct"
"""Beside the model repository: in the image, and in a checkout once `models/smollm2/fetch.py` has fetched it."""


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint's model, tokenizer and defaults, with a factory of model runners; several engines may share one.

    name: path or hub id. max_model_len: maximum tokens of prompt + completion. weights_digest: `SavedTensors.digest`.
    pooling: how embeddings are made; None serves none. attention: FlashAttention on a GPU; None uses PyTorch's
    attention, with masks on a GPU. is_loaded: whether the model has its weights; without them, only its sizes are
    known.
    """

    name: str
    config: PreTrainedConfig
    architecture: Architecture
    model: Llama | PackedLlama
    tokenizer: Tokenizer
    generation_config: GenerationConfig
    max_model_len: int
    info: ModelInfo
    weights_digest: str = ""
    pooling: Pooling | None = None
    attention: VarlenAttention | None = None
    is_loaded: bool = True

    def cache_shape(self, slots: int, kv_cache_dtype: str = "auto", tokens: int | None = None) -> KVCacheShape:
        """Return the shape of a KV cache with `slots` slots. kv_cache_dtype: the setting.

        tokens: number of positions, rounded up to whole pages; None is max_model_len for each slot.
        """
        compiled = isinstance(self.model, PackedLlama)
        dim = self.model.padded_head_dim if isinstance(self.model, PackedLlama) else self.architecture.head_dim
        page_size = GPU_PAGE_SIZE if self.info.device.type == "cuda" else CPU_PAGE_SIZE
        pages = slots * -(-self.max_model_len // page_size) if tokens is None else -(-tokens // page_size)
        return KVCacheShape(
            layers=self.architecture.layers,
            slots=slots,
            key_value_heads=self.architecture.kv_heads,
            max_model_len=self.max_model_len,
            head_dim=dim,
            dtype=choose_cache_dtype(kv_cache_dtype, compiled, self.info.dtype),
            page_size=page_size,
            pages=pages,
        )

    def attention_reserve(self, shape: KVCacheShape) -> int:
        """Return the bytes of temporary memory for a decode step's attention, or of the compiled kernels' scratch."""
        if isinstance(self.model, PackedLlama):
            return self.model.scratch_bytes(shape)
        if self.attention is not None:
            return 0
        # A CPU attends to one sequence at a time.
        sequences = 1 if self.info.device.type == "cpu" else shape.slots
        return gathered_bytes(shape, self.info.dtype, sequences)

    def lora_bytes(self, limits: LoraLimits) -> int:
        """Return the bytes of the runner's adapters, if all are as large as the limits allow."""
        if isinstance(self.model, PackedLlama):
            return packed_lora_bytes(self.architecture, limits)
        return stacked_lora_bytes(self.architecture, limits)

    def runner(self, shape: KVCacheShape, captured: bool = False, loras: LoraLimits = NO_LORAS) -> ModelRunner:
        """Return a runner of the model with a new KV cache of this shape.

        captured: see TorchRunner. loras: room for adapters.
        """
        if isinstance(self.model, PackedLlama):
            return CpuRunner(self.model, shape, loras)
        return TorchRunner(self.model, shape, self.attention, captured, loras)


def load_checkpoint(settings: Settings, device: torch.device) -> LoadedModel:
    """Load the settings' checkpoint onto the device. Raises CheckpointError with the reason."""
    name = resolve_name(settings.model)
    if device.type == "cuda":
        # Otherwise every instance creates a CUDA context on the first GPU, which no memory plan includes.
        torch.cuda.set_device(device)
    with loading(name):
        folder = resolve_folder(name, settings.revision)
        return _load_files(name, read_checkpoint_headers(folder, name), settings, device)


def describe_checkpoint(name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device) -> LoadedModel:
    """Return what `load_checkpoint` would, without weights: their sizes are those of the headers.

    Raises CheckpointError where that would, except for invalid contents of the weights.
    """
    with loading(name):
        return _load_files(name, headers, settings, device, dry_run=True)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Convert exceptions of the libraries in the block to CheckpointError.

    From now on their messages and progress bars are silenced in the whole process. name: the checkpoint's, for errors.
    """
    # transformers' warning about missing weights advises training the model; here, missing weights are refused.
    set_verbosity_error()
    disable_progress_bar()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # transformers, tokenizers, safetensors, bitsandbytes and accelerate have no common base class of exceptions.
        raise CheckpointError(f"can't load {name}: {one_line(error)}") from error


def resolve_name(model: str | None) -> str:
    """Return a local path or a hub id. Raises CheckpointError for a missing path that can't be a hub id."""
    if model is None:
        if not DEFAULT_MODEL.is_dir():
            raise CheckpointError(
                f"no model is set and the default, {DEFAULT_MODEL}, is not there; "
                "set the parameter 'model' or LLAMA_MODEL to a path or hub id"
            )
        return str(DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return str(path)
    hub_id = model.count("/") <= 1 or parse_gguf_name(model) is not None
    # The first part of a hub id is an owner's name.
    if model.startswith(("/", ".", "~")) or not hub_id or (path.suffix == ".gguf" and Path(path.parts[0]).is_dir()):
        raise CheckpointError(f"model is {model!r}: no such folder or GGUF file")
    return model


def _load_files(
    name: str,
    headers: CheckpointHeaders,
    settings: Settings,
    device: torch.device,
    dry_run: bool = False,
) -> LoadedModel:
    """Load config, tokenizer and model from their files. Raises CheckpointError and exceptions of the libraries.

    dry_run: read no weights; the model has their sizes alone.
    """
    config, folder = headers.config, headers.folder
    max_model_len: int = settings.max_model_len or min(config.max_position_embeddings, MAX_MODEL_LEN)
    if max_model_len > (positions := max_positions(config)):
        raise CheckpointError(f"max_model_len is {max_model_len}; {name} has {positions} positions")
    tokenizer, pooling = headers.read_tokenizer(), choose_pooling(settings.pooling, headers)
    if pooling is None and not headers.architecture.has_head:
        raise CheckpointError(
            f"{name} has no output head (lm_head), and serves embeddings alone: set pooling to last or mean"
        )
    load = describe_model if dry_run else _load_model
    model, info, attention = load(name, headers, settings, device, max_model_len)
    return LoadedModel(
        name=name,
        config=config,
        architecture=headers.architecture,
        model=model,
        tokenizer=tokenizer,
        generation_config=_generation_config(folder, config),
        max_model_len=max_model_len,
        info=info,
        weights_digest=headers.saved.digest(),
        pooling=pooling,
        attention=attention,
        is_loaded=not dry_run,
    )


def _load_model(
    name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device, max_model_len: int
) -> ModelParts:
    """Load a checkpoint's weights for the product that `plan_load` chooses.

    Raises CheckpointError for incompatible settings, and on a GPU for INT8 weights without an exact product. Exceptions
    of the libraries are passed on.
    """
    plan = plan_load(name, headers, settings, device, max_model_len)
    if plan.by_transformers:
        return _load_with_transformers(headers, settings, plan)
    architecture, tables, read = headers.architecture, plan.tables, ReadWeights()
    model: Llama | PackedLlama
    if plan.kernels is not None:
        model = build_packed_llama(plan.reader, architecture, tables, plan.terms, plan.kernels, read)
    else:
        linears = plan.linear_layers()
        read = ReadWeights(linears.convert)
        llama = build_llama(plan.reader, architecture, tables, linears.pack, read)
        model = replace(llama, rotary=plan.elementwise.rotary)
    _return_freed_memory()
    return model, plan.info(read.linears, read.bytes, model), plan.attention


def _load_with_transformers(headers: CheckpointHeaders, settings: Settings, plan: LoadPlan) -> ModelParts:
    """Load the model with transformers' modules."""
    if isinstance(plan.quantized, BitsandbytesNf4):
        for linear in all_linears(headers.architecture):
            if plan.quantized.has(linear):
                plan.quantized.check_description(linear)
    # Imported here because importing bitsandbytes and transformers' modelling code takes 2 s.
    from llama_engine.model.transformers_reader import llama_around, load_with_transformers, read_model_info

    modules = load_with_transformers(str(headers.folder), headers.config, settings, plan.device, plan.dtype)
    model = llama_around(modules, headers.architecture, plan.tables)
    return replace(model, rotary=plan.elementwise.rotary), read_model_info(modules), plan.attention


def _generation_config(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    """Return the checkpoint's generation config; without one, the defaults that follow from its model config.

    Raises CheckpointError if transformers can't read it.
    """
    if (folder / "generation_config.json").exists():
        try:
            return GenerationConfig.from_pretrained(folder)
        except Exception as error:
            raise CheckpointError(f"can't load {folder}: generation_config.json: {one_line(error)}") from error
    return GenerationConfig.from_model_config(config)


def _return_freed_memory() -> None:
    """Return memory freed by packing to the system; glibc could otherwise retain as much as the model's size."""
    with suppress(AttributeError):
        # Other C libraries don't have malloc_trim and don't need it.
        ctypes.CDLL(None).malloc_trim(0)
