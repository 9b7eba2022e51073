"""Take docs/page.png: the page at `/` with the default model, while others ask it, too (`make page-picture`)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from end_to_end.browser.chromium import chromium
from end_to_end.servers import ROOT, in_front_of, new_server
from frontend.endpoints import HOST, Endpoint
from playwright.sync_api import Page, ViewportSize, expect
from triton_local.default_model import fetch_default_model

MODEL = "SmolLM2-135M-Instruct"
SIZE: ViewportSize = {"width": 1280, "height": 800}
WARM_UP_S = 110


def main() -> None:
    """Start a server and others' load, ask in the page, and take the picture."""
    fetch_default_model(ROOT / "model_repository", {})
    environment = {"LLAMA_MODEL": str(ROOT / "models" / MODEL)}
    with (
        new_server("streaming", environment) as server,
        in_front_of(server) as served,
        chromium() as browser,
        ThreadPoolExecutor() as pool,
    ):
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(f"http://{HOST}:{served.port}/")
        ended = threading.Event()
        try:
            for user in range(4):
                pool.submit(_chat_on, served, user, ended)
            time.sleep(WARM_UP_S)
            _ask(page)
            page.screenshot(path=ROOT / "docs" / "page.png")
        finally:
            ended.set()


def _chat_on(served: Endpoint, user: int, ended: threading.Event) -> None:
    """Ask one question after the other, with pauses of growing length."""
    turn = 0
    while not ended.wait(user * turn % 5):
        turn += 1
        question = {"role": "user", "content": f"Tell me about the number {10 * user + turn}."}
        served.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": [question], "max_tokens": 120}
        ).raise_for_status()


def _ask(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Token probabilities").check()
    page.get_by_text("Settings").click()
    for question in ("What is the capital of France?", "Name three things to see there."):
        page.get_by_label("Message").fill(question)
        page.get_by_label("Message").press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    page.locator(".token", has_text="largest").hover()


if __name__ == "__main__":
    main()
