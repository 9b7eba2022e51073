"""The settings of the model: one frozen dataclass, parsed strictly.

The environment's `LLAMA_<NAME>` overrides the Triton config's `parameters`, which override the defaults below. An
unknown key or an invalid value raises InvalidSettings with the key, the value, its source and the bound. Bounds that
depend on the checkpoint, such as a `max_model_len` beyond its positions, are checked when the checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TypeVar

from llama_engine.bounds import Bound, BoundError, Choice, Integer, Real, Text
from llama_engine.errors import InvalidSettings

ENVIRONMENT_PREFIX = "LLAMA_"

MAX_MODEL_LEN = 1 << 20
"""Maximum of `max_model_len`, also for a checkpoint with more positions."""

_T = TypeVar("_T")


def _setting(default: _T, bound: Bound[_T]) -> _T:
    return field(default=default, metadata={"bound": bound})


@dataclass(frozen=True)
class Settings:
    """The model's settings; every field is a config parameter and an environment variable."""

    model: str | None = _setting(None, Text(may_be_empty=False))
    """Path or hub id of the checkpoint; None is the embedded checkpoint."""
    revision: str | None = _setting(None, Text(may_be_empty=False))
    """Revision of a hub id; None is the repository's default branch."""
    quantization: str = _setting("int8", Choice(("int8", "nf4", "none", "checkpoint")))
    """Precision of the linear layers; `checkpoint` keeps the precision of the files."""
    int8_threshold: float = _setting(0.0, Real(low=0.0, high=1000.0))
    """0: INT8 products are exact. Above: bitsandbytes' LLM.int8() with this outlier threshold, whose results depend on
    the batch. The value saved in a checkpoint is ignored."""
    int8_terms: str = _setting("auto", Choice(("auto", "1", "2")))
    """8-bit terms per activation in exact INT8 products: 2 keep 15 bits, 1 keeps 8. auto: on a CPU, 2 for rows with
    outliers, else 1; on a GPU 2."""
    int8_outlier_ratio: float = _setting(6.0, Real(low=1.0, high=1000.0))
    """With `int8_terms` auto, a row has outliers if its largest magnitude exceeds this times its root mean square."""
    dtype: str = _setting("auto", Choice(("auto", "float32", "float16", "bfloat16")))
    """Precision of unquantized weights. auto: float16 on CUDA, float32 on a CPU."""
    kv_cache_dtype: str = _setting("auto", Choice(("auto", "float32", "bfloat16", "int8")))
    """Precision of keys and values. auto: bfloat16 for INT8 weights with the compiled kernels, else the dtype."""
    device: str = _setting("auto", Choice(("auto", "cpu", "cuda")))
    """auto: the GPU that Triton assigned to the instance, or the CPU if it assigned none."""
    kernels: str = _setting("auto", Choice(("auto", "stock")))
    """auto: compiled kernels for INT8 weights on a CPU; FlashAttention and fused elementwise operations on a GPU.
    stock: PyTorch's alone; on a CPU INT8 weights are dequantized. The others are tested when the model loads; one that
    fails falls back to stock."""
    cuda_graphs: str = _setting("auto", Choice(("auto", "off", "on")))
    """on: captures the decode steps as CUDA graphs when the model loads (on a GPU) and replays them; falls back to
    launching kernels if capture fails. auto: on for a GPU, off for a CPU."""
    scheduling: str = _setting("inflight", Choice(("inflight", "batch")))
    """inflight: adds and removes sequences between decode steps. batch: runs each Triton batch to its end."""
    slots: int | None = _setting(None, Integer(1, 1024))
    """Number of sequences decoded together; None is the config's max_batch_size."""
    max_model_len: int | None = _setting(None, Integer(2, MAX_MODEL_LEN))
    """Maximum tokens of prompt + completion; None is the checkpoint's number of positions, or less if memory
    is short."""
    kv_cache_tokens: int | None = _setting(None, Integer(16, 1 << 30))
    """Positions in the KV cache, at least max_model_len; sequences take them in pages as they grow. None is slots times
    max_model_len (at most 4096 of it), or less if memory is short."""
    prefix_cache: str = _setting("on", Choice(("on", "off")))
    """on: keeps the keys and values of finished sequences until their memory is needed, and computes of a prompt only
    what follows its longest cached prefix."""
    default_max_tokens: int = _setting(128, Integer(1, 1 << 20))
    """max_tokens of requests without it, unless the checkpoint sets max_new_tokens."""
    truncate_max_tokens: str = _setting("off", Choice(("off", "on")))
    """on: reduces a max_tokens that exceeds max_model_len - prompt tokens. off: refuses it, because a
    text cut early would report the finish reason `length`, too. A request's parameter of that name overrides it."""
    prefill_tokens: int = _setting(512, Integer(1, 1 << 20))
    """Maximum prompt tokens per prefill pass; longer prompts are computed in chunks."""
    stream_interval: int = _setting(1, Integer(1, 64))
    """Minimum tokens per chunk of a stream after the first chunk, which has one; larger chunks cost less CPU time."""
    drain_seconds: int = _setting(60, Integer(0, 3600))
    """Seconds for running sequences to finish after the model starts unloading."""
    stuck_seconds: int = _setting(60, Integer(0, 3600))
    """Duration of a step, in seconds, after which the model reports not ready; 0 disables the check."""
    memory_fraction: float = _setting(0.9, Real(low=0.05, high=1.0))
    """Share of the device's free memory available to weights, cache and reserve."""
    log_requests: str = _setting("summary", Choice(("none", "summary", "prompts")))
    """summary: a line for each request. prompts: the line and the prompt."""
    log_format: str = _setting("text", Choice(("text", "json")))
    """text: Triton's log. json: one JSON object per line on standard error."""

    @classmethod
    def parse(cls, parameters: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
        """Read the settings from a config's `parameters` and the environment, whose `LLAMA_<NAME>` override them.

        Raises InvalidSettings naming the key, the value, its source and the bound.
        """
        texts = {name: (f"parameter {name!r} of the config", value) for name, value in parameters.items()}
        for key, value in environment.items():
            if key.startswith(ENVIRONMENT_PREFIX):
                texts[key.removeprefix(ENVIRONMENT_PREFIX).lower()] = (f"environment variable {key}", value)
        values: dict[str, object] = {}
        for name, (source, text) in texts.items():
            if name not in BOUNDS:
                near = get_close_matches(name, BOUNDS, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise InvalidSettings(f"{source}: unknown setting{hint}; known are {', '.join(sorted(BOUNDS))}")
            try:
                values[name] = BOUNDS[name].parse(text)
            except BoundError as error:
                raise InvalidSettings(f"{source}: {name} must be {error.bound}, got {text!r}") from None
        return cls(**values)  # type: ignore[arg-type]  # BOUNDS parsed each value to its field's type

    def describe(self) -> str:
        """Return every setting, for the log."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in BOUNDS)


BOUNDS: Mapping[str, Bound[object]] = {setting.name: setting.metadata["bound"] for setting in fields(Settings)}
