"""Everyone who takes part, in the order of the tables."""

from __future__ import annotations

from perf.peers import articles, ours, transformers_serve, vllm_server
from perf.peers.contestant import Contestant


def lineup() -> list[Contestant]:
    """Return ours and the peers; which formats they have depends on whether there is a GPU."""
    return [*ours.contestants(), *articles.contestants(), transformers_serve.contestant(), vllm_server.contestant()]


def contestant(key: str) -> Contestant:
    """Return the one of that key. Raises ValueError with the list of known ones."""
    known = {one.key: one for one in lineup()}
    if key not in known:
        raise ValueError(f"unknown contestant {key!r}: known are {', '.join(known)}")
    return known[key]
