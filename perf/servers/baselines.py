"""Baselines, each in its best honest settings: FastAPI around `generate()`, vLLM, llama.cpp and OpenVINO GenAI.

vLLM runs in BF16 on a CPU and in FP16 on a GPU. Its INT8 is W8A8: weights per channel, activations per token, head and
KV cache in its floats. Its cache holds as many tokens as ours: 32 sequences, each as long as the model allows.
OpenVINO's INT8 is what its exporter makes, and its plugin's defaults. `make bench-vllm bench-llama-cpp bench-openvino`
installs them. `perf/bench/cases.py` says which case runs which server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions, version
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig
from triton_local.ports import choose_ports

from perf.adapters import RANK
from perf.checkpoint import DTYPES, OPENVINO, fastest, parameters, unquantized
from perf.environment import ROOT
from perf.load.protocols import Protocol, Target
from perf.load.workload import SLOTS
from perf.roofline import BYTES, Weights
from perf.servers.running import HOST, NotRunError, Running, Server, running, shown

VLLM, LLAMA_CPP = ROOT / ".work" / "vllm", ROOT / ".work" / "llama.cpp"
TOP = 1000
"""Best tokens of a position that vLLM may be asked for."""


class Launch(NamedTuple):
    """How a baseline is started. fields: of every request. ready_s: until it answers."""

    protocol: Protocol
    command: list[str]
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    fields: Mapping[str, object]
    ready_s: float = 120.0


def fastapi(key: str, title: str, batch: int) -> Server:
    """Return the article's server, with its delay of 10 ms; batch: the largest."""
    weights = unquantized()

    def launch(checkpoint: Path, threads: int, port: int) -> Launch:
        command = [sys.executable, "-m", "perf.servers.fastapi_server", "--model", str(checkpoint)]
        command += ["--dtype", DTYPES[weights], "--threads", str(threads), "--port", str(port), "--batch", str(batch)]
        versions = {name: version(name) for name in ("fastapi", "uvicorn", "transformers", "torch")}
        return Launch("triton_generate", command, {}, versions, {})

    return _baseline(key, f"{title} {weights.upper()}", weights, launch)


def vllm(
    key: str,
    title: str,
    weights: Weights,
    converted: str | None = None,
    stored: str | None = None,
    prefix_cache: bool = False,
    adapters: Sequence[str] = (),
) -> Server:
    """Return vLLM's server of OpenAI's protocol. converted, stored: as of a Server. adapters: NAME=FOLDER of each."""

    def launch(checkpoint: Path, threads: int, port: int) -> Launch:
        # The marker is created last.
        if not (VLLM / ".ready").exists():
            raise NotRunError("vLLM isn't installed: make bench-vllm does it, into .work/vllm")
        config = AutoConfig.from_pretrained(checkpoint)
        # The command `vllm` looks for a distribution of that name, which on a CPU is another one.
        command = [str(VLLM / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(checkpoint), "--served-model-name", "llama", "--dtype", DTYPES[fastest()]]
        # The longest chats have 4,096 tokens.
        positions = min(config.max_position_embeddings, 4096)
        command += ["--max-model-len", str(positions), "--max-num-seqs", str(SLOTS)]
        # Other loads repeat their prompts: with prefix caching the comparison would measure that.
        caching = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        command += caching if prefix_cache else ["--no-enable-prefix-caching"]
        command += ["--generation-config", "vllm", "--disable-uvicorn-access-log", "--max-logprobs", str(TOP)]
        command += ["--host", HOST, "--port", str(port)]
        if adapters:
            command += ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", str(RANK)]
            command += ["--lora-modules", *adapters]
        environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if not torch.cuda.is_available():
            # Bytes of a position's keys and values.
            position = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * BYTES[fastest()]
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(-(-SLOTS * positions * position // 2**30))
            cores = sorted(os.sched_getaffinity(0))[:threads]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        fields = {"ignore_eos": True, "repetition_penalty": 1.0}
        versions = _versions(VLLM, "vllm", "vllm-cpu", "torch")
        # It compiles itself before it listens.
        return Launch("openai_completions", command, environment, versions, fields, 400.0)

    return _baseline(key, title, weights, launch, converted, stored)


def llama_cpp(key: str, title: str, converted: str, stored: str, slots: int, drafts: str = "") -> Server:
    """Return llama.cpp's server of a GGUF file. converted, stored: as of a Server.

    drafts: its --spec-type; then it serves chats, with its caches of prompts.
    """

    def launch(checkpoint: Path, threads: int, port: int) -> Launch:
        # Imported here: only these files need it.
        from gguf import GGUFReader

        program = LLAMA_CPP / "build" / "bin" / "llama-server"
        if not program.exists():
            raise NotRunError("llama.cpp isn't built: make bench-llama-cpp does it, in .work/llama.cpp")
        (file,) = checkpoint.glob("*.gguf")
        # No load needs more.
        positions = min(GGUFReader(file).fields["llama.context_length"].contents(), 2048 if drafts else 1024)
        command = [str(program), "--model", str(file), "--host", HOST, "--port", str(port), "--threads", str(threads)]
        command += ["--parallel", str(slots), "--ctx-size", str(slots * positions)]
        # A mapped file stays in memory beside the weights in the kernels' order.
        command += ["--load-mode", "none", "--no-ui", "--spec-type", drafts or "none"]
        versions = {"llama.cpp": (LLAMA_CPP / ".version").read_text().strip()}
        if drafts:
            return Launch("openai_chat", command, {}, versions, {})
        # Its cache in main memory keeps prompts of earlier requests.
        command += ["--cache-ram", "0"]
        fields = {"ignore_eos": True, "repeat_penalty": 1.0, "cache_prompt": False}
        return Launch("openai_completions", command, {}, versions, fields)

    return _baseline(key, title, "int8", launch, converted, stored)


def openvino() -> Server:
    """Return OpenVINO GenAI's continuous batching of what its exporter makes in INT8."""

    def launch(checkpoint: Path, threads: int, port: int) -> Launch:
        program = Path(__file__).with_name("openvino_server.py")
        command = [str(OPENVINO / "bin" / "python"), str(program), "--model", str(checkpoint), "--port", str(port)]
        command += ["--threads", str(threads), "--slots", str(SLOTS)]
        return Launch("openai_completions", command, {}, _versions(OPENVINO, "openvino", "openvino-genai", "nncf"), {})

    return _baseline("openvino_int8", "OpenVINO GenAI INT8", "int8", launch, "openvino_int8")


def _baseline(
    key: str,
    title: str,
    weights: Weights,
    launch: Callable[[Path, int, int], Launch],
    converted: str | None = None,
    stored: str | None = None,
) -> Server:
    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Running]:
        if converted is None:
            size = parameters(checkpoint) * BYTES[weights]
        else:
            files = [file for name in ("*.safetensors", "*.gguf", "*_model.bin") for file in checkpoint.glob(name)]
            size = sum(file.stat().st_size for file in files)
        with ExitStack() as held:
            port = choose_ports(HOST, {key: 0}, held)[key]
            plan = launch(checkpoint, threads, port)
            target = Target(key, plan.protocol, f"http://{HOST}:{port}", "llama", plan.fields)
            environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), **plan.environment}
            with running(target, plan.command, environment, plan.ready_s) as pid:
                settings = {"threads": threads, "environment": environment}
                settings |= {"every request": plan.fields, "versions": plan.versions}
                yield Running(target, shown(plan.command, checkpoint), settings, pid, size / 2**20)

    return Server(key, title, weights, start, converted, stored)


def _versions(environment: Path, *names: str) -> dict[str, str]:
    packages = distributions(path=[str(folder) for folder in environment.glob("lib/python*/site-packages")])
    return {each.name: each.version for each in packages if each.name in names}
