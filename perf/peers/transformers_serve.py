"""`transformers serve` with continuous batching as a contestant.

Greedy decoding is set by its first request: continuous batching there has one sampling setup for the whole server.
It has no way to say "no end token" but through a generation config of the request's own, so each request brings one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from transformers import AutoConfig

from perf import checkpoint as weights
from perf.load.protocols import Target
from perf.peers.contestant import Contestant, Started
from perf.peers.process import HOST, free_port, running, shown

# Its default. A prompt of the load is shorter than a page, so none of its pages is shared with another request's.
_PAGE = 256
# As many rows as ours has slots, each as long as the model allows: the same memory for the cache.
_ROWS = 32
# Without flash kernels its attention compares every token of a pass with all cached ones and all of the pass, whosever
# they are. On two cores 2048 took a tenth less processor time than its default of 8192; 1024 was level, 256 far behind.
_PASS = 2048
_READY_S = 180.0


def contestant() -> Contestant:
    """Return it, unquantized."""
    return Contestant("transformers_serve", "transformers serve", "peer", weights.unquantized(), _start)


@contextmanager
def _start(checkpoint: Path, threads: int) -> Iterator[Started]:
    kept = weights.unquantized()
    with free_port() as port:
        fields = {"generation_config": json.dumps({"do_sample": False, "eos_token_id": None})}
        target = Target("transformers_serve", "openai_completions", f"http://{HOST}:{port}", str(checkpoint), fields)
        command = [str(Path(sys.executable).with_name("transformers")), "serve", str(checkpoint)]
        command += ["--continuous-batching", "--dtype", weights.dtype(kept), "--attn-implementation", "sdpa"]
        command += ["--cb-block-size", str(_PAGE), "--cb-num-blocks", str(_blocks(checkpoint))]
        command += ["--cb-max-batch-tokens", str(_PASS)]
        command += ["--host", HOST, "--port", str(port), "--log-level", "error"]
        environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with running(target, command, environment, _READY_S) as process:
            settings = {
                "threads": threads,
                "dtype": weights.dtype(kept),
                "every request": fields,
                "versions": {name: version(name) for name in ("transformers", "torch")},
            }
            yield Started(
                target, shown(command, checkpoint), settings, process.pid, weights.mebibytes(checkpoint, kept)
            )


def _blocks(checkpoint: Path) -> int:
    longest: int = AutoConfig.from_pretrained(checkpoint).max_position_embeddings
    return _ROWS * -(-longest // _PAGE)
