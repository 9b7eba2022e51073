"""The server's resources (memory, file descriptors, threads, shared memory, VRAM) and its metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import httpx
import psutil
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton

from perf import environment, metrics
from perf.overhead.processes import ServerProcesses

SETTLED_WITHIN_S = 120.0
"""Without a client for so long, no request should have a slot."""

LEVELS = ("llama_slots_in_use", "llama_waiting_rows", "nv_inference_pending_request_count")
"""Metrics that are 0 when the server is idle."""

Readings = Mapping[metrics.Series, float]
"""The metrics endpoint's values, by name and labels."""

_TIMEOUT_S = 30.0
_POLL_S = 0.1
# The launcher names the Python backend's regions after the server's start.
_REGION = re.compile(r"/dev/shm/(triton_python_backend_shm_region_[0-9a-f]{12}_)")


def region_prefixes(triton: int) -> set[str]:
    """Return the prefixes of the names of a tritonserver's regions. Raises OSError if it has ended."""
    return set(_REGION.findall(Path(f"/proc/{triton}/maps").read_text()))


def regions(prefixes: Collection[str]) -> list[Path]:
    """Return the regions of shared memory with these prefixes."""
    return [region for prefix in prefixes for region in Path("/dev/shm").glob(f"{prefix}*")]


def of(processes: ServerProcesses, endpoint: int | None = None) -> dict[str, float]:
    """Return what a server takes, by the columns of a result file.

    shared_memory_mib: of the regions between its processes, including leaked ones. vram_mib: in use on the GPU by all
    processes; absent without CUDA. triton_*, model_*, endpoint_*: of tritonserver, of the models' processes together,
    of the OpenAI endpoint, absent without one; rss_mib is resident memory.

    Raises OSError or psutil.Error if a process has ended, CalledProcessError if nvidia-smi fails.
    """
    shared = regions(region_prefixes(processes.triton))
    found = {"shared_memory_mib": sum(region.stat().st_blocks * 512 for region in shared) / 2**20}
    if (vram := environment.vram_mib()) is not None:
        found["vram_mib"] = vram
    for name, pids in (("triton", [processes.triton]), ("model", processes.models), ("endpoint", [endpoint])):
        own = [psutil.Process(pid) for pid in pids if pid is not None]
        if own:
            found[f"{name}_rss_mib"] = sum(process.memory_info().rss for process in own) / 2**20
            found[f"{name}_descriptors"] = sum(process.num_fds() for process in own)
            found[f"{name}_threads"] = sum(process.num_threads() for process in own)
    return found


def read(server: LocalTriton) -> Readings:
    """Read the metrics endpoint. Raises OSError if it is gone."""
    return metrics.series(metrics.text(server.metrics_url))


def levels(now: Readings) -> dict[str, float]:
    """Return the metrics that are 0 when the server is idle."""
    return {name: metrics.total(now, name) for name in LEVELS}


def settled(server: LocalTriton) -> tuple[Readings, int]:
    """Wait until all earlier requests are counted and the server is idle; return its metrics, and the requests sent.

    The requests sent are invalid ones, one after the other. Returns after SETTLED_WITHIN_S in any case: rows that
    never end are for the caller to find.

    The model's metrics may be 0.2 s old and are passed on in an order: counters, gauges, histograms. So a request that
    is counted shows that everything passed on before it is complete, and nothing about what is passed on with it.
    """

    def refused(now: Readings) -> float:
        return metrics.total(now, "llama_requests_total", finish_reason="invalid")

    until = time.monotonic() + SETTLED_WITHIN_S
    sent = 0
    # What is passed on with the first request is complete when the second is counted: from then on the gauges are
    # later than the first. Once they are 0, what was passed on with them is complete when the third is counted.
    for idle in (False, True, False):
        before = refused(read(server))
        _send_invalid(server)
        sent += 1
        while refused(now := read(server)) <= before or (idle and any(levels(now).values())):
            if time.monotonic() > until:
                return now, sent
            time.sleep(_POLL_S)
    # One reading isn't of one moment either.
    return read(server), sent


def _send_invalid(server: LocalTriton) -> None:
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/generate"
    status = httpx.post(url, json={"text_input": "", "max_tokens": 1}, timeout=_TIMEOUT_S).status_code
    if status != 400:
        raise RuntimeError(f"an empty prompt was answered with {status}, not with 400")
