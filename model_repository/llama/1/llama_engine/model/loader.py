"""Loading a checkpoint: model, tokenizer and generation config, in the precision and on the device asked for.

Loads safetensors only and never runs code from a checkpoint. One that was prepared (`manifest`) is held against its
manifest first; apart from that it is a checkpoint saved in 8 bits.
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
from llama_engine.model.manifest import Manifest, checked
from llama_engine.model.model_info import ModelInfo, read_model_info
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer
from llama_engine.text.vocabulary import Vocabulary

EMBEDDED = Path(__file__).resolve().parents[5] / "models" / "pydoc-llama"
"""The embedded checkpoint, beside the model repository."""

LONGEST_DEFAULT = 4096
"""Cap of max_model_len where it isn't set: a 128k-token checkpoint would otherwise ask for a cache nobody meant."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. name: where it came from. max_model_len: tokens of prompt + completion it will serve.

    prepared: the manifest of one that was quantized before; None for any other. kernels: what its decode steps are
    computed with.
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
    """Load what the settings name onto the device. Raises CheckpointError with the reason.

    show_progress: leaves transformers' progress bars on, for a person at a terminal.
    """
    name = _resolve(settings.model)
    prepared = checked(Path(name), settings.revision)
    check_files(Path(name))
    if device.type == "cuda":
        # Or every instance would open a context on the first GPU, in nobody's plan.
        torch.cuda.set_device(device)
    # A bar that redraws itself is noise in a server's log, and what the report of missing weights advises (training!)
    # is not for a server's operator: they are refused below.
    set_verbosity_error()
    if not show_progress:
        disable_progress_bar()
    try:
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
            # They are refused below, by name; otherwise an error sends the reader to a report that isn't shown.
            ignore_mismatched_sizes=True,
            # Given as None, it would make transformers forget that a checkpoint is quantized and serve its raw bytes.
            **({} if quantization is None else {"quantization_config": quantization}),
        )
        model, loading = cast("tuple[LlamaForCausalLM, dict[str, set[Any]]]", loaded)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, config.vocab_size)
        if (Path(name) / "generation_config.json").exists():
            # Once more, because the model passes over one that can't be read, and its defaults with it.
            GenerationConfig.from_pretrained(name)
    except CheckpointError:
        raise
    except Exception as error:
        # Many libraries have a say here, each with errors of its own; whichever it is, the checkpoint can't be served.
        raise CheckpointError(f"can't load {name}: {one_line(error)}") from error
    # transformers would serve what it didn't find as random numbers.
    if absent := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        raise CheckpointError(f"{name} lacks {len(absent)} weights or has them in another shape, first {absent[0]}")
    _take_in(model, dtype, quantized_now=quantization is not None)
    if settings.int8_threshold is not None:
        # The 8-bit weights don't depend on the threshold, so one can be set for a checkpoint saved under another.
        for module in model.modules():
            if isinstance(module, Linear8bitLt):
                module.state.threshold = settings.int8_threshold
    kernels = install_kernels(model, settings.kernels)
    # In training mode bitsandbytes would dequantize the weights at every call.
    model.requires_grad_(False).train(False)
    longest = config.max_position_embeddings
    max_model_len = settings.max_model_len or min(longest, LONGEST_DEFAULT)
    if max_model_len > longest:
        raise CheckpointError(f"max_model_len is {max_model_len}; {name} has {longest} positions")
    return Checkpoint(
        name=name,
        model=model,
        tokenizer=Tokenizer(tokenizer, vocabulary),
        generation_config=model.generation_config,
        max_model_len=max_model_len,
        info=read_model_info(model),
        prepared=prepared,
        kernels=kernels,
    )


def install_kernels(model: LlamaForCausalLM, setting: str) -> Kernels:
    """Put the layers into a loaded model that `kernels` asks for, `stock` or `fused`; return what else is chosen."""
    on_cpu = model.device.type == "cpu"
    # Another threshold takes outliers from all rows together, which is bitsandbytes' own product.
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
    """Return the device to load on. gpu: index of the GPU that Triton gave this instance, None for a CPU instance.

    Raises CheckpointError where a GPU is asked for and none can be used.
    """
    if setting == "cpu" or (setting == "auto" and gpu is None):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CheckpointError(f"device is {setting!r} and Triton's instance is on {gpu=}, but PyTorch sees no GPU")
    return torch.device("cuda", gpu or 0)


def _resolve(model: str | None) -> str:
    """Return a local path or a hub id; what can only be a path and isn't there is never looked up on the hub."""
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


def _take_in(model: LlamaForCausalLM, dtype: torch.dtype, quantized_now: bool) -> None:
    """Cast what isn't quantized to the dtype, and on a CPU copy what is still mapped from the files into memory.

    Of a checkpoint saved in 8 bits transformers leaves the rest as it was saved. And whatever it need not change it
    leaves in the files' pages: those count as free memory, are read again from the volume when memory is short, and a
    volume that goes away takes the process with it.
    """
    for parameter in model.parameters():
        floats = parameter.is_floating_point()
        mapped = parameter.device.type == "cpu" and (floats or not quantized_now)
        parameter.data = parameter.data.to(dtype if floats else parameter.dtype, copy=mapped)
        if mapped and isinstance(parameter, Int8Params):
            # bitsandbytes' own second reference to the weight, and its scales.
            parameter.CB = parameter.data
            parameter.SCB = parameter.SCB.clone()


def _eight_bit_shapes(model: LlamaForCausalLM) -> list[tuple[int, int]]:
    """Return (out, in) of the 8-bit layers, each shape once, in the order of the layers."""
    layers = [module for module in model.modules() if isinstance(module, Linear8bitLt)]
    return [*dict.fromkeys((layer.out_features, layer.in_features) for layer in layers)]


def _heads(config: LlamaConfig) -> tuple[int, int]:
    """Return the dimension of a head, and how many query heads share a key-value head."""
    heads = config.num_attention_heads
    return config.head_dim or config.hidden_size // heads, heads // (config.num_key_value_heads or heads)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _quantization(settings: Settings, config: LlamaConfig, name: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return how to quantize while loading; None leaves the weights as they are saved."""
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
    """Return the precision the checkpoint was saved in: none, int8, nf4, or the name of another method."""
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return "none"
    said: dict[str, object] = saved if isinstance(saved, dict) else vars(saved)
    if said.get("load_in_8bit"):
        return "int8"
    return str(said.get("bnb_4bit_quant_type") if said.get("load_in_4bit") else said.get("quant_method"))
