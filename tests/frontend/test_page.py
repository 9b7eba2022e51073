"""The page at `/`: where it is served, its headers, and how the models are served. Chromium opens it in end_to_end."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

from frontend.descriptions import changed
from frontend.endpoints import Endpoint, endpoint, error_of
from frontend.fake_triton import FakeTriton
from triton_llama_openai.routes.page import has_page
from triton_llama_openai.settings import Settings


def test_the_policy_allows_the_pages_own_script_and_style_alone(served: Endpoint) -> None:
    response = served.http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert response.headers["referrer-policy"] == "no-referrer"


def test_by_default_the_page_is_on_at_loopback_alone() -> None:
    def has(*options: str) -> bool:
        return has_page(Settings.parse(options, {}))

    assert [has("--host", host) for host in ("localhost", "::1", "0.0.0.0", "::")] == [True, True, False, False]
    assert has("--host", "0.0.0.0", "--page", "on")
    assert not has("--page", "off")


def test_without_the_page_and_the_document_their_paths_are_unknown(triton: FakeTriton) -> None:
    with endpoint(triton.port, page="off", openapi="off") as served:
        for path in ("/", "/page/serving", "/openapi.json"):
            assert error_of(served.http.get(path))["code"] == "unknown_url"


def test_models_are_described_as_their_triton_does(triton: FakeTriton) -> None:
    triton.models["described"] = changed(serving={"memory": "on cpu: 1 MiB"})
    with endpoint(triton.port, triton_model="described") as served:
        assert served.http.get("/page/serving").json() == {"pydoc-llama": {"memory": "on cpu: 1 MiB"}}
