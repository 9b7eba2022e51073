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

from llama_engine.adapter_names import AdapterSource, AdapterSources
from llama_engine.bounds import ADDRESS, URL, Bound, BoundError, Choice, Integer, Real, Text
from llama_engine.errors import InvalidSettings

ENVIRONMENT_PREFIX = "LLAMA_"

MAX_MODEL_LEN = 1 << 20
"""Maximum of `max_model_len`, also for a checkpoint with more positions."""

_T = TypeVar("_T")


def _setting(default: _T, bound: Bound[_T], meaning: str, default_in_words: str = "") -> _T:
    """Return a field with its entry of docs/settings.md. default_in_words: what None stands for."""
    return field(default=default, metadata={"bound": bound, "meaning": meaning, "default": default_in_words})


@dataclass(frozen=True)
class Settings:
    """The model's settings; every field is a config parameter and an environment variable."""

    # fmt: off
    model: str | None = _setting(
        None, Text(may_be_empty=False),
        "folder, GGUF file or hub id of the checkpoint",
        "SmolLM2-135M-Instruct",
    )
    revision: str | None = _setting(
        None, Text(may_be_empty=False),
        "revision of a hub id",
        "the default branch",
    )
    quantization: str = _setting(
        "int8", Choice(("int8", "nf4", "none", "checkpoint")),
        "precision of the linear layers. int8: exact INT8 products, of integers as saved in any format "
        "(docs/checkpoints.md#formats) or of floats that are quantized at load; nf4; none: floats; checkpoint: as "
        "saved, floats included",
    )
    int8_threshold: float = _setting(
        0.0, Real(low=0.0, high=1000.0),
        "at 0 the 8-bit products are exact and batch-invariant (docs/exact-int8.md). Above, bitsandbytes' LLM.int8() "
        "with this outlier threshold: 6, its own default, computes the outlier columns of the whole batch in 16 bits "
        "and loses that. The threshold that a checkpoint was saved with is ignored",
    )
    int8_terms: str = _setting(
        "auto", Choice(("auto", "1", "2")),
        "8-bit terms of an activation in an exact INT8 product. 2 keep 15 bits; 1 keeps 8, for half the "
        "operations and less accuracy; auto: 2 for outliers, else 1, on a GPU always 2. Without effect where "
        "`int8_threshold` is above 0",
    )
    int8_outlier_ratio: float = _setting(
        4.0, Real(low=1.0, high=1000.0),
        "with `int8_terms` auto, an activation is an outlier if its magnitude exceeds this times the mean magnitude of "
        "its token's others; lower is nearer to two terms and slower",
    )
    dtype: str = _setting(
        "auto", Choice(("auto", "float32", "float16", "bfloat16")),
        "precision of everything unquantized, but for an embedding that is smaller as saved, with the compiled "
        "kernels; auto: float16 on a GPU, float32 on a CPU",
    )
    kv_cache_dtype: str = _setting(
        "auto", Choice(("auto", "float32", "bfloat16", "int8")),
        "precision of keys and values; int8 has a scale for each position and head; auto: bfloat16 for INT8 "
        "weights with the compiled kernels, else the `dtype`. Half the bytes are half the memory and, with the "
        "compiled kernels, half the reading of the cache at each step",
    )
    device: str = _setting(
        "auto", Choice(("auto", "cpu", "cuda")),
        "auto: the GPU that Triton assigned to the instance, else the CPU",
    )
    kernels: str = _setting(
        "auto", Choice(("auto", "stock")),
        "auto: for INT8 weights on a CPU the kernels compiled from C++ (docs/exact-int8.md); on a GPU (Ampere and "
        "newer, FP16 or BF16) PyTorch's FlashAttention over each sequence's own positions, and elementwise "
        "operations fused by `torch.compile`, which needs a C compiler. stock: PyTorch's own alone, on a CPU "
        "products of dequantized weights, on a GPU attention with masks. The kernels are tested at load; one that "
        "fails, or isn't compiled, is replaced by the stock one, with a log line",
    )
    cuda_graphs: str = _setting(
        "auto", Choice(("auto", "off", "on")),
        "on: decode steps are captured as CUDA graphs at load, one for each bucket of sequences and span, and "
        "replayed. Where that is impossible (a CPU, an `int8_threshold` above 0, a failed capture) a log line "
        "gives the reason, and kernels are launched one by one, as with off. auto: on for a GPU",
    )
    scheduling: str = _setting(
        "inflight", Choice(("inflight", "batch")),
        "inflight: sequences enter and leave between two decode steps; batch: each of Triton's batches runs to its end",
    )
    slots: int | None = _setting(
        None, Integer(1, 1024),
        "sequences decoded together",
        "the config's `max_batch_size`",
    )
    max_model_len: int | None = _setting(
        None, Integer(2, MAX_MODEL_LEN),
        "tokens of prompt and completion together; the KV cache holds at least one sequence of as many",
        "the checkpoint's, or less if memory is short",
    )
    kv_cache_tokens: int | None = _setting(
        None, Integer(16, 1 << 30),
        "positions in the KV cache's pool, at least `max_model_len`, rounded up to whole pages of 16 (on a GPU "
        "256). All sequences and cached prefixes share it, and the log's memory plan says how many sequences of "
        "which length that is. More: longer prefixes stay cached, fewer sequences are preempted",
        "`slots` × `max_model_len` (at most 4096 each), on a CPU at most 4 times the weights or 1 GiB, or what fits "
        "the memory",
    )
    prefix_cache: str = _setting(
        "on", Choice(("on", "off")),
        "on: keys and values of prompts and completions stay in the pool until their pages are needed, and of a "
        "prompt only what follows its longest cached prefix is computed; the input `cache_salt` says who may "
        "share. off: a sequence's pages are free at its end, and choices of one request still share their prompt",
    )
    kv_events: str = _setting(
        "off", ADDRESS,
        "tcp://HOST:PORT: publish over ZMQ which tokens the KV cache's pages have, in the format of vLLM's KV cache "
        "events, for routers that send a request to where its prefix is cached; the next port replays what a "
        "subscriber missed. The topic is empty, as vllm-router expects it, or follows a slash, as llm-d's "
        "tcp://*:5557/kv@10.0.0.5:9000@llama. Both show all prompts and answers to anyone who reaches them "
        "(docs/security.md#what-is-left). For models of one instance. Needs pyzmq and msgspec, the extra `kv-events`",
    )
    speculation: str = _setting(
        "auto", Choice(("auto", "on", "off")),
        "on: a step computes several tokens of a sequence where the next ones can be guessed: what a guide forces, "
        "what the input `prediction` has, what repeats the prompt, the output or a finished sequence of the same "
        "`cache_salt`. A guess is taken only if it is the token that the sequence would have had, so that no bit of "
        "an answer changes where logits are batch-invariant; auto: on there, else off. How many tokens are guessed "
        "follows from the measured time of steps",
    )
    lora_adapters: tuple[AdapterSource, ...] | None = _setting(
        None, AdapterSources(),
        "LoRA adapters loaded at start, as PEFT saves them (docs/lora.md): folders, or hub ids, each with or without "
        "@REVISION. NUMBER is the `lora_task_id` of requests",
        "none",
    )
    lora_folder: str | None = _setting(
        None, Text(),
        "folder of the adapters that requests may load and unload at run time, by the input `lora_path`; empty is off. "
        "For models of one instance, under `scheduling: inflight`",
        "off",
    )
    max_loras: int | None = _setting(
        None, Integer(0, 64),
        "adapters loaded together; the memory plan has room for as many",
        "the number of `lora_adapters`, with a `lora_folder` at least 8",
    )
    max_lora_rank: int = _setting(
        16, Integer(1, 128),
        "maximum rank of an adapter",
    )
    pooling: str = _setting(
        "auto", Choice(("auto", "last", "mean", "off")),
        "embeddings (the input `return_embedding`) are the hidden states after the final norm, of the last token or "
        "the mean of all, with the L2 norm 1. auto: follows the checkpoint's sentence-transformers files "
        "(modules.json) or its GGUF metadata; off if there are none",
    )
    default_max_tokens: int = _setting(
        128, Integer(1, 1 << 20),
        "`max_tokens` of a request to Triton's ports without it, unless the checkpoint has a `max_new_tokens`; the "
        "OpenAI endpoint's default is what the context leaves, for legacy completions 16",
    )
    truncate_max_tokens: str = _setting(
        "off", Choice(("off", "on")),
        "on: a `max_tokens` that doesn't fit is reduced to the room that the prompt leaves; off: it is refused, "
        "because a text that is cut early would have the finish reason `length`, too. A request's input of this "
        "name overrides it",
    )
    prefill_tokens: int = _setting(
        512, Integer(1, 1 << 20),
        "maximum prompt tokens prefilled before a decode step; longer prompts are prefilled in chunks. "
        "Embeddings take at most a quarter while other requests generate. Smaller: "
        "shorter gaps for decoding sequences; larger: lower TTFT (docs/decisions.md#batching-and-scheduling)",
    )
    stream_interval: int = _setting(
        1, Integer(1, 64),
        "minimum tokens of a stream's chunk, as vLLM's `--stream-interval`; the first token and the last chunk do "
        "not wait. Larger chunks cost less processor time. An error that ends a stream leaves out tokens that "
        "were not sent yet",
    )
    drain_seconds: int = _setting(
        60, Integer(0, 3600),
        "seconds for running sequences to finish after the model starts unloading; the supervisor sets it to its "
        "grace period",
    )
    stuck_seconds: int = _setting(
        60, Integer(0, 3600),
        "seconds that a step may take before the model reports not ready, which Triton 26.03 and newer ask; 0 "
        "disables the check. The supervisor sets it to `TRITON_STUCK_SECONDS`",
    )
    memory_fraction: float = _setting(
        0.9, Real(low=0.05, high=1.0),
        "share of the free memory for weights, KV cache and reserve",
    )
    log_requests: str = _setting(
        "summary", Choice(("none", "summary", "prompts")),
        "summary: a log line for every request with its id, counts, times and what was wrong with it, without its "
        "values; prompts: with its prompts and those values, too",
    )
    log_format: str = _setting(
        "text", Choice(("text", "json")),
        "format of the model's own log lines: text, in Triton's log; json, one object a line on standard error",
    )
    traces: str = _setting(
        "off", URL,
        "URL of a collector that takes OTLP over HTTP: the time that requests with the parameter `traceparent` queue, "
        "are prefilled and decode goes there as spans (docs/operations.md#traces). Needs OpenTelemetry, the extra "
        "`tracing`",
    )
    # fmt: on

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
        """Return every setting, for the log; `default` is no value, and docs/settings.md says what applies then."""
        values = {name: getattr(self, name) for name in BOUNDS}
        return ", ".join(f"{name}={'default' if value is None else value}" for name, value in values.items())


BOUNDS: Mapping[str, Bound[object]] = {setting.name: setting.metadata["bound"] for setting in fields(Settings)}
