"""The ways to stop a server, or its model. Each begins one and waits until it is over."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import httpx
from server.metrics import PENDING
from server.servers import HTTP
from server.stops.hosts import Bare, Launcher, Supervisor
from server.stops.scene import CellError
from triton_supervisor.process import adopt_orphans

from perf import metrics

STOP_S = 100.0
"""A stop that takes longer hangs: the grace period and the supervisor's own bounds are shorter."""

ANNOUNCED_S = 0.5
"""Between the announcement and SIGTERM; 15 s in the manifests."""

HELD_S = 5.0
"""After the last response; without a stream that holds it, the model is unloaded in one or two."""

_POLL_S = 0.05
_BUSY = ("llama_slots_in_use", "llama_waiting_rows", PENDING)
_LOADED = ("READY", "LOADING", "UNLOADING")


class ModelHeldError(Exception):
    """Triton keeps a model that has answered every request, for a stream that its client hasn't closed."""


Of = TypeVar("Of")


@dataclass(frozen=True)
class Stop(Generic[Of]):
    """host: a server of the embedded checkpoint in a config, and the processes above it; `start` waits until it is
    ready, `end` kills what is left, `log` returns the end of its log. stop: stops it; returns the exit code, None if
    the server goes on.

    network_ends: whether the server's network ends with it, and with it what its kernel still held for its clients.
    """

    host: Callable[[str, Path], Of]
    stop: Callable[[Of], Awaitable[int | None]]
    network_ends: bool = False


async def _signal(launcher: Launcher, number: int) -> int:
    os.kill(launcher.pid, number)
    return await launcher.wait()


async def _terminate_group(launcher: Launcher) -> int:
    """As systemd: every process of the group gets SIGTERM, and make passes its own on."""
    os.killpg(launcher.process.pid, signal.SIGTERM)
    return await launcher.wait()


async def _kill_parent(launcher: Launcher) -> int:
    """Return the guard's exit code; this process adopts it, and nothing that loses its parent later."""
    adopt_orphans()
    try:
        os.kill(launcher.pid, signal.SIGKILL)
        # Not in a thread: another cell would adopt orphans meanwhile, or end it here. A killed process ends at once.
        launcher.process.wait()
    finally:
        adopt_orphans(False)
    _, status = await asyncio.to_thread(os.waitpid, launcher.guard, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


async def _pre_stop(supervisor: Supervisor) -> int:
    await supervisor.announce(ANNOUNCED_S)
    supervisor.process.send_signal(signal.SIGTERM)
    return await supervisor.wait()


async def _unload(bare: Bare) -> None:
    """In the supervisor's order: the model that calls the other one first. Raises ModelHeldError."""
    for model in reversed(bare.models):
        await _post(bare, f"repository/models/{model}/unload")
        busy_at = time.monotonic()
        while await _state(bare, model) in _LOADED:
            now = await asyncio.to_thread(metrics.read, bare.addresses.metrics)
            # Series of a model that is gone are gone, too.
            if any(now.get(name, 0.0) for name in _BUSY):
                busy_at = time.monotonic()
            if time.monotonic() - busy_at > HELD_S:
                raise ModelHeldError
            await asyncio.sleep(_POLL_S)


async def _reload(bare: Bare) -> None:
    await _unload(bare)
    for model in bare.models:
        # Returns once it is loaded.
        await _post(bare, f"repository/models/{model}/load")
        if await _state(bare, model) != "READY":
            raise CellError(f"{model} isn't ready after it was loaded")
    await _post(bare, "models/llama/generate", {"text_input": "def", "max_tokens": 1})


async def _post(bare: Bare, path: str, body: object = None) -> httpx.Response:
    url = f"http://{bare.addresses.http}/v2/{path}"
    return (await asyncio.to_thread(HTTP.post, url, json=body)).raise_for_status()


async def _state(bare: Bare, model: str) -> str:
    entries = (await _post(bare, "repository/index")).json()
    return next(str(entry.get("state", "")) for entry in entries if entry["name"] == model)


STOPS: dict[str, Stop[Launcher] | Stop[Supervisor] | Stop[Bare]] = {
    "sigterm": Stop(Launcher, partial(_signal, number=signal.SIGTERM)),
    "group": Stop(partial(Launcher, below_make=True), _terminate_group),
    "sigint": Stop(Launcher, partial(_signal, number=signal.SIGINT)),
    "parent": Stop(Launcher, _kill_parent),
    "prestop": Stop(Supervisor, _pre_stop),
    "unload": Stop(Bare, _unload),
    "reload": Stop(Bare, _reload),
}
"""Those that need no container engine."""
