"""The cases of `make bench`: which servers run which loads, on which checkpoint.

article   the article's table (docs/benchmarks.md): naive, batched and INT8, by perf_analyzer
users     ours, FastAPI and vLLM, streaming to 32, 1, 8 and 128 users
large     ours and vLLM on TinyLlama's shape
prefixes  prompts that share prefixes: our prefix cache on and off, and vLLM's
formats   the larger model in the formats of checkpoints: ours, vLLM and llama.cpp
7b        Llama-2-7B's shape: ours in INT8 and llama.cpp in Q8_0, streaming to 1 and 8 users
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from perf.bench.prefixes import LARGE_LOADS, POSITIONS, SMALL_LOADS, PrefixLoad
from perf.checkpoint import (
    DTYPES,
    LLAMA_2_7B,
    SMOLLM2,
    TINY_LLAMA,
    default_checkpoint,
    fastest,
    random_checkpoint,
    unquantized,
    words_checkpoint,
)
from perf.roofline import Weights
from perf.servers.baselines import LLAMA_CPP_SLOTS, fastapi, llama_cpp, vllm
from perf.servers.running import Server
from perf.servers.triton import our_server
from perf.workload import MEAN_OUTPUT, SLOTS, Load

USERS = [
    Load(f"users/{users}", "uniform", users, measured) for users, measured in ((SLOTS, 64), (1, 8), (8, 16), (128, 64))
]
LARGE = [Load("large/1", "uniform", 1, 4, MEAN_OUTPUT // 2), Load("large/32", "uniform", 32, 32, MEAN_OUTPUT // 2)]
"""For the larger model: fewer requests with half the tokens."""
SEVEN_BILLION = [Load("7b/1", "uniform", 1, 4, MEAN_OUTPUT // 2), Load("7b/8", "uniform", 8, 16, MEAN_OUTPUT // 2)]
FORMATS = [Load("formats/1", "uniform", 1, 4), Load("formats/8", "uniform", 8, 16)]
TITLES = {
    "w8a8": "W8A8",
    "w4a16": "W4A16",
    "gptq4": "GPTQ 4 bits",
    "awq4": "AWQ 4 bits",
    "q8_0": "GGUF Q8_0",
    "q4_0": "GGUF Q4_0",
    "q4_k_m": "GGUF Q4_K_M",
}
"""The formats of checkpoints. vLLM's CPU backend reads the first four, and llama.cpp the others."""
INT8 = {"LLAMA_QUANTIZATION": "int8"}


class Case(NamedTuple):
    """A server and what is put on it. checkpoint: makes it where it doesn't exist."""

    server: Server
    checkpoint: Callable[[], Path]
    loads: Sequence[Load | PrefixLoad]


def article(model: Path | None) -> list[Case]:
    """The product and the article's configurations, the slowest last: if the budget ends, the least is missing.

    On a CPU, which computes FP16 slower than FP32, the article's FP16 configurations have FP32 twins: they show what
    batching gains apart from what the number format loses.
    """
    plain = unquantized()
    whole, floats = {"LLAMA_QUANTIZATION": "none"}, {"LLAMA_DTYPE": "float32"}
    servers = [
        our_server("inflight_int8", "in-flight INT8", "default", "int8"),
        our_server("batched_int8", "batched INT8", "batched_int8", "int8"),
        our_server(f"inflight_{plain}", f"in-flight {plain.upper()}", "default", plain, whole),
    ]
    if plain == "fp32":
        bf16 = {**whole, "LLAMA_DTYPE": "bfloat16"}
        servers += [
            our_server("inflight_bf16", "in-flight BF16", "default", "bf16", bf16),
            our_server("batched_fp32", "batched FP32", "batched_fp16", "fp32", floats),
            our_server("naive_fp32", "naive FP32", "naive_fp16", "fp32", floats),
        ]
    servers += [
        our_server("batched_fp16", "batched FP16", "batched_fp16", "fp16"),
        our_server("naive_fp16", "naive FP16", "naive_fp16", "fp16"),
    ]
    load = Load("article/equal", "equal", perf_analyzer=True)
    return [Case(server, partial(_chosen, model), [load]) for server in servers]


def users(model: Path | None) -> list[Case]:
    """All servers at once: ours in INT8 (with one term, too) and in floats, and the baselines."""
    plain = unquantized()
    floats: list[Weights] = [plain] if plain == "fp16" else [plain, "bf16"]
    servers = _int8_servers()
    for weights in floats:
        environment = {"LLAMA_QUANTIZATION": "none", "LLAMA_DTYPE": DTYPES[weights]}
        title = f"triton-llama {weights.upper()}"
        servers.append(our_server(f"triton_llama_{weights}", title, "streaming", weights, environment))
    fastapis = [fastapi("naive_fastapi", "naive FastAPI", 1), fastapi("batching_fastapi", "batching FastAPI", 8)]
    checkpoint = partial(_chosen, model)
    return [
        *(Case(server, checkpoint, USERS) for server in servers),
        # They answer one and eight at a time, whatever the users.
        *(Case(server, checkpoint, USERS[:1]) for server in fastapis),
    ]


def large(model: Path | None) -> list[Case]:
    """Ours in INT8 and vLLM. A model of the user's, or a GPU's default, is large itself."""
    servers = _int8_servers() if model is None and not torch.cuda.is_available() else []
    return [Case(server, partial(random_checkpoint, TINY_LLAMA), LARGE) for server in servers]


def prefixes(_: Path | None) -> list[Case]:
    """Ours in INT8 with its prefix cache on and off, and vLLM with its own; all say how many tokens were cached."""
    best = fastest()
    servers = [
        our_server(
            f"triton_llama_int8_prefix_cache_{state}",
            f"triton-llama INT8, prefix cache {state}",
            "streaming",
            "int8",
            INT8 | {"LLAMA_PREFIX_CACHE": state},
        )
        for state in ("on", "off")
    ]
    servers += [
        vllm("vllm_int8_prefix_cache", "vLLM INT8 W8A8, prefix cache on", "int8", "w8a8", prefix_cache=True),
        vllm("vllm_prefix_cache", f"vLLM {best.upper()}, prefix cache on", best, prefix_cache=True),
    ]
    return [
        Case(server, partial(words_checkpoint, shape, POSITIONS), loads)
        for shape, loads in ((SMOLLM2, SMALL_LOADS), (TINY_LLAMA, LARGE_LOADS))
        for server in servers
    ]


def formats(_: Path | None) -> list[Case]:
    """Ours with INT8 of the float checkpoint, and each server with each of its formats."""
    servers = [our_server("triton_llama_int8", "triton-llama INT8", "streaming", "int8", INT8)]
    stored = {"LLAMA_QUANTIZATION": "checkpoint"}
    for name, title in TITLES.items():
        key, ours = f"triton_llama_{name}", f"triton-llama {title}"
        servers.append(our_server(key, ours, "streaming", "int8", stored, name, title))
    for name, title in TITLES.items():
        if name.startswith("q"):
            servers.append(llama_cpp(f"llama_cpp_{name}", f"llama.cpp {title}", name, title))
        else:
            servers.append(vllm(f"vllm_{name}", f"vLLM {title}", "int8", name, title))
    return [Case(server, partial(random_checkpoint, TINY_LLAMA), FORMATS) for server in servers]


def seven_billion(_: Path | None) -> list[Case]:
    """Ours with INT8 of FP16, and llama.cpp with the same weights in Q8_0, each with eight slots."""
    eight = INT8 | {"LLAMA_SLOTS": str(LLAMA_CPP_SLOTS)}
    servers = [
        our_server("triton_llama_int8", "triton-llama INT8", "streaming", "int8", eight),
        llama_cpp("llama_cpp_q8_0", "llama.cpp GGUF Q8_0", "q8_0", TITLES["q8_0"]),
    ]
    return [Case(server, partial(random_checkpoint, LLAMA_2_7B), SEVEN_BILLION) for server in servers]


def _chosen(model: Path | None) -> Path:
    return model or default_checkpoint()


def _int8_servers() -> list[Server]:
    """Return ours in INT8 and vLLM; on a CPU also ours with one 8-bit term per activation and vLLM's W8A8."""
    best = fastest()
    ours = our_server("triton_llama_int8", "triton-llama INT8", "streaming", "int8", INT8)
    floats = vllm("vllm", f"vLLM {best.upper()}", best)
    if torch.cuda.is_available():
        return [ours, floats]
    # It multiplies as often as W8A8.
    key, title = "triton_llama_int8_one_term", "triton-llama INT8, one term"
    one_term = our_server(key, title, "streaming", "int8", INT8 | {"LLAMA_INT8_TERMS": "1"})
    return [ours, one_term, floats, vllm("vllm_int8", "vLLM INT8 W8A8", "int8", "w8a8")]


CASES: Mapping[str, Callable[[Path | None], list[Case]]] = {
    "article": article,
    "users": users,
    "large": large,
    "prefixes": prefixes,
    "formats": formats,
    "7b": seven_billion,
}
"""The cases by name. model: the user's checkpoint, for article and users."""
