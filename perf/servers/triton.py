"""Our server, in any config and settings.

A setting in the environment overrides the config, and an unsupported one falls back. So what was loaded is read from
the model's own lines in the log, for the results, and a server of other weights isn't measured:

"llama: loaded 33.1 MiB of weights: linear layers 57 in int8, exact INT8, …; everything else float32; on cpu"
"llama: decode steps: …, launched"
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType

from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.server import LocalTriton
from triton_supervisor.triton import MODEL

from perf.checkpoint import DTYPES, unquantized
from perf.load.protocols import Protocol, Target
from perf.load.workload import MEAN_OUTPUT, PROMPT_TOKENS
from perf.roofline import Weights
from perf.servers.running import HOST, NotRunError, Running, Server

READY_TIMEOUT_S = 900.0
GRACE_S = 10
_LOADED = re.compile(r'^.*llama: (loaded ([\d,.]+) MiB of weights: linear layers (.*); everything else .*?)"?$', re.M)
_STEPS = re.compile(r'^.*llama: decode steps: (.*?)"?$', re.M)

UNDISTURBED = {"TRITON_STUCK_SECONDS": "0"}
"""The supervisor sends no probes of its own: only the load may reach the model. A death ends the measurement."""


def our_server(
    key: str,
    title: str,
    variant: str,
    weights: Weights,
    environment: Mapping[str, str] = MappingProxyType({}),
    converted: str | None = None,
    stored: str | None = None,
    repository: Callable[[], AbstractContextManager[Path | None]] = nullcontext,
    chats: bool = False,
    same_answers: str | None = None,
) -> Server:
    """Return our server of a config. weights: of the linear layers. environment: overrides the config's parameters.

    converted, stored, same_answers: as of a Server. repository: makes the model repository, else it is the checkout's.
    chats: through the OpenAI endpoint.
    """
    # Most loads repeat their prompts: with a prefix cache the comparison would measure that.
    settings = {"LLAMA_PREFIX_CACHE": "off", "LLAMA_SPECULATION": "off", **environment}
    if unquantized() == "fp16":
        # What the load needs: on a GPU the KV cache of 32 full contexts of a Llama-2-7B takes 64 GB.
        settings["LLAMA_MAX_MODEL_LEN"] = str(-(-(PROMPT_TOKENS + 2 * MEAN_OUTPUT) // 256) * 256)

    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Running]:
        environment = {"OMP_NUM_THREADS": str(threads), **settings}
        with (
            repository() as folder,
            LocalTriton(
                variant=variant,
                model=str(checkpoint),
                model_repository=folder,
                environment=environment | UNDISTURBED,
                ready_timeout=READY_TIMEOUT_S,
            ) as triton,
            OpenAIEndpoint(HOST, 0, GRACE_S) as endpoint,
        ):
            loaded, steps, weights_mib = read_back(triton.log_text(), None if stored else weights)
            protocol: Protocol = "triton_stream" if variant == "streaming" else "triton_generate"
            target = Target(key, protocol, f"http://{triton.http_address}", MODEL)
            if chats:
                endpoint.start(triton.grpc_address)
                target = Target(key, "openai_chat", f"http://{endpoint.address}", endpoint.served_name)
            facts = {"variant": variant, "environment": environment, "loaded": loaded, "decode_steps": steps}
            values = (f"{name}={value}" for name, value in environment.items())
            command = shlex.join([*values, "make", "serve", f"VARIANT={variant}"])
            yield Running(target, command, facts, triton.pid, weights_mib, triton)

    return Server(key, title, weights, start, converted, stored, same_answers)


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
    # Beside INT8 the head may be unquantized.
    if weights is not None and (DTYPES[weights] not in dtypes or (len(dtypes) > 1 and weights != "int8")):
        raise NotRunError(f"its linear layers are {', '.join(sorted(dtypes))}, not {DTYPES[weights]}")
    return line, steps[0], float(mebibytes.replace(",", ""))
