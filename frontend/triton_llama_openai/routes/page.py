"""The page at `/`: a chat, the server at a glance, and how its models are served; with the setting `page`."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from fastapi import APIRouter
from fastapi.params import Depends
from starlette.responses import HTMLResponse, JSONResponse, Response

from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings

_FILE = Path(__file__).parents[1] / "page.html"


def has_page(settings: Settings) -> bool:
    """Return whether the endpoint has the page: `auto` is on where only this machine reaches it."""
    if settings.page != "auto":
        return settings.page == "on"
    address = socket.getaddrinfo(settings.host, None, type=socket.SOCK_STREAM)[0][4][0]
    return ip_address(address).is_loopback


def page_router(models: Models, authorized: Sequence[Depends]) -> APIRouter:
    """Return the route of the page, which has no secret, and that of its descriptions, which asks for a key."""
    router = APIRouter()
    html = _FILE.read_text(encoding="utf-8")
    headers = {"content-security-policy": _policy(html), "referrer-policy": "no-referrer", "cache-control": "no-cache"}

    @router.get("/", response_model=None, response_class=HTMLResponse)
    async def page() -> Response:
        """A page for people: a chat and the server at a glance; with the setting `page`, no key."""
        return HTMLResponse(html, headers=headers)

    @router.get("/page/serving", response_model=None, dependencies=authorized)
    async def serving() -> Response:
        """The page's: how each model is served, lines by label; with the setting `page`."""
        return JSONResponse({model.name: model.serving for model in models.served() if model.adapter is None})

    return router


def _policy(html: str) -> str:
    """Return the policy under which the page's own script and style run, and text never becomes HTML."""
    script, style = (_hash(re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[0]) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
