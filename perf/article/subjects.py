"""What is measured: the article's three configurations, and the product in INT8 and unquantized.

Knows what each must turn out to be once it runs, and nothing about running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from perf import checkpoint as weights
from perf.roofline.rates import Weights
from perf.workload import LONGEST_OUTPUT, PROMPT_TOKENS


@dataclass(frozen=True)
class Subject:
    """One configuration of our server.

    key: in results. variant: the config's name. weights: of the linear layers. environment: over the config's own
    parameters. max_batch_size, dynamic_batching, scheduling: as the running server must have them. quick: whether its
    decode steps are to be the engine's own kernels, replayed as CUDA graphs.
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
        """Return what names it in a measurement."""
        return {"server": self.key, "title": self.title, "family": "ours", "weights": self.weights.upper()}

    @property
    def linears(self) -> str:
        """The dtype of the linear layers as PyTorch calls it; in INT8 the head has another one."""
        return weights.dtype(self.weights)


def subjects() -> list[Subject]:
    """Return all, in the order of the article and then the product.

    On a CPU, which computes 16 bits slower than 32, the article's FP16 has twins in FP32: what batching gains is to be
    seen without what the number format loses.
    """
    # What the setting dtype=auto comes to.
    plain = weights.unquantized()
    naive = Subject("naive_fp16", "naive FP16", "naive_fp16", "fp16", 1, False, "batch")
    batched = Subject("batched_fp16", "batched FP16", "batched_fp16", "fp16", 8, True, "batch")
    ours = [
        Subject("inflight_int8", "in-flight INT8", "default", "int8", 32, True, "inflight"),
        Subject(
            f"inflight_{plain}",
            f"in-flight {plain.upper()}",
            "default",
            plain,
            32,
            True,
            "inflight",
            {"LLAMA_QUANTIZATION": "none"},
        ),
    ]
    found = [
        naive,
        *([] if plain == "fp16" else [_in_fp32(naive)]),
        batched,
        *([] if plain == "fp16" else [_in_fp32(batched)]),
        Subject("batched_int8", "batched INT8", "batched_int8", "int8", 8, True, "batch"),
        *ours,
    ]
    # On a CPU there is neither a GPU's kernels nor a cache of 64 GB to be avoided.
    return [_on_a_gpu(subject) for subject in [*found, *map(_quick, ours)]] if plain == "fp16" else found


def _quick(subject: Subject) -> Subject:
    return replace(
        subject,
        key=f"{subject.key}_quick",
        title=f"{subject.title}, fused kernels, CUDA graphs",
        environment={**subject.environment, "LLAMA_KERNELS": "fused", "LLAMA_CUDA_GRAPHS": "on"},
        quick=True,
    )


def _on_a_gpu(subject: Subject) -> Subject:
    """Return it with a context as long as the load needs: 32 slots of a Llama-2-7B's whole one are 64 GB of cache."""
    context = -(-(PROMPT_TOKENS + LONGEST_OUTPUT) // 256) * 256
    return replace(subject, environment={**subject.environment, "LLAMA_MAX_MODEL_LEN": str(context)})


def _in_fp32(subject: Subject) -> Subject:
    return replace(
        subject,
        key=subject.key.replace("fp16", "fp32"),
        title=subject.title.replace("FP16", "FP32"),
        weights="fp32",
        environment={"LLAMA_DTYPE": "float32"},
    )
