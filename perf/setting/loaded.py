"""What the model says of itself in the server's log: its settings, and what it has loaded, read back from the weights.

"llama: settings: model=…, quantization=int8, …"
"llama: loaded 33.1 MiB of weights: linear layers 1 in float32, 56 in int8, outlier threshold 0; everything else
 float32; on cpu"
"llama: decode steps: stock kernels, launched"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LOADED = re.compile(
    r'llama: (loaded ([\d,.]+) MiB of weights: linear layers (.*?); everything else (\w+); on (\S+?))"?'
)
_SETTINGS = re.compile(r'llama: settings: (.*?)"?')
_STEPS = re.compile(r'llama: decode steps: (.*?)"?')
_LINEARS = re.compile(r"(\d+) in (\w+)")


class UnknownLogError(Exception):
    """The log doesn't say what was loaded, or says it of several instances; `str()` is one line."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded. linears: number of linear layers by their weights' dtype. settings: as the model took them.

    steps: how decode steps are computed. line: the model's own words on what was loaded.
    """

    weights_mib: float
    linears: Mapping[str, int]
    dtype: str
    device: str
    settings: Mapping[str, str]
    steps: str
    line: str


def read(log: str) -> Loaded:
    """Read it out of a server's log. Raises UnknownLogError unless it is in there exactly once."""
    facts = _only(_LOADED, log)
    # A path may have a comma in it; and it is this machine's own, so it goes nowhere.
    settings = dict(part.split("=", 1) for part in _only(_SETTINGS, log)[1].split(", ") if "=" in part)
    return Loaded(
        weights_mib=float(facts[2].replace(",", "")),
        linears={kind: int(count) for count, kind in _LINEARS.findall(facts[3])},
        dtype=facts[4],
        device=facts[5],
        settings={name: value for name, value in settings.items() if name != "model"},
        steps=_only(_STEPS, log)[1],
        line=facts[1],
    )


def _only(pattern: re.Pattern[str], log: str) -> re.Match[str]:
    found = [match for line in log.splitlines() if (match := re.search(pattern.pattern + "$", line))]
    if len(found) != 1:
        raise UnknownLogError(
            f"{len(found)} lines of the server's log match {pattern.pattern!r}, not one; with several GPUs Triton "
            "runs an instance on each: CUDA_VISIBLE_DEVICES=0 leaves one"
        )
    return found[0]
