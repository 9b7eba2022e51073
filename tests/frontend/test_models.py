"""Questions to Triton about the models: at the same time, and one for simultaneous requests."""

from __future__ import annotations

import asyncio

from frontend.endpoints import EMBEDDED
from triton_llama.endpoint import Endpoint
from triton_llama_openai.checkpoint import load_checkpoint
from triton_llama_openai.engine_client import EngineClient
from triton_llama_openai.models import Models, ServedModel


class _Engine(EngineClient):
    """Answers once all expected questions have come."""

    def __init__(self, together: asyncio.Barrier) -> None:
        super().__init__(Endpoint.parse("localhost:1", "grpc"), "llama")
        self._together = together
        self.configs = 0

    async def is_ready(self, timeout: float) -> bool:
        await self._together.wait()
        return False

    async def config(self, timeout: float) -> bytes:
        self.configs += 1
        await self._together.wait()
        return b"config"


def _model(name: str, engine: EngineClient) -> ServedModel:
    return ServedModel(name, load_checkpoint(str(EMBEDDED), None, None), engine, "hermes")


def test_all_models_are_probed_at_the_same_time() -> None:
    async def ask() -> dict[str, str]:
        together = asyncio.Barrier(2)
        async with asyncio.timeout(20):
            return await Models([_model(name, _Engine(together)) for name in ("a", "b")]).ready()

    assert list(asyncio.run(ask())) == ["a", "b"]


def test_simultaneous_requests_share_a_fingerprint() -> None:
    async def ask() -> None:
        together = asyncio.Barrier(2)
        engine = _Engine(together)
        model = _model("a", engine)
        first, *others = [asyncio.create_task(model.fingerprint()) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(20):
            await together.wait()
            fingerprints = {await task for task in others}
        assert len(fingerprints) == engine.configs == 1
        assert str(fingerprints.pop()).startswith("fp_")

    asyncio.run(ask())
