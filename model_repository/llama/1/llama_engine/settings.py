"""The settings of the model: one frozen dataclass, parsed strictly.

Environment `LLAMA_<NAME>` beats the `parameters` of the Triton config, which beat the defaults here. An unknown key, a
malformed value or one out of range is refused with the key, the value, where it came from and the bound; nothing falls
back silently. This module knows nothing about checkpoints: what depends on one (a `max_model_len` beyond its
positions, say) is checked where the checkpoint is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from llama_engine.errors import InvalidSettings

ENVIRONMENT_PREFIX = "LLAMA_"


@dataclass(frozen=True)
class Choice:
    """One of a fixed set of words."""

    words: tuple[str, ...]

    def parse(self, text: str) -> str:
        """Return the word, or raise ValueError with the bound."""
        if text not in self.words:
            raise ValueError(f"must be one of {', '.join(self.words)}")
        return text


@dataclass(frozen=True)
class WholeNumber:
    """An integer in [low, high]."""

    low: int
    high: int

    def parse(self, text: str) -> int:
        """Return the integer, or raise ValueError with the bound."""
        # int() also takes "1_000" and " 7 "; a setting is written in digits or it is a mistake.
        if not re.fullmatch(r"[0-9]{1,18}", text) or not self.low <= int(text) <= self.high:
            raise ValueError(f"must be a whole number from {self.low} to {self.high}")
        return int(text)


@dataclass(frozen=True)
class Number:
    """A finite number in [low, high]."""

    low: float
    high: float

    def parse(self, text: str) -> float:
        """Return the number, or raise ValueError with the bound."""
        # As above: float() also takes "1_000", " 7 ", "nan" and the digits of other scripts.
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-?[0-9]{1,3})?", text) or not self.low <= float(text) <= self.high:
            raise ValueError(f"must be a number from {self.low:g} to {self.high:g}")
        return float(text)


@dataclass(frozen=True)
class Text:
    """A non-empty string."""

    def parse(self, text: str) -> str:
        """Return the string, or raise ValueError."""
        if not text.strip():
            raise ValueError("must not be empty")
        return text.strip()


Bound = Choice | WholeNumber | Number | Text


@dataclass(frozen=True)
class Settings:
    """What the model is told from outside; every field is a config parameter and an environment variable.

    model: path or hub id of the checkpoint; None is the embedded one.
    revision: of a hub id; None is its default branch.
    quantization: of the linear layers; `checkpoint` serves it in the precision it was saved in.
    int8_threshold: bitsandbytes' outlier threshold; None is 0, or what a checkpoint saved in 8 bits says. 0 keeps rows
        independent of their batch; 6 is LLM.int8()'s own.
    dtype: of everything unquantized, and of the cache. auto: float16 on CUDA, float32 on a CPU.
    device: auto is the GPU that Triton gave the instance, or the CPU where it gave none.
    kernels: of a decode step on a GPU. stock are bitsandbytes' and PyTorch's; fused are the engine's own, tried against
        plain ones when the model loads and left out where they fail.
    cuda_graphs: on captures the decode steps on a GPU when the model loads, and replays them instead of launching every
        kernel anew; where they can't be captured they are launched.
    scheduling: inflight lets rows enter and leave between two steps; batch runs each of Triton's batches to its end.
    slots: rows decoded together; None is the config's max_batch_size.
    max_model_len: prompt + completion, in tokens; None is the checkpoint's own, at most 4096.
    default_max_tokens: when neither the request nor the checkpoint says.
    prefill_tokens: most padded prompt tokens read before a decode step; a longer prompt is read in chunks.
    drain_seconds: how long running rows may go on once the model is told to unload.
    stuck_seconds: how long a step may take until the model says that it isn't ready; 0 is as long as it likes.
    memory_fraction: share of the device's free memory that weights, cache and reserve may take.
    log_requests: summary logs a line for every request that was answered, prompts its prompts too, none neither.
    log_format: text for lines in Triton's log, json for an object a line on standard error.
    """

    model: str | None = None
    revision: str | None = None
    quantization: str = "int8"
    int8_threshold: float | None = None
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "stock"
    cuda_graphs: str = "off"
    scheduling: str = "inflight"
    slots: int | None = None
    max_model_len: int | None = None
    default_max_tokens: int = 128
    prefill_tokens: int = 512
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
        given = {name: (f"parameter {name!r} of the config", value) for name, value in parameters.items()}
        for key, value in environment.items():
            if key.startswith(ENVIRONMENT_PREFIX):
                given[key.removeprefix(ENVIRONMENT_PREFIX).lower()] = (f"environment variable {key}", value)
        values: dict[str, object] = {}
        for name, (source, text) in given.items():
            if name not in BOUNDS:
                near = get_close_matches(name, BOUNDS, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise InvalidSettings(f"{source}: unknown setting{hint}; known are {', '.join(sorted(BOUNDS))}")
            try:
                values[name] = BOUNDS[name].parse(text)
            except ValueError as error:
                raise InvalidSettings(f"{source}: {name} {error}, got {text!r}") from None
        return cls(**values)  # type: ignore[arg-type]  # each value came out of its own field's bound

    def describe(self) -> str:
        """Return every setting, for the log."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in BOUNDS)


BOUNDS: Mapping[str, Bound] = {
    "model": Text(),
    "revision": Text(),
    "quantization": Choice(("int8", "nf4", "none", "checkpoint")),
    "int8_threshold": Number(0.0, 1000.0),
    "dtype": Choice(("auto", "float32", "float16", "bfloat16")),
    "device": Choice(("auto", "cpu", "cuda")),
    "kernels": Choice(("stock", "fused")),
    "cuda_graphs": Choice(("off", "on")),
    "scheduling": Choice(("inflight", "batch")),
    "slots": WholeNumber(1, 1024),
    "max_model_len": WholeNumber(2, 1 << 20),
    "default_max_tokens": WholeNumber(1, 1 << 20),
    "prefill_tokens": WholeNumber(1, 1 << 20),
    "drain_seconds": WholeNumber(0, 3600),
    "stuck_seconds": WholeNumber(0, 3600),
    "memory_fraction": Number(0.05, 1.0),
    "log_requests": Choice(("none", "summary", "prompts")),
    "log_format": Choice(("text", "json")),
}
