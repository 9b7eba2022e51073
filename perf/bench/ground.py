"""What every run stands on: a checkpoint that is long enough, its description, and the device's rates."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from perf.limit import device
from perf.limit.rates import DeviceRates
from perf.setting import workload
from perf.setting.checkpoint import FOLDER
from perf.setting.results import Results


def check_context(checkpoint: Path) -> None:
    """End the program if the workload's longest request doesn't fit into the checkpoint's positions."""
    positions = LlamaConfig.from_pretrained(checkpoint).max_position_embeddings
    needed = workload.PROMPT_TOKENS + workload.LONGEST_OUTPUT
    if positions < needed:
        sys.exit(
            f"bench: {checkpoint} has {positions} positions; prompts of {workload.PROMPT_TOKENS} tokens and answers of "
            f"up to {workload.LONGEST_OUTPUT} need {needed}"
        )


def described(checkpoint: Path) -> str:
    """Return the checkpoint in a few words."""
    config = LlamaConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    random = ", random weights" if checkpoint.is_relative_to(FOLDER) else ""
    return f"Llama of {count / 1e6:,.1f} million parameters ({checkpoint.name}{random})"


def rates(results: Results, threads: int, seconds: float = device.SECONDS) -> DeviceRates:
    """Return the device's rates, measured once a file; seconds: for each single measurement."""
    found = results.get("rates")
    if found is not None:
        return DeviceRates.from_json(found)  # type: ignore[arg-type]  # as `to_json` has written it
    measured = device.measure(threads, seconds)
    results.section("rates", measured.to_json())
    return measured
