"""Loads a checkpoint: model, tokenizer and generation config, in the precision and on the device of the settings.

Loads safetensors only and never runs code from a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from llama_engine.errors import CheckpointError, one_line
from llama_engine.kernels.selection import STOCK, Kernels, choose_kernels
from llama_engine.libraries import Int8Params, Linear8bitLt
from llama_engine.model.checkpoint_files import check_files
from llama_engine.model.int8_linear import replace_int8_layers
from llama_engine.model.manifest import Manifest, verified_manifest
from llama_engine.model.model_info import ModelInfo, read_model_info
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer, Vocabulary

EMBEDDED = Path(__file__).resolve().parents[5] / "models" / "pydoc-llama"
"""The embedded checkpoint, beside the model repository."""

LONGEST_DEFAULT = 4096
"""Cap of the default max_model_len: a 128k-token checkpoint would otherwise need a huge cache by accident."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    name: path or hub id. max_model_len: tokens of prompt + completion. prepared: the manifest of a prepared checkpoint,
    else None. kernels: of its decode steps.
    """

    name: str
    model: LlamaForCausalLM
    tokenizer: Tokenizer
    generation_config: GenerationConfig
    max_model_len: int
    info: ModelInfo
    prepared: Manifest | None
    kernels: Kernels = STOCK

    @property
    def config(self) -> LlamaConfig:
        """The model's architecture."""
        return self.model.config


def load_checkpoint(settings: Settings, device: torch.device, show_progress: bool = False) -> Checkpoint:
    """Load the settings' checkpoint onto the device. Raises CheckpointError with the reason.

    show_progress: keep transformers' progress bars, for a terminal.
    """
    name = _resolve(settings.model)
    manifest = verified_manifest(Path(name), settings.revision)
    check_files(Path(name))
    if device.type == "cuda":
        # Otherwise every instance creates a context on the first GPU, which no memory plan counts.
        torch.cuda.set_device(device)
    # Progress bars are noise in a server's log, and transformers' report of missing weights advises training: missing
    # weights are refused below.
    set_verbosity_error()
    if not show_progress:
        disable_progress_bar()
    try:
        model, tokenizer = _load_files(name, settings, device)
    except CheckpointError:
        raise
    except Exception as error:
        # transformers, tokenizers, safetensors, bitsandbytes and accelerate raise errors of their own.
        raise CheckpointError(f"can't load {name}: {one_line(error)}") from error
    if settings.int8_threshold is not None:
        # 8-bit weights do not depend on the threshold: it may differ from the one a checkpoint was saved with.
        for module in model.modules():
            if isinstance(module, Linear8bitLt):
                module.state.threshold = settings.int8_threshold
    kernels = install_kernels(model, settings.kernels)
    # In training mode bitsandbytes dequantizes the weights at every call.
    model.requires_grad_(False).train(False)
    positions = model.config.max_position_embeddings
    max_model_len = settings.max_model_len or min(positions, LONGEST_DEFAULT)
    if max_model_len > positions:
        raise CheckpointError(f"max_model_len is {max_model_len}; {name} has {positions} positions")
    return Checkpoint(
        name=name,
        model=model,
        tokenizer=tokenizer,
        generation_config=model.generation_config,
        max_model_len=max_model_len,
        info=read_model_info(model),
        prepared=manifest,
        kernels=kernels,
    )


def _load_files(name: str, settings: Settings, device: torch.device) -> tuple[LlamaForCausalLM, Tokenizer]:
    """Load model and tokenizer through transformers. Raises CheckpointError, and whatever the libraries raise."""
    dtype = _dtype(settings.dtype, device)
    config = AutoConfig.from_pretrained(name, revision=settings.revision)
    if not isinstance(config, LlamaConfig):
        raise CheckpointError(f"{name} is a {config.model_type!r} checkpoint; this engine serves 'llama'")
    tokenizer = AutoTokenizer.from_pretrained(name, revision=settings.revision)
    quantization = _quantization(settings, config, name, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(
        name,
        output_loading_info=True,
        revision=settings.revision,
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        # They are refused below, by name; otherwise transformers raises an error that refers to its hidden report.
        ignore_mismatched_sizes=True,
        # None, passed explicitly, makes transformers forget that a checkpoint is quantized and serve its raw bytes.
        **({} if quantization is None else {"quantization_config": quantization}),
    )
    model, loading = cast("tuple[LlamaForCausalLM, dict[str, set[Any]]]", loaded)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, config.vocab_size)
    if (Path(name) / "generation_config.json").exists():
        # The model ignores an unreadable file and its defaults; this call raises.
        GenerationConfig.from_pretrained(name)
    # transformers initializes missing weights with random numbers.
    if absent := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        raise CheckpointError(f"{name} lacks {len(absent)} weights or has them in another shape, first {absent[0]}")
    _convert_parameters(model, dtype, quantized_now=quantization is not None)
    return model, Tokenizer(tokenizer, vocabulary)


def install_kernels(model: LlamaForCausalLM, setting: str) -> Kernels:
    """Install the 8-bit layers for the setting `kernels`, stock or fused, in a loaded model; return the kernels."""
    on_cpu = model.device.type == "cpu"
    # At other thresholds bitsandbytes' own product extracts the outliers of all rows together.
    unrounded = read_model_info(model).threshold == 0
    kernels = STOCK
    if setting == "fused":
        kernels = choose_kernels(
            model.device, model.dtype, *_heads(model.config), _eight_bit_shapes(model) if unrounded else ()
        )
    if unrounded and (on_cpu or kernels.few_rows is not None):
        replace_int8_layers(model, None if on_cpu else kernels)
    return kernels


def choose_device(setting: str, gpu: int | None) -> torch.device:
    """Return the device to load on. gpu: index of the GPU that Triton assigned, None for a CPU instance.

    Raises CheckpointError if a GPU is requested and PyTorch sees none.
    """
    if setting == "cpu" or (setting == "auto" and gpu is None):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CheckpointError(f"device is {setting!r} and Triton's instance is on {gpu=}, but PyTorch sees no GPU")
    return torch.device("cuda", gpu or 0)


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


def _convert_parameters(model: LlamaForCausalLM, dtype: torch.dtype, quantized_now: bool) -> None:
    """Cast unquantized parameters to the dtype; on a CPU, copy parameters that are still mapped from the files.

    transformers keeps the saved dtype of an 8-bit checkpoint's other parameters, and leaves unchanged parameters in the
    files' pages. Those count as free memory, are read again from the volume when memory is short, and crash the process
    when the volume disappears.
    """
    for parameter in model.parameters():
        floats = parameter.is_floating_point()
        mapped = parameter.device.type == "cpu" and (floats or not quantized_now)
        parameter.data = parameter.data.to(dtype if floats else parameter.dtype, copy=mapped)
        if mapped and isinstance(parameter, Int8Params):
            # bitsandbytes refers to the weight a second time, and to its scales.
            parameter.CB = parameter.data
            parameter.SCB = parameter.SCB.clone()


def _eight_bit_shapes(model: LlamaForCausalLM) -> list[tuple[int, int]]:
    """Return the distinct (out, in) of the 8-bit layers, in their order."""
    layers = [module for module in model.modules() if isinstance(module, Linear8bitLt)]
    return [*dict.fromkeys((layer.out_features, layer.in_features) for layer in layers)]


def _heads(config: LlamaConfig) -> tuple[int, int]:
    """Return the head dim and the number of query heads per key-value head."""
    heads = config.num_attention_heads
    return config.head_dim or config.hidden_size // heads, heads // (config.num_key_value_heads or heads)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _quantization(settings: Settings, config: LlamaConfig, name: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return how to quantize while loading; None keeps the saved precision."""
    saved = _saved_quantization(config)
    if settings.quantization == "checkpoint" or settings.quantization == saved:
        return None
    if saved != "none":
        raise CheckpointError(
            f"quantization is {settings.quantization!r}, but {name} is saved in {saved}; set quantization to "
            f"'checkpoint' to serve it as it is"
        )
    if settings.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=settings.int8_threshold or 0.0)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _saved_quantization(config: LlamaConfig) -> str:
    """Return the saved precision: none, int8, nf4, or the name of another method."""
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return "none"
    values: dict[str, object] = saved if isinstance(saved, dict) else vars(saved)
    if values.get("load_in_8bit"):
        return "int8"
    return str(values.get("bnb_4bit_quant_type") if values.get("load_in_4bit") else values.get("quant_method"))
