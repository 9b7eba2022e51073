"""The cases of `make bench`: which servers run which loads, on which checkpoint.

smollm2   speed at equal quality: ours, vLLM, llama.cpp, OpenVINO and FastAPI, streaming to 1, 8, 32 and 128 users
1b, 7b    the same with random weights of TinyLlama's shape and of Llama-2-7B's
article   the article's table (docs/benchmarks.md): naive, batched and INT8, by perf_analyzer
prefixes  prompts that share prefixes: our prefix cache on and off, and vLLM's
formats   TinyLlama's shape in the formats of checkpoints: ours, vLLM and llama.cpp
drafts    edits, JSON, chats and others, by the default model: ours and llama.cpp with and without drafts
lora      no LoRA adapters, eight unused, one, eight, by the default model and TinyLlama's shape: ours and vLLM
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from perf.adapters import lora_adapters, with_adapters
from perf.bench import drafts as draft_loads
from perf.bench import lora as lora_loads
from perf.bench.lora import MIXES, MODELS, ROUNDS, USERS
from perf.bench.prefixes import LARGE_LOADS, POSITIONS, SMALL_LOADS
from perf.checkpoint import (
    LLAMA_2_7B,
    SMOLLM2,
    TINY_LLAMA,
    default_checkpoint,
    fastest,
    random_checkpoint,
    unquantized,
    words_checkpoint,
)
from perf.load.workload import MEAN_OUTPUT, SLOTS, Load, passages
from perf.servers.baselines import fastapi, llama_cpp, openvino, vllm
from perf.servers.running import Server
from perf.servers.triton import our_server

SECONDS = 20.0
"""In which the requests of a load are sent after its warm-up."""
FORMATS = [passages("formats/1", "uniform", 1, 4), passages("formats/8", "uniform", 8, 16)]
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
STORED = {"LLAMA_QUANTIZATION": "checkpoint"}
_ours = partial(our_server, variant="streaming", weights="int8", environment=INT8)


class Case(NamedTuple):
    """A server and what is put on it. checkpoint: makes it where it doesn't exist."""

    server: Server
    checkpoint: Callable[[], Path]
    loads: Sequence[Load]


def article(model: Path | None) -> list[Case]:
    """The product and the article's configurations, the slowest last: if the budget ends, the least is missing.

    On a CPU, which computes FP16 slower than FP32, naive FP16 has a twin in FP32.
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
            our_server("naive_fp32", "naive FP32", "naive_fp16", "fp32", floats),
        ]
    servers += [
        our_server("batched_fp16", "batched FP16", "batched_fp16", "fp16"),
        our_server("naive_fp16", "naive FP16", "naive_fp16", "fp16"),
    ]
    load = passages("article/equal", "equal")._replace(perf_analyzer=True)
    return [Case(server, partial(_chosen, model), [load]) for server in servers]


def speed(
    name: str,
    checkpoint: Callable[[], Path],
    gguf: str,
    users: Sequence[int] = (1, 8, 32, 128),
    mean: int = MEAN_OUTPUT,
    left_out: Sequence[str] = (),
) -> list[Case]:
    """Ours in INT8, with one term too, and of a GGUF file; the others in their formats, on the same files.

    left_out: servers that this machine has no memory for.
    """
    loads = [passages(f"{name}/{count}", "uniform", count, 512, mean) for count in users]
    loads = [load._replace(seconds=SECONDS) for load in loads]
    best = fastest()
    title = f"GGUF {gguf.upper()}"
    servers = [
        _ours("triton_llama_int8", "triton-llama INT8"),
        vllm("vllm", f"vLLM {best.upper()}", best),
    ]
    if not torch.cuda.is_available():
        one_term = INT8 | {"LLAMA_INT8_TERMS": "1"}
        servers += [
            # It multiplies as often as W8A8.
            _ours("triton_llama_int8_one_term", "triton-llama INT8, one term", environment=one_term),
            _stored(gguf, title),
            vllm("vllm_int8", "vLLM INT8 W8A8", "int8", "w8a8"),
            llama_cpp(f"llama_cpp_{gguf}", f"llama.cpp {title}", gguf, title, SLOTS),
            openvino(),
        ]
    return [Case(server, checkpoint, loads) for server in servers if server.key not in left_out]


def _stored(name: str, title: str) -> Server:
    """Return ours of a checkpoint's format."""
    key, ours = f"triton_llama_{name}", f"triton-llama {title}"
    return _ours(key, ours, environment=STORED, converted=name, stored=title)


def smollm2(model: Path | None) -> list[Case]:
    """The default model, with the article's servers, too: their rates are the same for any number of users."""
    checkpoint = partial(_chosen, model)
    cases = speed("smollm2", checkpoint, "q4_1")
    for key, title, batch in (("naive_fastapi", "naive FastAPI", 1), ("batching_fastapi", "batching FastAPI", 8)):
        loads = [load for load in cases[0].loads if load.users == batch]
        cases.append(Case(fastapi(key, title, batch), checkpoint, loads))
    return cases


def prefixes(_: Path | None) -> list[Case]:
    """Ours in INT8 with its prefix cache on and off, and vLLM with its own; all say how many tokens were cached."""
    best = fastest()
    servers = [
        *(
            _ours(
                f"triton_llama_int8_prefix_cache_{state}",
                f"triton-llama INT8, prefix cache {state}",
                environment=INT8 | {"LLAMA_PREFIX_CACHE": state},
            )
            for state in ("on", "off")
        ),
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
    servers = [_ours("triton_llama_int8", "triton-llama INT8"), *(_stored(*each) for each in TITLES.items())]
    for name, title in TITLES.items():
        if name.startswith("q"):
            servers.append(llama_cpp(f"llama_cpp_{name}", f"llama.cpp {title}", name, title, slots=8))
        else:
            servers.append(vllm(f"vllm_{name}", f"vLLM {title}", "int8", name, title))
    return [Case(server, partial(random_checkpoint, TINY_LLAMA), FORMATS) for server in servers]


def drafts(model: Path | None) -> list[Case]:
    """Ours in INT8 and of a GGUF file made of the model, and llama.cpp of the same file; each without and with drafts.

    model: a folder; None is the default model.
    """
    gguf, title = "q4_1", "GGUF Q4_1"
    servers = [
        _ours(
            f"triton_llama_{key}_drafts_{state}",
            f"triton-llama {name}, drafts {state}",
            environment=weights | {"LLAMA_PREFIX_CACHE": "on", "LLAMA_SPECULATION": state},
            converted=converted,
            stored=converted and title,
            chats=True,
            same_answers=key,
        )
        for key, name, weights, converted in (("int8", "INT8", INT8, None), (gguf, title, STORED, gguf))
        for state in ("off", "auto")
    ]
    servers += [
        llama_cpp(f"llama_cpp_{gguf}_drafts_{kind}", f"llama.cpp {title}, drafts {kind}", gguf, title, SLOTS, kind)
        for kind in ("none", "ngram-mod")
    ]
    loads = [draft_loads.load(kind, users) for kind in draft_loads.KINDS for users in draft_loads.MEASURED]
    return [Case(server, partial(_chosen, model), loads) for server in servers]


def lora(_: Path | None) -> list[Case]:
    """Ours and vLLM, without adapters and with eight. vLLM's W8A8 refuses adapters on a CPU, so it has its floats."""
    ours, best = partial(_ours, same_answers="lora"), fastest()
    cases: list[Case] = []
    for model, (make, mean) in MODELS.items():
        adapters = lora_adapters(model)
        loaded = INT8 | {"LLAMA_LORA_ADAPTERS": ", ".join(adapters)}
        pair = [
            ours("triton_llama_int8", "triton-llama INT8"),
            ours("triton_llama_int8_adapters", "triton-llama INT8, 8 adapters", environment=loaded),
        ]
        others = [
            vllm("vllm", f"vLLM {best.upper()}", best),
            vllm("vllm_adapters", f"vLLM {best.upper()}, 8 adapters", best, adapters=adapters),
        ]
        # What unused adapters cost is less than the drift of a machine, so ours take turns.
        rounds = [pair[:: -1 if number % 2 else 1] for number in range(ROUNDS)]
        for number, servers in enumerate([*rounds, others]):
            for server in servers:
                mixes = [*MIXES] if server.key.endswith("adapters") else [*MIXES][:1]
                loads = [lora_loads.load(model, mix, users, number, mean) for users in USERS for mix in mixes]
                cases.append(Case(server, partial(with_adapters, model, make), loads))
    return cases


def _chosen(model: Path | None) -> Path:
    return model or default_checkpoint()


CASES: Mapping[str, Callable[[Path | None], list[Case]]] = {
    "smollm2": smollm2,
    "1b": lambda _: speed("1b", partial(random_checkpoint, TINY_LLAMA), "q4_0", mean=MEAN_OUTPUT // 2),
    "7b": lambda _: speed(
        "7b", partial(random_checkpoint, LLAMA_2_7B), "q4_0", (1, 8, 32), MEAN_OUTPUT // 4, ("vllm", "openvino_int8")
    ),
    "article": article,
    "prefixes": prefixes,
    "formats": formats,
    "drafts": drafts,
    "lora": lora,
}
"""The cases by name. model: the user's checkpoint, for smollm2, article and drafts."""
