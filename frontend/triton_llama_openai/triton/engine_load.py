"""The engine's load at one Triton, read from its metrics page in the background while someone asks for it."""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from triton_llama_openai.metrics import EngineLoad

LOG = logging.getLogger("triton_llama_openai")
_INTERVAL_S = 0.1
"""Between two reads of the page, on which the engine's values are up to 0.2 s old."""
_MAX_AGE_S = 0.3
"""Age of the last read, beyond which its values don't count; also the timeout of a read."""
_WANTED_S = 180.0
"""Seconds after the last question in which the page is read: Prometheus asks once a minute by default."""
_PENDING = "nv_inference_pending_request_count"
_NAMES = (
    "llama_waiting_requests",
    "llama_slots",
    "llama_kv_cache_pages",
    "llama_model_info",
    "llama_generated_tokens",
    "llama_prefix_cache",
    "llama_draft_tokens",
    "llama_accepted_draft_tokens",
    _PENDING,
)
"""Beginnings of the names of the metrics that are read."""
PAGE_SIZES = {"cpu": 16, "cuda": 256}
"""Tokens in a page of the engine's KV cache, by device."""

# Without the environment's proxies, as for gRPC's address.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class MetricsPage:
    """Triton's metrics page. address: HOST:PORT. model: its name in Triton."""

    def __init__(self, address: str, model: str) -> None:
        self._url = f"http://{address}/metrics"
        self._model = model
        self._latest: tuple[float, EngineLoad] | None = None
        self._failed = False
        self._asked_at = 0.0
        # A thread of its own: a page that doesn't answer delays nothing else.
        self._reader: threading.Thread | None = None
        self._closed = threading.Event()

    def load(self) -> EngineLoad | None:
        """Return the engine's load from memory, at most 0.5 s old; None without one.

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
                self._latest = began, engine_load(read_page(self._url, _MAX_AGE_S), self._model)
                self._failed = False
            except (OSError, HTTPException, LookupError, ValueError) as error:
                # The server may end with the endpoint, while this thread reads its page.
                if not self._failed and not self._closed.is_set():
                    LOG.warning(
                        "the vllm: gauges of /metrics are without %s, which can't be read: %s", self._url, error
                    )
                self._failed = True
            if self._closed.wait(_INTERVAL_S):
                return


def read_page(url: str, timeout: float) -> str:
    """Return a metrics page. Raises OSError, HTTPException or ValueError if it can't be read in `timeout` seconds."""
    with _OPENER.open(url, timeout=timeout) as response:
        return str(response.read().decode())


def engine_load(page: str, model: str) -> EngineLoad:
    """Return the load of all instances of a model. Raises ValueError if the page has none."""
    lines = "\n".join(line for line in page.splitlines() if line.startswith(_NAMES))
    samples = [
        sample
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
        if sample.labels.get("model") == model
    ]

    def total(name: str, state: str | None = None) -> int:
        return int(sum(s.value for s in samples if s.name == name and state in (None, s.labels.get("state"))))

    devices = [sample.labels["device"] for sample in samples if sample.name == "llama_model_info"]
    if not devices:
        raise ValueError(f"it has no metrics of the model {model}")
    return EngineLoad(
        # Triton's queue, and what its batcher has handed over.
        waiting=total(_PENDING) + total("llama_waiting_requests"),
        running=total("llama_slots_in_use"),
        slots=total("llama_slots"),
        used_pages=total("llama_kv_cache_pages", "used"),
        cached_pages=total("llama_kv_cache_pages", "cached"),
        pages=total("llama_kv_cache_pages"),
        page_size=PAGE_SIZES[devices[0]],
        generated=total("llama_generated_tokens_total"),
        queried=total("llama_prefix_cache_queries_total"),
        hit=total("llama_prefix_cache_hits_total"),
        guessed=total("llama_draft_tokens_total"),
        accepted=total("llama_accepted_draft_tokens_total"),
    )
