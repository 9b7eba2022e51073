"""The measured configurations of our server: the article's three, and the product in INT8 and unquantized.

Each states what the running server must report, and is checked against it before it is measured: Triton falls back
silently to another config, and a setting in the environment overrides the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from triton_local.server import LocalTriton

from perf.checkpoint import dtype, unquantized
from perf.roofline.rates import Weights
from perf.servers.triton import READY_TIMEOUT_S, ReadBack, local_triton, read_back
from perf.workload import LONGEST_OUTPUT, PROMPT_TOKENS

_STOCK = r"(stock kernels|on the CPU), launched"
# The log line of decode steps on the fastest path.
_QUICK: Mapping[Weights, str] = {
    "int8": r"fused 8-bit product and attention, replayed as \d+ CUDA graphs",
    "fp16": r"fused attention, replayed as \d+ CUDA graphs",
}


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
class Served:
    """A running configuration, and what it reports. threads: for its matrix products, on a CPU."""

    configuration: Configuration
    server: LocalTriton
    checkpoint: Path
    threads: int
    runs: ReadBack

    def settings(self) -> dict[str, object]:
        """Return the settings read back from it, for a result's file."""
        return {
            "variant": self.configuration.variant,
            "environment": {"OMP_NUM_THREADS": str(self.threads), **self.configuration.environment},
            "checkpoint": self.checkpoint.name,
            **self.runs.to_json(),
        }


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
    unquantized_product = replace(
        int8,
        key=f"inflight_{plain}",
        title=f"in-flight {plain.upper()}",
        weights=plain,
        environment={"LLAMA_QUANTIZATION": "none"},
    )
    ours = [int8, unquantized_product]
    if plain == "fp16":
        return [_on_a_gpu(one) for one in [naive, batched, batched_int8, *ours, *map(_quick, ours)]]
    return [naive, _in_fp32(naive), batched, _in_fp32(batched), batched_int8, *ours]


@contextmanager
def serving(
    configuration: Configuration, checkpoint: Path, threads: int, left: float = READY_TIMEOUT_S
) -> Iterator[Served]:
    """Run a fresh server of the configuration, checked, during the block.

    left: upper bound for the seconds of its start. Raises a LauncherError if it does not start, MismatchError or
    UnknownLogError if it is not what it should be.
    """
    environment = {"OMP_NUM_THREADS": str(threads), **configuration.environment}
    with local_triton(configuration.variant, checkpoint, environment, min(left, READY_TIMEOUT_S)) as server:
        runs = read_back(server)
        check(configuration, runs)
        yield Served(configuration, server, checkpoint, threads, runs)


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
        "the dtypes of linear layers": (sorted(kinds), sorted(facts.linears)),
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


def _on_a_gpu(configuration: Configuration) -> Configuration:
    """Limit the context to what the load needs: the KV cache of 32 full contexts of a Llama-2-7B takes 64 GB."""
    context = -(-(PROMPT_TOKENS + LONGEST_OUTPUT) // 256) * 256
    return replace(configuration, environment={**configuration.environment, "LLAMA_MAX_MODEL_LEN": str(context)})


def _in_fp32(configuration: Configuration) -> Configuration:
    return replace(
        configuration,
        key=configuration.key.replace("fp16", "fp32"),
        title=configuration.title.replace("FP16", "FP32"),
        weights="fp32",
        environment={"LLAMA_DTYPE": "float32"},
    )
