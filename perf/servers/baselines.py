"""All servers under one load: ours in INT8 (with one term, too), FP32 and BF16, and the baselines, each in its best
honest settings.

The article's FastAPI servers run in FP32 on a CPU, though the article says FP16, which a CPU multiplies slower; vLLM in
BF16 on a CPU whose flags have a product of it; all in FP16 on a GPU. On a CPU vLLM also runs in its INT8, W8A8: weights
per channel, activations per token, head and KV cache in its floats. Its cache holds as many tokens as ours: 32
sequences, each as long as the model allows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig

from perf.checkpoint import DTYPES, fastest, mebibytes, quantized, unquantized
from perf.environment import ROOT
from perf.load.protocols import Protocol, Target
from perf.roofline.rates import BYTES, Weights
from perf.servers import vllm_environment
from perf.servers.running import HOST, Running, Server, held_port, running, shown
from perf.servers.triton import our_server

SLOTS = 32


def servers() -> list[Server]:
    """Return all, in the order of the tables; the formats depend on whether there is a GPU."""
    plain, best = unquantized(), fastest()
    on_cpu = not torch.cuda.is_available()
    floats: list[Weights] = [plain, "bf16"] if on_cpu else [plain]
    # The article's own: eight at most, ten milliseconds.
    batching = partial(_fastapi, batch=["--batch", "8", "--delay-ms", "10"])
    baselines: list[tuple[str, str, Weights, Callable[[Path, int, int], Launch]]] = [
        ("naive_fastapi", "naive FastAPI", plain, partial(_fastapi, batch=[])),
        ("batching_fastapi", "batching FastAPI", plain, batching),
        ("vllm", "vLLM", best, launch_vllm),
    ]
    if on_cpu:
        baselines.append(("vllm_int8", "vLLM INT8 W8A8", "int8", _vllm_int8))
    return [
        *map(_ours, ("int8", *floats)),
        *([_ours("int8", one_term=True)] if on_cpu else []),
        *(
            Server(key, title, kind, partial(_baseline, key, kind, launch), best if kind == "int8" else None)
            for key, title, kind, launch in baselines
        ),
    ]


def prefix_cache_servers() -> tuple[list[Server], list[Server]]:
    """Return ours in INT8 with its prefix cache on and off, and vLLM with its own, on a CPU.

    All of them say how many tokens of a prompt the cache had.
    """
    best = fastest()
    ours = [
        our_server(
            f"triton_llama_int8_prefix_cache_{state}",
            f"triton-llama INT8, prefix cache {state}",
            "streaming",
            "int8",
            {"LLAMA_QUANTIZATION": "int8", "LLAMA_PREFIX_CACHE": state},
            {"return_perf_metrics": True},
        )
        for state in ("on", "off")
    ]
    launches: list[tuple[str, str, Weights, Callable[..., Launch]]] = [
        ("vllm_int8_prefix_cache", "vLLM INT8 W8A8, prefix cache on", "int8", _vllm_int8),
        ("vllm_prefix_cache", f"vLLM {best.upper()}, prefix cache on", best, launch_vllm),
    ]
    vllm = [
        Server(key, title, kind, partial(_baseline, key, kind, partial(launch, prefix_cache=True)))
        for key, title, kind, launch in launches
    ]
    return ours, vllm


def _ours(weights: Weights, one_term: bool = False) -> Server:
    """one_term: INT8 with one 8-bit term per activation, which multiplies as often as W8A8."""
    key, title = f"triton_llama_{weights}", f"triton-llama {weights.upper()}"
    environment = {"LLAMA_QUANTIZATION": "int8"}
    if weights != "int8":
        environment = {"LLAMA_QUANTIZATION": "none", "LLAMA_DTYPE": DTYPES[weights]}
    elif one_term:
        key, title = f"{key}_one_term", f"{title}, one term"
        environment["LLAMA_INT8_TERMS"] = "1"
    return our_server(key, title, "streaming", weights, environment)


@dataclass(frozen=True)
class Launch:
    """How a baseline is started. ready_s: until it answers. fields: of every request. settings: for the results."""

    protocol: Protocol
    model: str
    command: list[str]
    environment: Mapping[str, str]
    ready_s: float
    settings: Mapping[str, object]
    fields: Mapping[str, object] = field(default_factory=dict)


@contextmanager
def _baseline(
    key: str, weights: Weights, launch: Callable[[Path, int, int], Launch], checkpoint: Path, threads: int
) -> Iterator[Running]:
    dtype = DTYPES[fastest() if weights == "int8" else weights]
    with launched(key, launch, dtype, mebibytes(checkpoint, weights), checkpoint, threads) as started:
        yield started


@contextmanager
def launched(
    key: str,
    launch: Callable[[Path, int, int], Launch],
    dtype: str,
    weights_mib: float,
    checkpoint: Path,
    threads: int,
) -> Iterator[Running]:
    """Run a baseline during the block. dtype: of its floats, for the results."""
    with held_port() as port:
        plan = launch(checkpoint, threads, port)
        target = Target(key, plan.protocol, f"http://{HOST}:{port}", plan.model, plan.fields)
        with running(target, plan.command, {"HF_HUB_OFFLINE": "1", **plan.environment}, plan.ready_s) as pid:
            settings = {"threads": threads, "dtype": dtype, **plan.settings}
            yield Running(target, shown(plan.command, checkpoint), settings, pid, weights_mib)


def _fastapi(checkpoint: Path, threads: int, port: int, batch: list[str]) -> Launch:
    command = [sys.executable, "-m", "perf.servers.fastapi_server", "--model", str(checkpoint)]
    command += ["--dtype", DTYPES[unquantized()], "--threads", str(threads), "--port", str(port), *batch]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    versions = _versions("fastapi", "uvicorn", "transformers", "torch")
    return Launch("fastapi", "llama", command, environment, 120.0, {"versions": versions})


def launch_vllm(checkpoint: Path, threads: int, port: int, prefix_cache: bool = False) -> Launch:
    """Return vLLM's server of OpenAI's protocol."""
    versions = vllm_environment.installed()
    config = AutoConfig.from_pretrained(checkpoint)
    fields = {"ignore_eos": True, "repetition_penalty": 1.0}
    # The command `vllm` looks for a distribution of that name, which on a CPU is another one.
    command = [str(vllm_environment.interpreter()), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", "llama", "--dtype", DTYPES[fastest()]]
    command += ["--max-model-len", str(config.max_position_embeddings), "--max-num-seqs", str(SLOTS)]
    # Other loads repeat their prompts: with prefix caching the comparison would measure that.
    caching = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += caching if prefix_cache else ["--no-enable-prefix-caching"]
    command += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    command += ["--host", HOST, "--port", str(port)]
    resources: dict[str, str] = {}
    if not torch.cuda.is_available():
        # Bytes of a position's keys and values.
        position = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * BYTES[fastest()]
        gibibytes = -(-SLOTS * config.max_position_embeddings * position // 2**30)
        cores = sorted(os.sched_getaffinity(0))[:threads]
        resources = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(gibibytes),
        }
    settings = {"environment": resources, "every request": fields, "versions": versions}
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **resources}
    # It compiles itself before it listens.
    return Launch("openai_completions", "llama", command, environment, 400.0, settings, fields)


def _vllm_int8(checkpoint: Path, threads: int, port: int, prefix_cache: bool = False) -> Launch:
    return launch_vllm(quantized(checkpoint, "w8a8"), threads, port, prefix_cache)


def _versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages}
