"""/health, /ping, /version and /metrics: the endpoint's own state, without a key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from triton_llama_openai.metrics import CONTENT_TYPE, Metrics
from triton_llama_openai.served.models import Models
from triton_llama_openai.served.served_model import package_version


def health_router(models: Models, metrics: Metrics) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    # vLLM's second name of it, which SageMaker asks for.
    @router.get("/ping", response_model=None, responses={503: {"description": "Not ready"}})
    @router.get("/health", response_model=None, responses={503: {"description": "Not ready"}})
    async def health() -> Response:
        """200 if every model can answer now, else 503 with the reasons; no key."""
        reasons = await models.ready()
        return JSONResponse({"not_ready": reasons} if reasons else {}, 503 if reasons else 200)

    @router.get("/health/live", response_model=None)
    async def live() -> Response:
        """200 as long as this process answers, whatever Triton does; no key."""
        return JSONResponse({})

    @router.get("/version", response_model=None)
    async def package() -> Response:
        """vLLM's: this package's version, `{"version": …}`; no key."""
        return JSONResponse({"version": package_version()})

    @router.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def metrics_page() -> Response:
        """The metrics, for Prometheus; no key."""
        return Response(metrics.page(), media_type=CONTENT_TYPE)

    return router
