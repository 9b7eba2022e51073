"""The load of one Triton, read from its metrics page in the background while someone asks for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from triton_llama.metrics_page import NoMetricsError, Sample, read_samples

LOG = logging.getLogger("triton_llama_openai")
_INTERVAL_S = 0.1
"""Between two reads of the page, on which the model's values are up to 0.2 s old."""
_MAX_AGE_S = 0.3
"""Age of the last read, beyond which its values don't count; also the timeout of a read."""
_WANTED_S = 180.0
"""Seconds after the last question in which the page is read: Prometheus asks once a minute by default."""
_PENDING = "nv_inference_pending_request_count"
PAGE_SIZES = {"cpu": 16, "cuda": 256}
"""Tokens in a page of the model's KV cache, by device."""


class TritonLoad(NamedTuple):
    """What a model has to do at one Triton, and the counts of what it has done since its start.

    waiting: requests without a slot, those in Triton's queue included. running: sequences with one. used_pages,
    cached_pages: of the KV cache's pages, those that sequences hold, and those with a prefix that none uses. page_size:
    tokens in a page. generated: tokens. queried, hit: prompt tokens looked up, and found, in the prefix cache. guessed,
    accepted: draft tokens.
    """

    waiting: int
    running: int
    slots: int
    used_pages: int
    cached_pages: int
    pages: int
    page_size: int
    generated: int = 0
    queried: int = 0
    hit: int = 0
    guessed: int = 0
    accepted: int = 0


class TritonLoadReader:
    """Reads the load of one Triton. address: HOST:PORT of its metrics. model: its name there."""

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
        self._latest: tuple[float, TritonLoad] | None = None
        self._failed = False
        self._asked_at = 0.0
        # A thread of its own: a page that doesn't answer delays nothing else.
        self._reader: threading.Thread | None = None
        self._closed = threading.Event()

    def load(self) -> TritonLoad | None:
        """Return the load from memory, at most 0.5 s old; None without one.

        The first call in a while has none yet, and starts the reads.
        """
        self._asked_at = time.monotonic()
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read_on, name="metrics page", daemon=True)
            self._reader.start()
        if self._latest is None:
            return None
        read_at, load = self._latest
        return load if self._asked_at <= read_at + _MAX_AGE_S else None

    def close(self) -> None:
        """End the reads."""
        self._closed.set()

    def _read_on(self) -> None:
        while time.monotonic() <= self._asked_at + _WANTED_S:
            began = time.monotonic()
            try:
                self._latest = began, triton_load(read_samples(self._address, self._model, _MAX_AGE_S))
                self._failed = False
            except (NoMetricsError, LookupError, ValueError) as error:
                # The server may end with the endpoint, while this thread reads its page.
                if not self._failed and not self._closed.is_set():
                    LOG.warning("the vllm: gauges of /metrics lack a Triton: %s", error)
                self._failed = True
            if self._closed.wait(_INTERVAL_S):
                return


def triton_load(samples: Sequence[Sample]) -> TritonLoad:
    """Return the load of all instances of a model. samples: its own."""
    totals = defaultdict[tuple[str, str], float](float)
    for name, labels, value in samples:
        for state in {"", labels.get("state", "")}:
            totals[name, state] += value

    def total(name: str, state: str = "") -> int:
        return int(totals[name, state])

    return TritonLoad(
        # Triton's queue, and what its batcher has handed over.
        waiting=total(_PENDING) + total("llama_waiting_requests"),
        running=total("llama_slots_in_use"),
        slots=total("llama_slots"),
        used_pages=total("llama_kv_cache_pages", "used"),
        cached_pages=total("llama_kv_cache_pages", "cached"),
        pages=total("llama_kv_cache_pages"),
        page_size=next(PAGE_SIZES[labels["device"]] for name, labels, _ in samples if name == "llama_model_info"),
        generated=total("llama_generated_tokens_total"),
        queried=total("llama_prefix_cache_queries_total"),
        hit=total("llama_prefix_cache_hits_total"),
        guessed=total("llama_draft_tokens_total"),
        accepted=total("llama_accepted_draft_tokens_total"),
    )
