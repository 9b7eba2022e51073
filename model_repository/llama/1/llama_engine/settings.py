"""The settings of the model: one frozen dataclass, parsed strictly.

The environment's `LLAMA_<NAME>` overrides the Triton config's `parameters`, which override the defaults below. An
unknown key or an invalid value raises InvalidSettings with the key, the value, its source and the bound. Bounds that
depend on the checkpoint, such as a `max_model_len` beyond its positions, are checked when the checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from llama_engine.bounds import Bound, BoundError, Choice, Integer, Name, Real
from llama_engine.errors import InvalidSettings

ENVIRONMENT_PREFIX = "LLAMA_"


@dataclass(frozen=True)
class Settings:
    """The server's settings; every field is a config parameter and an environment variable.

    model: path or hub id of the checkpoint; None is the embedded one.
    revision: revision of a hub id; None is its default branch.
    quantization: precision of the linear layers; `checkpoint` keeps the precision of the files.
    int8_threshold: bitsandbytes' outlier threshold. None is 0, or the value stored in an 8-bit checkpoint. At 0 a row's
        result is independent of its batch; LLM.int8() uses 6.
    int8_terms: 8-bit terms per activation in exact INT8 products on a CPU: 2 keep 15 bits, 1 keeps 8.
    dtype: of unquantized weights. auto: float16 on CUDA, float32 on a CPU.
    kv_cache_dtype: of keys and values. auto: bfloat16 for INT8 weights with the compiled kernels, else the dtype.
    device: auto is the GPU that Triton assigned to the instance, or the CPU if it assigned none.
    kernels: fused ones are verified against their references when the model loads; one that fails falls back to stock.
        auto: compiled kernels for INT8 weights on a CPU, stock on a GPU. fused: on both. stock: PyTorch's and
        bitsandbytes' only.
    cuda_graphs: on captures the decode steps as CUDA graphs when the model loads (on a GPU) and replays them; falls
        back to launching kernels if capture fails.
    scheduling: inflight adds and removes sequences between decode steps; batch runs each Triton batch to its end.
    slots: sequences decoded together; None is the config's max_batch_size.
    max_model_len: prompt + completion, in tokens; None is the checkpoint's, at most 4096.
    default_max_tokens: for requests without max_tokens, unless the checkpoint sets max_new_tokens.
    truncate_max_tokens: on cuts a request's max_tokens to the room that its prompt leaves; off, because a text cut for
        want of room looks like one that ended at max_tokens, refuses it. The parameter of a request overrides it.
    prefill_tokens: prompt tokens per prefill pass; longer prompts are read in chunks.
    stream_interval: tokens per chunk of a stream, after the first token; more cost less processor time per token.
    drain_seconds: time for running sequences to finish after the model starts unloading.
    stuck_seconds: duration of a step after which the model reports not ready; 0 disables the check.
    memory_fraction: share of the device's free memory available to weights, cache and reserve.
    log_requests: none, summary (a line for each request), or prompts (the line and the prompt).
    log_format: text for Triton's log, json for one JSON object per line on standard error.
    """

    model: str | None = None
    revision: str | None = None
    quantization: str = "int8"
    int8_threshold: float | None = None
    int8_terms: int = 2
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    cuda_graphs: str = "off"
    scheduling: str = "inflight"
    slots: int | None = None
    max_model_len: int | None = None
    default_max_tokens: int = 128
    truncate_max_tokens: str = "off"
    prefill_tokens: int = 512
    stream_interval: int = 1
    drain_seconds: int = 60
    stuck_seconds: int = 60
    memory_fraction: float = 0.9
    log_requests: str = "summary"
    log_format: str = "text"

    @classmethod
    def parse(cls, parameters: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
        """Read the settings from a config's `parameters` and the process environment.

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


BOUNDS: Mapping[str, Bound] = {
    "model": Name(),
    "revision": Name(),
    "quantization": Choice(("int8", "nf4", "none", "checkpoint")),
    "int8_threshold": Real(low=0.0, high=1000.0),
    "int8_terms": Integer(1, 2),
    "dtype": Choice(("auto", "float32", "float16", "bfloat16")),
    "kv_cache_dtype": Choice(("auto", "float32", "bfloat16", "int8")),
    "device": Choice(("auto", "cpu", "cuda")),
    "kernels": Choice(("auto", "stock", "fused")),
    "cuda_graphs": Choice(("off", "on")),
    "scheduling": Choice(("inflight", "batch")),
    "slots": Integer(1, 1024),
    "max_model_len": Integer(2, 1 << 20),
    "default_max_tokens": Integer(1, 1 << 20),
    "truncate_max_tokens": Choice(("off", "on")),
    "prefill_tokens": Integer(1, 1 << 20),
    "stream_interval": Integer(1, 64),
    "drain_seconds": Integer(0, 3600),
    "stuck_seconds": Integer(0, 3600),
    "memory_fraction": Real(low=0.05, high=1.0),
    "log_requests": Choice(("none", "summary", "prompts")),
    "log_format": Choice(("text", "json")),
}
