"""Servers of one model's weights in the formats of checkpoints: ours in all, vLLM and llama.cpp in those they read.

vLLM's CPU backend also refuses what isn't here: GPTQ in 8 bits, asymmetric or with act-order, and W8A16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from perf.checkpoint import DTYPES, fastest, quantized
from perf.servers import llama_cpp_environment
from perf.servers.baselines import Launch, launch_vllm, launched
from perf.servers.running import HOST, Running, Server
from perf.servers.triton import our_server

USERS = 8
"""The most at a time; llama.cpp has as many slots."""
TITLES = {
    "w8a8": "W8A8",
    "w4a16": "W4A16",
    "gptq4": "GPTQ 4 bits",
    "awq4": "AWQ 4 bits",
    "q8_0": "GGUF Q8_0",
    "q4_0": "GGUF Q4_0",
    "q4_k_m": "GGUF Q4_K_M",
}
VLLM = ("w8a8", "w4a16", "gptq4", "awq4")
LLAMA_CPP = ("q8_0", "q4_0", "q4_k_m")
_AS_STORED = {"LLAMA_QUANTIZATION": "checkpoint"}


def format_servers() -> list[Server]:
    """Return ours with INT8 rows of the float checkpoint, and each server with each of its formats."""
    ours = partial(our_server, variant="streaming", weights="int8")
    baselines = [
        *(("vllm", "vLLM", name, launch_vllm) for name in VLLM),
        *(("llama_cpp", "llama.cpp", name, _llama_cpp) for name in LLAMA_CPP),
    ]
    return [
        ours("triton_llama_int8", "triton-llama INT8", environment={"LLAMA_QUANTIZATION": "int8"}),
        *(
            _converted(
                ours(f"triton_llama_{name}", f"triton-llama {title}", environment=_AS_STORED, stored=title), name
            )
            for name, title in TITLES.items()
        ),
        *(
            _converted(_baseline(f"{key}_{name}", f"{title} {TITLES[name]}", launch, TITLES[name]), name)
            for key, title, name, launch in baselines
        ),
    ]


def _converted(server: Server, name: str) -> Server:
    """Return the server that starts with a checkpoint's conversion to that format."""
    return replace(server, start=lambda checkpoint, threads: server.start(quantized(checkpoint, name), threads))


def _baseline(key: str, title: str, launch: Callable[[Path, int, int], Launch], stored: str) -> Server:
    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Running]:
        files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.gguf")]
        mebibytes = sum(file.stat().st_size for file in files) / 2**20
        with launched(key, launch, DTYPES[fastest()], mebibytes, checkpoint, threads) as started:
            yield started

    return Server(key, title, "int8", start, stored=stored)


def _llama_cpp(checkpoint: Path, threads: int, port: int) -> Launch:
    """Return llama.cpp's server, with a slot a user and each as long as the model allows."""
    # Imported here: only these files need it.
    from gguf import GGUFReader

    (file,) = checkpoint.glob("*.gguf")
    positions = GGUFReader(file).fields["llama.context_length"].contents()
    command = [str(llama_cpp_environment.program()), "--model", str(file), "--host", HOST, "--port", str(port)]
    command += ["--threads", str(threads), "--parallel", str(USERS), "--ctx-size", str(USERS * positions)]
    # Its cache in main memory keeps prompts of earlier requests. A mapped file stays in memory beside the weights in
    # the kernels' order.
    command += ["--cache-ram", "0", "--load-mode", "none", "--no-ui"]
    fields = {"ignore_eos": True, "repeat_penalty": 1.0, "cache_prompt": False}
    versions = {llama_cpp_environment.PACKAGE: llama_cpp_environment.VERSION}
    settings = {"every request": fields, "versions": versions}
    return Launch("openai_completions", "llama", command, {}, 120.0, settings, fields)
