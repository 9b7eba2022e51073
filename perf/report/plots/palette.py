"""A colour and a marker for every server, the same in all plots.

The colours are Okabe and Ito's, which stay apart under the common kinds of colour blindness; the markers tell the
lines apart in black and white. What is meant to be compared across plots (our INT8 default, the baselines) keeps its
colour from the article's servers to the peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLUE, GREEN, VERMILION, PURPLE, ORANGE, SKY, GREY = (
    "#0072b2",
    "#009e73",
    "#d55e00",
    "#b35a8d",  # a little darker than the original: it is a text's colour too
    "#b87f00",  # likewise
    "#3a8fc4",  # likewise
    "#666666",
)
INK, FAINT = "#222222", "#d8d8d8"


@dataclass(frozen=True)
class Look:
    """How a server is drawn."""

    colour: str
    marker: str


_KNOWN = {
    "inflight_int8": Look(BLUE, "o"),
    "triton_llama_int8": Look(BLUE, "o"),
    "inflight_fp32": Look(GREEN, "s"),
    "triton_llama_fp32": Look(GREEN, "s"),
    "batched_int8": Look(VERMILION, "^"),
    "batching_fastapi": Look(VERMILION, "^"),
    "batched_fp16": Look(PURPLE, "v"),
    "transformers_serve": Look(PURPLE, "v"),
    "naive_fp16": Look(GREY, "D"),
    "naive_fastapi": Look(GREY, "D"),
    "vllm": Look(ORANGE, "P"),
}
_OTHERS = (Look(SKY, "X"), Look(INK, "*"), Look(ORANGE, "h"))


def looks(servers: Sequence[str]) -> dict[str, Look]:
    """Return every server's look; ones that aren't known by name share three, in their order."""
    others = [server for server in dict.fromkeys(servers) if server not in _KNOWN]
    return {server: _KNOWN.get(server) or _OTHERS[others.index(server) % len(_OTHERS)] for server in servers}
