"""The page at `/` in Chromium, in front of a Triton that answers what a test wants; at last with the real model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from end_to_end.metrics import Metrics
from end_to_end.servers import in_front_of
from frontend.descriptions import description_of
from frontend.endpoints import HOST, Endpoint, endpoint
from frontend.fake_triton import FakeTriton
from model_families import BY_NAME
from playwright.sync_api import Page, Route, expect
from triton_local.server import LocalTriton

MARKUP = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)><svg onload=alert(1)>",
    "[a](javascript:alert(1)) ![b](http://192.0.2.1/b.png) http://192.0.2.1/",
    "</div></article></main>\x00\u202e",
]


def _ask(page: Page, served: Endpoint, question: str = "What is a list?") -> None:
    """Open the page, unless it is open, and send a question."""
    if not page.url.startswith("http"):
        page.goto(f"http://{HOST}:{served.port}/")
        expect(page.get_by_label("Model")).to_have_value("pydoc-llama")
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def _set(page: Page, served: Endpoint, **fields: str) -> None:
    """Open the page, and fill fields of its settings."""
    page.goto(f"http://{HOST}:{served.port}/")
    expect(page.get_by_label("Model")).to_have_value("pydoc-llama")
    page.get_by_text("Settings").click()
    for label, text in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(text)


def test_an_answer_streams(page: Page, served: Endpoint, triton: FakeTriton) -> None:
    triton.hold_after = 2
    _ask(page, served)
    expect(page.locator(".answer")).to_have_text("Hello,")
    triton.hold_after = None
    expect(page.locator(".answer")).to_have_text("Hello, world.")
    expect(page.locator(".facts")).to_contain_text("4 tokens")
    expect(page.locator(".facts")).to_contain_text("first token after")


def test_a_conversation_goes_on(page: Page, served: Endpoint, triton: FakeTriton) -> None:
    _ask(page, served)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    _ask(page, served, "And a tuple?")
    expect(page.locator(".answer")).to_have_count(2)
    prompt = str(triton.last.value("text_input"))
    assert prompt.index("What is a list?") < prompt.index("Hello, world.") < prompt.index("And a tuple?")


def test_the_settings_are_the_requests(page: Page, served: Endpoint, triton: FakeTriton) -> None:
    _set(page, served, System_prompt="Be brief.", Temperature="0.5", Top_p="0.9", Max_tokens="3", Seed="11")
    _ask(page, served)
    expect(page.locator(".facts")).to_contain_text("ended by its maximum of tokens")
    assert "Be brief." in str(triton.last.value("text_input"))
    assert [triton.last.value(name) for name in ("max_tokens", "seed")] == [3, 11]
    assert [triton.last.value(name) for name in ("temperature", "top_p")] == pytest.approx([0.5, 0.9])


@pytest.mark.parametrize("seed", [18446744073709551615, -1])
def test_a_seed_is_sent_digit_by_digit(page: Page, served: Endpoint, triton: FakeTriton, seed: int) -> None:
    _set(page, served, Seed=str(seed))
    _ask(page, served)
    expect(page.locator(".answer")).to_have_text("Hello, world.")
    assert triton.last.value("seed") == seed % 2**64


@pytest.mark.parametrize("text", ["Infinity", " "])
def test_what_is_no_number_is_an_error_at_its_field(page: Page, served: Endpoint, text: str) -> None:
    _set(page, served, Temperature=text)
    page.get_by_text("Settings").click()
    _ask(page, served)
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert page.get_by_label("Temperature").evaluate("(field) => field.validity.patternMismatch")
    expect(page.get_by_label("Message")).to_have_value("What is a list?")


def test_a_refusal_is_shown_with_its_field(page: Page, served: Endpoint) -> None:
    message = "temperature is 9"
    _set(page, served, Temperature="9")
    _ask(page, served)
    expect(page.get_by_role("alert").filter(has_text=message)).to_be_visible()
    expect(page.locator("#errors")).to_contain_text(message)
    expect(page.locator("#errors")).to_contain_text("1 × HTTP 400")
    expect(page.get_by_label("Message")).to_have_value("What is a list?")


def test_an_error_within_an_answer_is_shown_below_it(page: Page, served: Endpoint, triton: FakeTriton) -> None:
    triton.failing, triton.after_tokens = "INVALID_ARG: it broke", 2
    _ask(page, served)
    expect(page.locator(".answer")).to_have_text("Hello,")
    expect(page.get_by_role("alert").filter(has_text="it broke")).to_be_visible()


@pytest.mark.parametrize("logprobs", [False, True])
def test_markup_of_an_answer_stays_text(page: Page, served: Endpoint, triton: FakeTriton, logprobs: bool) -> None:
    triton.tokens = MARKUP
    _set(page, served, System_prompt="<b>x</b>")
    page.get_by_label("Token probabilities").set_checked(logprobs)
    _ask(page, served, MARKUP[1])
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.locator(".answer").text_content() == "".join(MARKUP)
    assert page.locator(".question").text_content() == MARKUP[1]
    assert page.locator("#turns :is(script, img, svg, a, b)").count() == 0


def test_a_megabyte_is_shown_and_the_page_goes_on(page: Page, served: Endpoint, triton: FakeTriton) -> None:
    text = "a line of words\n" * (1 << 16)
    triton.tokens = [text]
    _ask(page, served)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.locator(".answer").text_content() == text
    page.get_by_role("button", name="New chat").click()
    triton.tokens = ["short"]
    _ask(page, served)
    expect(page.locator(".answer")).to_have_text("short")


def test_a_token_shows_its_alternatives(page: Page, served: Endpoint) -> None:
    _set(page, served)
    page.get_by_label("Token probabilities").check()
    _ask(page, served)
    expect(page.locator(".token")).to_have_text([" Hello", ",", " world", "."])
    tip = page.get_by_role("tooltip")
    page.locator(".token").nth(2).hover()
    expect(tip).to_contain_text('60.7 %  " world"')
    page.locator(".token").first.focus()
    expect(tip).to_contain_text('60.7 %  " Hello"')
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text('22.3 %  ",0"')


def test_reasoning_is_shown_apart(page: Page, triton: FakeTriton, tmp_path: Path) -> None:
    triton.models["llama"] = description_of(BY_NAME["qwen3"].save(tmp_path / "qwen3"))
    triton.tokens = ["<think>", "Two and two.", "</think>", "Four."]
    with endpoint(triton.port, served_name="pydoc-llama") as served:
        _ask(page, served)
        expect(page.locator(".reasoning")).to_have_text("Two and two.")
        expect(page.locator(".answer")).to_have_text("Four.")


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_memory(page: Page, triton: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-first\n")
    with endpoint(triton.port, api_keys_file=tmp_path / "keys") as served:
        page.goto(f"http://{HOST}:{served.port}/")
        for key in ("sk-other", "sk-first"):
            page.get_by_label("API key", exact=True).fill(key)
            page.get_by_role("button", name="Use key").click()
            if key == "sk-other":
                expect(page.get_by_role("alert").filter(has_text="the API key is wrong")).to_be_visible()
        expect(page.get_by_label("Model")).to_have_value("pydoc-llama")
        _ask(page, served)
        expect(page.locator(".answer")).to_have_text("Hello, world.")
        stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
        assert json.loads(stored) == [{}, {}, ""]


def test_models_are_read_until_both_answers_have_come(page: Page, served: Endpoint) -> None:
    page.route("**/page/serving", lambda route: route.fulfill(status=500), times=1)
    _ask(page, served)
    expect(page.locator(".answer")).to_have_text("Hello, world.")


def test_the_models_are_those_that_generate(page: Page, served: Endpoint) -> None:
    (model,) = served.http.get("/v1/models").json()["data"]
    data = [model | {"id": "vectors", "tasks": ["embed"]}, model]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
    page.goto(f"http://{HOST}:{served.port}/")
    expect(page.get_by_label("Model").get_by_role("option")).to_have_text(["pydoc-llama"])


def test_an_adapter_loaded_later_is_listed_and_the_selection_stays(page: Page, triton: FakeTriton) -> None:
    triton.adapters["sql"] = "v1"
    model = page.get_by_label("Model")
    with endpoint(triton.port) as served:
        page.goto(f"http://{HOST}:{served.port}/")
        model.select_option("sql")
        triton.adapters["new"] = "v1"
        triton.wait_for(lambda _: served.complete(model="new").status_code == 200)
        page.get_by_label("Message").focus()
        model.focus()
        expect(model.get_by_role("option")).to_have_text(["pydoc-llama", "sql", "new"])
        expect(model).to_have_value("sql")


def test_answers_to_clients_that_have_left_are_no_errors(page: Page, served: Endpoint) -> None:
    lines = [f'llama_openai_requests_total{{route="/v1/messages",code="{code}"}} 2.0\n' for code in (200, 404, 499)]
    page.route("**/metrics", lambda route: route.fulfill(body="".join(lines)))
    page.goto(f"http://{HOST}:{served.port}/")
    expect(page.locator("#errors")).to_have_text("2 × HTTP 404")


def test_metrics_that_cannot_be_read_are_named_in_place(page: Page, served: Endpoint) -> None:
    page.goto(f"http://{HOST}:{served.port}/")
    expect(page.locator("#unread")).to_contain_text("can't read Triton's metrics")
    page.route("**/metrics", lambda route: route.fulfill(status=404))
    expect(page.locator("#unread")).to_contain_text("The metrics can't be read: HTTP 404")


def test_a_phone_has_the_chat_and_the_server_folded(page: Page, served: Endpoint) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    _ask(page, served)
    expect(page.locator(".answer")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_text("Server", exact=True).click()
    expect(page.get_by_text("Generated tokens/s")).to_be_in_viewport()


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
