"""All servers under one load: ours in INT8 and unquantized, and the baselines, each in its best honest settings.

The baselines run unquantized in the format that is fastest on this machine, the article's servers too, though the
article says FP16. Their caches have as much memory as ours: 32 rows, each as long as the model allows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig
from triton_local.errors import LauncherError

from perf.baselines import vllm_environment
from perf.checkpoint import dtype, mebibytes, unquantized
from perf.environment import ROOT
from perf.load.protocols import Target
from perf.roofline.rates import Weights
from perf.servers.process import HOST, free_port, running, shown
from perf.servers.server import NotRunError, Running, Server
from perf.servers.triton import local_triton, read_back

_ROWS = 32
# transformers serve's default. A prompt of the load is shorter than a page, so no page is shared between requests.
_PAGE = 256
# Without flash kernels its attention compares every token of a pass with all cached ones and all of the pass, of any
# request. On two cores 2048 took a tenth less processor time than the default of 8192; 1024 was level, 256 far behind.
_PASS = 2048


def servers() -> list[Server]:
    """Return all, in the order of the tables; the formats depend on whether there is a GPU."""
    plain = unquantized()
    return [
        _ours("triton_llama_int8", "triton-llama INT8", "int8", "int8"),
        _ours(f"triton_llama_{plain}", f"triton-llama {plain.upper()}", plain, "none"),
        _baseline("naive_fastapi", "naive FastAPI", _fastapi("naive_fastapi")),
        # The article's own: eight at most, ten milliseconds.
        _baseline(
            "batching_fastapi", "batching FastAPI", _fastapi("batching_fastapi", "--batch", "8", "--delay-ms", "10")
        ),
        _baseline("transformers_serve", "transformers serve", _transformers_serve),
        _baseline("vllm", "vLLM", _vllm),
    ]


def server(key: str) -> Server:
    """Return the server with that key. Raises ValueError with the list of known ones."""
    known = {one.key: one for one in servers()}
    if key not in known:
        raise ValueError(f"unknown server {key!r}: known are {', '.join(known)}")
    return known[key]


def _ours(key: str, title: str, weights: Weights, quantization: str) -> Server:
    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Running]:
        environment = {"OMP_NUM_THREADS": str(threads), "LLAMA_QUANTIZATION": quantization}
        command = [*(f"{setting}={value}" for setting, value in environment.items())]
        command += ["make", "serve", "VARIANT=streaming", f"MODEL={checkpoint}"]
        triton = local_triton("streaming", checkpoint, environment)
        try:
            triton.start()
        except LauncherError as error:
            raise NotRunError(str(error)) from error
        try:
            runs = read_back(triton)
            settings = {
                "threads": threads,
                **runs.to_json(),
                "versions": _versions("nvidia-pytriton", "transformers", "torch"),
            }
            target = Target(key, "triton_stream", f"http://{triton.http_url}", "llama")
            yield Running(target, shown(command, checkpoint), settings, triton.pid, runs.loaded.weights_mib)
        finally:
            triton.stop()

    return Server(key, title, "ours", weights, start)


@dataclass(frozen=True)
class _Launch:
    """How a baseline is started on a port. settings: for the results. ready_s: until it listens."""

    target: Target
    command: list[str]
    environment: Mapping[str, str]
    ready_s: float
    settings: Mapping[str, object] = field(default_factory=dict)


_Launcher = Callable[[Path, int, int], _Launch]
"""Returns how to start a baseline of the checkpoint with that number of threads on that port."""


def _baseline(key: str, title: str, launch: _Launcher) -> Server:
    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Running]:
        with free_port() as port:
            plan, weights = launch(checkpoint, threads, port), unquantized()
            environment = {"HF_HUB_OFFLINE": "1", **plan.environment}
            with running(plan.target, plan.command, environment, plan.ready_s) as process:
                settings = {"threads": threads, "dtype": dtype(weights), **plan.settings}
                command = shown(plan.command, checkpoint)
                yield Running(plan.target, command, settings, process.pid, mebibytes(checkpoint, weights))

    return Server(key, title, "peer", unquantized(), start)


def _fastapi(key: str, *batch: str) -> _Launcher:
    def launch(checkpoint: Path, threads: int, port: int) -> _Launch:
        target = Target(key, "fastapi", f"http://{HOST}:{port}", "llama")
        command = [sys.executable, "-m", "perf.baselines.fastapi_server", "--model", str(checkpoint)]
        command += ["--dtype", dtype(unquantized()), "--threads", str(threads), "--port", str(port), *batch]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        settings = {"versions": _versions("fastapi", "uvicorn", "transformers", "torch")}
        return _Launch(target, command, environment, 120.0, settings)

    return launch


def _transformers_serve(checkpoint: Path, threads: int, port: int) -> _Launch:
    """Return `transformers serve` with continuous batching.

    Its first request sets greedy decoding: continuous batching there has one sampling setup for the whole server. The
    end token can only be disabled through a generation config in the request, so each request has one.
    """
    fields = {"generation_config": json.dumps({"do_sample": False, "eos_token_id": None})}
    target = Target("transformers_serve", "openai_completions", f"http://{HOST}:{port}", str(checkpoint), fields)
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(checkpoint)]
    command += ["--continuous-batching", "--dtype", dtype(unquantized()), "--attn-implementation", "sdpa"]
    blocks = _ROWS * -(-_positions(checkpoint) // _PAGE)
    command += ["--cb-block-size", str(_PAGE), "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", str(_PASS)]
    command += ["--host", HOST, "--port", str(port), "--log-level", "error"]
    settings = {"every request": fields, "versions": _versions("transformers", "torch")}
    return _Launch(target, command, {"OMP_NUM_THREADS": str(threads)}, 180.0, settings)


def _vllm(checkpoint: Path, threads: int, port: int) -> _Launch:
    versions = vllm_environment.installed()
    fields = {"ignore_eos": True, "repetition_penalty": 1.0}
    target = Target("vllm", "openai_completions", f"http://{HOST}:{port}", "llama", fields)
    # The command `vllm` looks for a distribution of that name, which on a CPU is another one.
    command = [str(vllm_environment.interpreter()), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", "llama", "--dtype", dtype(unquantized())]
    command += ["--max-model-len", str(_positions(checkpoint)), "--max-num-seqs", str(_ROWS)]
    # The load repeats its prompts: with prefix caching the comparison would measure that.
    command += ["--no-enable-prefix-caching", "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    command += ["--host", HOST, "--port", str(port)]
    resources = _vllm_resources(checkpoint, threads)
    settings = {"environment": resources, "every request": fields, "versions": versions}
    # It compiles itself before it listens.
    return _Launch(target, command, {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **resources}, 400.0, settings)


def _vllm_resources(checkpoint: Path, threads: int) -> dict[str, str]:
    """Return the settings for vLLM's share of processor and memory; none on a GPU."""
    if torch.cuda.is_available():
        return {}
    config = AutoConfig.from_pretrained(checkpoint)
    # Bytes of a position's keys and values, in FP32.
    position = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    gibibytes = -(-_ROWS * config.max_position_embeddings * position // 2**30)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(gibibytes),
    }


def _positions(checkpoint: Path) -> int:
    positions: int = AutoConfig.from_pretrained(checkpoint).max_position_embeddings
    return positions


def _versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages}
