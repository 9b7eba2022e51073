"""Our server: started for a measurement, and read back, so that results state what it really runs with.

Triton falls back silently to another config, and a setting in the environment overrides the config; so the config is
queried from the server, and what was loaded is parsed from the model's own lines in the log:

"llama: settings: model=…, quantization=int8, …"
"llama: loaded 33.1 MiB of weights: linear layers 1 in float32, 56 in int8, outlier threshold 0; everything else
 float32; on cpu"
"llama: decode steps: stock kernels, launched"

The measured configurations are the article's three, and the product in INT8 and unquantized. Each states what the
running server must report, and is checked against it before it is measured.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from triton_llama.status import ModelConfig, read_config
from triton_local.process import Supervised
from triton_local.repository import DEFAULT_VARIANT, MODEL_NAME
from triton_local.server import LocalTriton

from perf.checkpoint import dtype, unquantized
from perf.load.protocols import Target
from perf.roofline.rates import Weights
from perf.servers.running import Running
from perf.workload import LONGEST_OUTPUT, PROMPT_TOKENS

READY_TIMEOUT_S = 900.0
_CONFIG_TIMEOUT_S = 30.0
_LOADED = re.compile(
    r'llama: (loaded ([\d,.]+) MiB of weights: linear layers (.*?); everything else (\w+); on \S+?)"?$'
)
_SETTINGS = re.compile(r'llama: settings: (.*?)"?$')
_STEPS = re.compile(r'llama: decode steps: (.*?)"?$')
_STOCK = r"(stock kernels|on the CPU), launched"
# The log line of decode steps on the fastest path.
_QUICK: Mapping[Weights, str] = {
    "int8": r"fused 8-bit product and attention, replayed as \d+ CUDA graphs",
    "fp16": r"fused attention, replayed as \d+ CUDA graphs",
}


def local_triton(
    variant: str = DEFAULT_VARIANT,
    model: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    ready_timeout: float = READY_TIMEOUT_S,
    model_repository: Path | None = None,
    on_log_line: Callable[[str], None] | None = None,
) -> LocalTriton:
    """Return a server to start. Its supervisor sends no probes of its own: only the load may reach the model."""
    return LocalTriton(
        variant=variant,
        model=None if model is None else str(model),
        environment=environment,
        ready_timeout=ready_timeout,
        model_repository=model_repository,
        on_log_line=on_log_line,
        supervised=Supervised(stuck_after=None),
    )


class UnknownLogError(Exception):
    """The log does not say what was loaded, or says it for several instances; `str()` is one line."""


@dataclass(frozen=True)
class Loaded:
    """What the model has loaded. dtypes: of the linear layers' weights; dtype: of everything else.

    settings: as parsed by it. steps: how decode steps are computed. line: the model's own words on what was loaded.
    """

    weights_mib: float
    dtypes: frozenset[str]
    dtype: str
    settings: Mapping[str, str]
    steps: str
    line: str

    @classmethod
    def of(cls, log: str) -> Loaded:
        """Parse a server's log. Raises UnknownLogError unless each line is there exactly once."""
        line, mebibytes, linears, dtype = _only(_LOADED, log).groups()
        # A path may contain a comma; and it is specific to this machine, so it is left out.
        settings = dict(part.split("=", 1) for part in _only(_SETTINGS, log)[1].split(", ") if "=" in part)
        settings.pop("model", None)
        dtypes = frozenset(re.findall(r"\d+ in (\w+)", linears))
        return cls(float(mebibytes.replace(",", "")), dtypes, dtype, settings, _only(_STEPS, log)[1], line)


@dataclass(frozen=True)
class ReadBack:
    """config: Triton's, of the model. loaded: what the model has loaded, and its settings."""

    config: ModelConfig
    loaded: Loaded

    def to_json(self) -> dict[str, object]:
        """Return it for a result's file."""
        return {
            "config": {name: value for name, value in asdict(self.config).items() if name != "backend"},
            "model_settings": dict(self.loaded.settings),
            "loaded": self.loaded.line,
            "decode_steps": self.loaded.steps,
        }


def read_back(server: LocalTriton) -> ReadBack:
    """Return what a ready server runs with. Raises UnknownLogError if its log does not say it."""
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/config"
    with urllib.request.urlopen(url, timeout=_CONFIG_TIMEOUT_S) as response:
        return ReadBack(read_config(json.load(response)), Loaded.of(server.log_text()))


def _only(pattern: re.Pattern[str], log: str) -> re.Match[str]:
    found = [match for line in log.splitlines() if (match := pattern.search(line))]
    if len(found) != 1:
        raise UnknownLogError(
            f"{len(found)} lines of the server's log match {pattern.pattern!r}, not one; with several GPUs Triton "
            "runs an instance on each: CUDA_VISIBLE_DEVICES=0 leaves one"
        )
    return found[0]


class MismatchError(Exception):
    """The running server isn't the configuration to be measured; `str()` gives the differences."""


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
    environment: dict[str, str] = {"LLAMA_QUANTIZATION": "none"}
    title = f"in-flight {plain.upper()}"
    whole = replace(int8, key=f"inflight_{plain}", title=title, weights=plain, environment=environment)
    if plain == "fp32":
        return [naive, _in_fp32(naive), batched, _in_fp32(batched), batched_int8, int8, whole]
    every = [naive, batched, batched_int8, int8, whole, _quick(int8), _quick(whole)]
    # What the load needs: the KV cache of 32 full contexts of a Llama-2-7B takes 64 GB.
    context = {"LLAMA_MAX_MODEL_LEN": str(-(-(PROMPT_TOKENS + LONGEST_OUTPUT) // 256) * 256)}
    return [replace(one, environment={**one.environment, **context}) for one in every]


@contextmanager
def serving(
    configuration: Configuration, checkpoint: Path, threads: int, left: float = READY_TIMEOUT_S
) -> Iterator[Served]:
    """Run a fresh server of the configuration, checked, during the block.

    left: upper bound for the seconds of its start. Raises a LauncherError if it does not start, MismatchError or
    UnknownLogError if it is not what it should be.
    """
    environment = {"OMP_NUM_THREADS": str(threads), **configuration.environment}
    with local_triton(configuration.variant, checkpoint, environment, min(left, READY_TIMEOUT_S)) as triton:
        runs = read_back(triton)
        check(configuration, runs)
        target = Target(configuration.key, "triton_generate", f"http://{triton.http_url}", MODEL_NAME)
        settings = {"variant": configuration.variant, "environment": environment, "checkpoint": checkpoint.name}
        command = f"make serve VARIANT={configuration.variant}"
        yield Served(target, command, {**settings, **runs.to_json()}, triton.pid, runs.loaded.weights_mib, triton)


def check(configuration: Configuration, runs: ReadBack) -> None:
    """Raise MismatchError where the running server differs from the configuration."""
    config, facts = runs.config, runs.loaded
    # In INT8 the head is unquantized, so there are linear layers of two dtypes.
    kinds = {dtype(configuration.weights)} | ({facts.dtype} if configuration.weights == "int8" else set())
    expected: dict[str, tuple[object, object]] = {
        "max_batch_size": (configuration.max_batch_size, config.max_batch_size),
        "dynamic_batching": (configuration.dynamic_batching, config.dynamic_batching),
        "decoupled": (False, config.decoupled),
        "scheduling": (configuration.scheduling, facts.settings.get("scheduling")),
        "max_model_len": (
            configuration.environment.get("LLAMA_MAX_MODEL_LEN", "None"),
            facts.settings.get("max_model_len", "None"),
        ),
        "the dtypes of linear layers": (sorted(kinds), sorted(facts.dtypes)),
    }
    wrong = [f"{name} is {found}, not {wanted}" for name, (wanted, found) in expected.items() if wanted != found]
    # A setting alone proves nothing: an unsupported one falls back, with a line in the log.
    quick = configuration.quick
    if re.fullmatch(_QUICK[configuration.weights] if quick else _STOCK, facts.steps) is None:
        wrong.append(f"the decode steps are {facts.steps}, not {'quick' if quick else 'stock'} ones")
    if wrong:
        raise MismatchError(f"{configuration.key} is to be measured, but of the running server {'; '.join(wrong)}")


def _quick(configuration: Configuration) -> Configuration:
    return replace(
        configuration,
        key=f"{configuration.key}_quick",
        title=f"{configuration.title}, fused kernels, CUDA graphs",
        environment={**configuration.environment, "LLAMA_KERNELS": "fused", "LLAMA_CUDA_GRAPHS": "on"},
        quick=True,
    )


def _in_fp32(configuration: Configuration) -> Configuration:
    return replace(
        configuration,
        key=configuration.key.replace("fp16", "fp32"),
        title=configuration.title.replace("FP16", "FP32"),
        weights="fp32",
        environment={"LLAMA_DTYPE": "float32"},
    )
