"""vLLM as a contestant, from an environment of its own (`vllm_environment.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig

from perf import checkpoint as weights
from perf.load.protocols import Target
from perf.peers import vllm_environment
from perf.peers.contestant import Contestant, Started
from perf.peers.process import HOST, free_port, running, shown

# As many rows as ours has slots.
_ROWS = 32
# It compiles itself before it listens.
_READY_S = 400.0


def contestant() -> Contestant:
    """Return it, unquantized."""
    return Contestant("vllm", "vLLM", "peer", weights.unquantized(), _start)


@contextmanager
def _start(checkpoint: Path, threads: int) -> Iterator[Started]:
    versions, kept = vllm_environment.installed(), weights.unquantized()
    with free_port() as port:
        fields = {"ignore_eos": True, "repetition_penalty": 1.0}
        target = Target("vllm", "openai_completions", f"http://{HOST}:{port}", "llama", fields)
        # The command `vllm` looks for a distribution of that name, which is another one on a CPU.
        command = [str(vllm_environment.interpreter()), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(checkpoint), "--served-model-name", "llama", "--dtype", weights.dtype(kept)]
        command += ["--max-model-len", str(_longest(checkpoint)), "--max-num-seqs", str(_ROWS)]
        # The load's prompts are the same ones again and again: finding them in the cache would be the load's merit.
        command += ["--no-enable-prefix-caching", "--generation-config", "vllm", "--disable-uvicorn-access-log"]
        command += ["--host", HOST, "--port", str(port)]
        ours = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            **_processor(checkpoint, threads),
        }
        with running(target, command, ours, _READY_S) as process:
            settings = {
                "threads": threads,
                "dtype": weights.dtype(kept),
                "environment": _processor(checkpoint, threads),
                "every request": fields,
                "versions": versions,
            }
            yield Started(
                target, shown(command, checkpoint), settings, process.pid, weights.mebibytes(checkpoint, kept)
            )


def _processor(checkpoint: Path, threads: int) -> dict[str, str]:
    """Return what says how much of the processor and of its memory it may take; nothing where it has a GPU."""
    if torch.cuda.is_available():
        return {}
    config = AutoConfig.from_pretrained(checkpoint)
    # Of one position, keys and values, in FP32; as many rows as ours has slots, each as long as the model allows.
    position = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    gibibytes = -(-_ROWS * config.max_position_embeddings * position // 2**30)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(gibibytes),
    }


def _longest(checkpoint: Path) -> int:
    longest: int = AutoConfig.from_pretrained(checkpoint).max_position_embeddings
    return longest
