"""The page at `/` in Chromium, with the real model."""

from __future__ import annotations

import json
import re

from end_to_end.metrics import Metrics
from end_to_end.openai_endpoint import in_front_of
from frontend.endpoints import HOST
from playwright.sync_api import Page, Route, expect
from triton_local.server import LocalTriton


def _lasting(route: Route) -> None:
    """Let an answer go on until it is stopped."""
    route.continue_(post_data=json.dumps({**json.loads(route.request.post_data or ""), "min_tokens": 1500}))


def test_a_chat_streams_is_stopped_and_moves_the_plots(page: Page, narrow_streaming: LocalTriton) -> None:
    metrics = Metrics(narrow_streaming)
    page.route("**/v1/chat/completions", _lasting)
    with in_front_of(narrow_streaming) as served:
        page.goto(f"http://{HOST}:{served.port}/")
        expect(page.locator("#serving")).to_contain_text("llama, 6 layers")
        expect(page.locator("#serving")).to_contain_text("weights")
        plots = page.locator(".plot")
        expect(plots.nth(1)).to_contain_text("0 running · 0 waiting · 2 slots")
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("2")
        page.get_by_label("Max tokens").fill("1500")
        page.get_by_label("Message").fill("Return a list of")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".facts")).to_contain_text("first token after")
        expect(plots.nth(1)).to_contain_text("1 running")
        expect(plots.nth(0)).to_contain_text(re.compile(r"[1-9][\d.]* tokens/s"))
        expect(plots.nth(2)).to_contain_text(re.compile(r"[1-9][\d,]* used"))
        line = plots.nth(0).locator("polyline").first.get_attribute("points")
        expect(plots.nth(0).locator("polyline").first).not_to_have_attribute("points", str(line))
        page.get_by_role("button", name="Stop").click()
        metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
        expect(page.locator(".facts")).to_contain_text("stopped")
        expect(plots.nth(1)).to_contain_text("0 running")
