"""Our server: the article's three configurations and the product in INT8, unquantized and in BF16.

A setting in the environment overrides the config, and an unsupported one falls back. So what was loaded is read from
the model's own lines in the log, for the results, and a server of other weights isn't measured:

"llama: loaded 33.1 MiB of weights: linear layers 57 in int8, exact INT8, …; everything else float32; on cpu"
"llama: decode steps: …, launched"
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from triton_local.server import LocalTriton
from triton_supervisor.triton import MODEL

from perf.checkpoint import DTYPES, unquantized
from perf.load.protocols import Protocol, Target
from perf.roofline.rates import Weights
from perf.servers.running import NotRunError, Running, Server
from perf.workload import MAX_OUTPUT, PROMPT_TOKENS

READY_TIMEOUT_S = 900.0
_LOADED = re.compile(r'^.*llama: (loaded ([\d,.]+) MiB of weights: linear layers (.*); everything else .*?)"?$', re.M)
_STEPS = re.compile(r'^.*llama: decode steps: (.*?)"?$', re.M)

UNDISTURBED = {"TRITON_STUCK_SECONDS": "0"}
"""The supervisor sends no probes of its own: only the load may reach the model. A death ends the measurement."""


def article_servers() -> list[Server]:
    """Return the product and the article's configurations, the slowest last: if the budget ends, the least is missing.

    On a CPU, which computes FP16 slower than FP32, the article's FP16 configurations have FP32 twins: they show what
    batching gains apart from what the number format loses.
    """
    whole, floats = {"LLAMA_QUANTIZATION": "none"}, {"LLAMA_DTYPE": "float32"}
    int8 = [
        our_server("inflight_int8", "in-flight INT8", "default", "int8"),
        our_server("batched_int8", "batched INT8", "batched_int8", "int8"),
    ]
    fp16 = [
        our_server("batched_fp16", "batched FP16", "batched_fp16", "fp16"),
        our_server("naive_fp16", "naive FP16", "naive_fp16", "fp16"),
    ]
    if unquantized() == "fp16":
        return [*int8, our_server("inflight_fp16", "in-flight FP16", "default", "fp16", whole), *fp16]
    bf16 = {**whole, "LLAMA_DTYPE": "bfloat16"}
    return [
        *int8,
        our_server("inflight_fp32", "in-flight FP32", "default", "fp32", whole),
        our_server("inflight_bf16", "in-flight BF16", "default", "bf16", bf16),
        our_server("batched_fp32", "batched FP32", "batched_fp16", "fp32", floats),
        our_server("naive_fp32", "naive FP32", "naive_fp16", "fp32", floats),
        *fp16,
    ]


def our_server(
    key: str,
    title: str,
    variant: str,
    weights: Weights,
    environment: Mapping[str, str] | None = None,
    fields: Mapping[str, object] | None = None,
    stored: str | None = None,
) -> Server:
    """Return our server of a config. weights: of the linear layers. environment: overrides the config's parameters.

    fields: of every request. stored: a quantized checkpoint's format, instead of `weights`.
    """
    # Most loads repeat their prompts: with a prefix cache the comparison would measure that.
    settings = {"LLAMA_PREFIX_CACHE": "off", **(environment or {})}
    if unquantized() == "fp16":
        # What the load needs: on a GPU the KV cache of 32 full contexts of a Llama-2-7B takes 64 GB.
        settings["LLAMA_MAX_MODEL_LEN"] = str(-(-(PROMPT_TOKENS + MAX_OUTPUT) // 256) * 256)
    loaded = weights if stored is None else None
    start = partial(_serving, key, variant, loaded, settings, fields or {})
    return Server(key, title, weights, start, stored=stored)


@contextmanager
def _serving(
    key: str,
    variant: str,
    weights: Weights | None,
    settings: Mapping[str, str],
    fields: Mapping[str, object],
    checkpoint: Path,
    threads: int,
) -> Iterator[Running]:
    """Run a fresh server during the block. Raises a LauncherError if it does not start, NotRunError of `read_back`."""
    environment = {"OMP_NUM_THREADS": str(threads), **settings}
    triton = LocalTriton(
        variant=variant,
        model=str(checkpoint),
        environment=environment | UNDISTURBED,
        ready_timeout=READY_TIMEOUT_S,
    )
    with triton:
        loaded, steps, weights_mib = read_back(triton.log_text(), weights)
        protocol: Protocol = "triton_stream" if variant == "streaming" else "triton_generate"
        target = Target(key, protocol, f"http://{triton.http_url}", MODEL, fields)
        facts = {"variant": variant, "environment": environment, "loaded": loaded, "decode_steps": steps}
        command = [*(f"{name}={value}" for name, value in environment.items()), "make", "serve", f"VARIANT={variant}"]
        yield Running(target, shlex.join(command), facts, triton.pid, weights_mib, triton)


def read_back(log: str, weights: Weights | None) -> tuple[str, str, float]:
    """Return from a server's log what was loaded, how decode steps are computed, and the weights' MiB.

    Raises NotRunError if the linear layers' weights are others (None: any will do), or of several instances.
    """
    loaded, steps = _LOADED.findall(log), _STEPS.findall(log)
    if len(loaded) != 1 or len(steps) != 1:
        raise NotRunError(
            f"the log has {len(loaded)} lines on loaded weights, not one; with several GPUs Triton runs an instance "
            "on each: CUDA_VISIBLE_DEVICES=0 leaves one"
        )
    ((line, mebibytes, linears),) = loaded
    dtypes = set(re.findall(r"\d+ in (\w+)", linears))
    if weights is None:
        return line, steps[0], float(mebibytes.replace(",", ""))
    # Beside INT8 the head may be unquantized.
    if DTYPES[weights] not in dtypes or (len(dtypes) > 1 and weights != "int8"):
        raise NotRunError(f"its linear layers are {', '.join(sorted(dtypes))}, not {DTYPES[weights]}")
    return line, steps[0], float(mebibytes.replace(",", ""))
