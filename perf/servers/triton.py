"""Our server: started for a measurement, and read back, so that results state what it really runs with.

Triton falls back silently to another config, and a setting in the environment overrides the config; so the config is
queried from the server, and what was loaded is parsed from the model's own lines in the log:

"llama: settings: model=…, quantization=int8, …"
"llama: loaded 33.1 MiB of weights: linear layers 57 in int8, outlier threshold 0, …; everything else float32; on cpu"
"llama: decode steps: …, launched"

The measured configurations are the article's three, and the product in INT8, unquantized and in BF16. Each states what
the running server must report, and is checked against it before it is measured.
"""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from triton_llama.status import ModelConfig, read_config
from triton_local.process import Supervised
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton

from perf.checkpoint import DTYPES, unquantized
from perf.load.protocols import Protocol, Target
from perf.roofline.rates import Weights
from perf.servers.running import Running
from perf.workload import MAX_OUTPUT, PROMPT_TOKENS

READY_TIMEOUT_S = 900.0
_CONFIG_TIMEOUT_S = 30.0
_LOADED = re.compile(r'llama: (loaded ([\d,.]+) MiB of weights: linear layers (.*); everything else (\w+); on \S+?)"?$')
_SETTINGS = re.compile(r'llama: settings: (.*?)"?$')
_STEPS = re.compile(r'llama: decode steps: (.*?)"?$')
# The log line of decode steps without a GPU's own kernels, of exact INT8 on a CPU, and on a GPU's fastest path.
_STOCK = r"(?!fused).*, launched"
_EXACT = r"(?!.*widened)exact INT8.*, launched"
_QUICK: Mapping[Weights, str] = {
    "int8": r"fused 8-bit product and attention, replayed as \d+ CUDA graphs",
    "fp16": r"fused attention, replayed as \d+ CUDA graphs",
}

local_triton = partial(LocalTriton, ready_timeout=READY_TIMEOUT_S, supervised=Supervised(stuck_after=None, restarts=0))
"""Returns a server to start. Its supervisor sends no probes of its own: only the load may reach the model. A death
ends the measurement."""


class UnknownLogError(Exception):
    """The log does not say what was loaded, or says it for several instances; `str()` is one line."""


class MismatchError(Exception):
    """The running server isn't the configuration to be measured; `str()` gives the differences."""


@dataclass(frozen=True)
class ReadBack:
    """What a server runs with. config: Triton's, of the model.

    dtypes: of the linear layers' weights; dtype: of everything else. settings: as parsed by the model. steps: how
    decode steps are computed. loaded: the model's own words on what was loaded.
    """

    config: ModelConfig
    weights_mib: float
    dtypes: frozenset[str]
    dtype: str
    settings: Mapping[str, str]
    steps: str
    loaded: str

    @classmethod
    def of(cls, config: ModelConfig, log: str) -> ReadBack:
        """Parse a server's log. Raises UnknownLogError unless each line is there exactly once."""
        line, mebibytes, linears, dtype = _only(_LOADED, log).groups()
        # A path may contain a comma; and it is specific to this machine, so it is left out.
        settings = dict(part.split("=", 1) for part in _only(_SETTINGS, log)[1].split(", ") if "=" in part)
        settings.pop("model", None)
        dtypes = frozenset(re.findall(r"\d+ in (\w+)", linears))
        return cls(config, float(mebibytes.replace(",", "")), dtypes, dtype, settings, _only(_STEPS, log)[1], line)

    def to_json(self) -> dict[str, object]:
        """Return it for a result's file."""
        return {
            "config": {name: value for name, value in asdict(self.config).items() if name != "backend"},
            "model_settings": dict(self.settings),
            "loaded": self.loaded,
            "decode_steps": self.steps,
        }


def read_back(server: LocalTriton) -> ReadBack:
    """Return what a ready server runs with. Raises UnknownLogError if its log does not say it."""
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/config"
    with urllib.request.urlopen(url, timeout=_CONFIG_TIMEOUT_S) as response:
        return ReadBack.of(read_config(json.load(response)), server.log_text())


def _only(pattern: re.Pattern[str], log: str) -> re.Match[str]:
    found = [match for line in log.splitlines() if (match := pattern.search(line))]
    if len(found) != 1:
        raise UnknownLogError(
            f"{len(found)} lines of the server's log match {pattern.pattern!r}, not one; with several GPUs Triton "
            "runs an instance on each: CUDA_VISIBLE_DEVICES=0 leaves one"
        )
    return found[0]


@dataclass(frozen=True)
class Configuration:
    """One configuration of our server.

    key: in results. variant: the config's name. weights: of the linear layers. environment: overrides the config's
    parameters. max_batch_size, dynamic_batching, scheduling: as the running server must report them. quick: whether its
    decode steps must be the engine's own kernels, replayed as CUDA graphs.
    """

    key: str
    title: str
    variant: str
    weights: Weights
    max_batch_size: int
    dynamic_batching: bool
    scheduling: str
    environment: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False

    @property
    def streams(self) -> bool:
        """Whether its config streams."""
        return self.variant == "streaming"

    def to_json(self) -> dict[str, object]:
        """Return the fields that name it in a measurement."""
        return {"server": self.key, "title": self.title, "family": "ours", "weights": self.weights.upper()}


@dataclass(frozen=True)
class Served(Running):
    """A running configuration, checked. triton: for the ports of gRPC and metrics."""

    triton: LocalTriton


def configurations() -> list[Configuration]:
    """Return all, in the order of the article and then the product.

    On a CPU, which computes FP16 slower than FP32, the article's FP16 configurations have FP32 twins: they show what
    batching gains apart from what the number format loses.
    """
    # What the setting dtype=auto selects.
    plain = unquantized()
    naive = Configuration("naive_fp16", "naive FP16", "naive_fp16", "fp16", 1, False, "batch")
    batched = Configuration("batched_fp16", "batched FP16", "batched_fp16", "fp16", 8, True, "batch")
    batched_int8 = Configuration("batched_int8", "batched INT8", "batched_int8", "int8", 8, True, "batch")
    int8 = Configuration("inflight_int8", "in-flight INT8", "default", "int8", 32, True, "inflight")
    environment, title = {"LLAMA_QUANTIZATION": "none"}, f"in-flight {plain.upper()}"
    whole = replace(int8, key=f"inflight_{plain}", title=title, weights=plain, environment=environment)
    if plain == "fp32":
        in_fp32, in_bf16 = ({"LLAMA_DTYPE": dtype} for dtype in ("float32", "bfloat16"))
        half = replace(whole, key="inflight_bf16", title="in-flight BF16", weights="bf16")
        half = replace(half, environment={**environment, **in_bf16})
        naive_fp32, batched_fp32 = (
            replace(one, key=f"{name}_fp32", title=f"{name} FP32", weights="fp32", environment=in_fp32)
            for name, one in (("naive", naive), ("batched", batched))
        )
        return [naive, naive_fp32, batched, batched_fp32, batched_int8, int8, whole, half]
    fastest = {"LLAMA_KERNELS": "fused", "LLAMA_CUDA_GRAPHS": "on"}
    quick = [
        replace(
            one,
            key=f"{one.key}_quick",
            title=f"{one.title}, fused kernels, CUDA graphs",
            environment={**one.environment, **fastest},
            quick=True,
        )
        for one in (int8, whole)
    ]
    # What the load needs: the KV cache of 32 full contexts of a Llama-2-7B takes 64 GB.
    context = {"LLAMA_MAX_MODEL_LEN": str(-(-(PROMPT_TOKENS + MAX_OUTPUT) // 256) * 256)}
    every = [naive, batched, batched_int8, int8, whole, *quick]
    return [replace(one, environment={**one.environment, **context}) for one in every]


@contextmanager
def serving(
    configuration: Configuration, checkpoint: Path, threads: int, left: float = READY_TIMEOUT_S
) -> Iterator[Served]:
    """Run a fresh server of the configuration, checked, during the block.

    left: upper bound for the seconds of its start. Raises a LauncherError if it does not start, MismatchError or
    UnknownLogError if it is not what it should be.
    """
    variant, environment = configuration.variant, {"OMP_NUM_THREADS": str(threads), **configuration.environment}
    timeout = min(left, READY_TIMEOUT_S)
    with local_triton(variant=variant, model=str(checkpoint), environment=environment, ready_timeout=timeout) as triton:
        runs = read_back(triton)
        check(configuration, runs)
        protocol: Protocol = "triton_stream" if configuration.streams else "triton_generate"
        target = Target(configuration.key, protocol, f"http://{triton.http_url}", MODEL_NAME)
        settings = {"variant": variant, "environment": environment, "checkpoint": checkpoint.name, **runs.to_json()}
        command = [*(f"{name}={value}" for name, value in environment.items()), "make", "serve", f"VARIANT={variant}"]
        yield Served(target, shlex.join(command), settings, triton.pid, runs.weights_mib, triton)


def check(configuration: Configuration, runs: ReadBack) -> None:
    """Raise MismatchError where the running server differs from the configuration."""
    config, quick = runs.config, configuration.quick
    # Beside INT8 the head may be unquantized.
    found = runs.dtypes - ({runs.dtype} if configuration.weights == "int8" else set())
    context = configuration.environment.get("LLAMA_MAX_MODEL_LEN", "None")
    expected: dict[str, tuple[object, object]] = {
        "max_batch_size": (configuration.max_batch_size, config.max_batch_size),
        "dynamic_batching": (configuration.dynamic_batching, config.dynamic_batching),
        "decoupled": (configuration.streams, config.decoupled),
        "scheduling": (configuration.scheduling, runs.settings.get("scheduling")),
        "max_model_len": (context, runs.settings.get("max_model_len", "None")),
        "the dtypes of linear layers": ([DTYPES[configuration.weights]], sorted(found)),
    }
    wrong = [f"{name} is {found}, not {wanted}" for name, (wanted, found) in expected.items() if wanted != found]
    if steps := _wrong_steps(configuration.weights, runs, quick):
        wrong.append(steps)
    if wrong:
        raise MismatchError(f"{configuration.key} is to be measured, but of the running server {'; '.join(wrong)}")


def _wrong_steps(weights: Weights, runs: ReadBack, quick: bool = False) -> str | None:
    """Return in words how the decode steps differ from what is to be measured; None if they don't.

    A setting alone proves nothing: an unsupported one falls back, with a line in the log. quick: as in `Configuration`.
    """
    if quick:
        wanted, pattern = "quick", _QUICK[weights]
    elif weights == "int8" and runs.loaded.endswith("on cpu"):
        wanted, pattern = "exact INT8", _EXACT
    else:
        wanted, pattern = "stock", _STOCK
    return None if re.fullmatch(pattern, runs.steps) else f"the decode steps are {runs.steps}, not {wanted} ones"
