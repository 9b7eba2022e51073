"""Pages in Chromium: one that logs an error, opens a dialog or leaves the endpoint's origin fails its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.browser.chromium import MissingError, chromium
from frontend.endpoints import Endpoint, endpoint
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, expect

FAILED_REQUEST = "Failed to load resource:"
"""What Chromium logs of an answer such as 401, or of an endpoint that has ended, which the page shows itself."""

# On a busy machine the page needs longer than the usual 5 s.
expect.set_options(timeout=30_000)


# Of a module: an event loop of Playwright's runs meanwhile, and async tests of other modules need their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with chromium() as started:
            yield started
    except MissingError as error:
        pytest.fail(str(error))


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    problems: list[str] = []
    origins: set[str] = set()

    def logged(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(FAILED_REQUEST):
            problems.append(message.text)

    def opened(dialog: Dialog) -> None:
        problems.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    page.on("console", logged)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", opened)
    page.on("request", lambda request: origins.add(request.url.split("/")[2]))
    yield page
    page.close()
    assert problems == []
    assert len(origins) == 1


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as fake:
        yield fake


@pytest.fixture
def served(triton: FakeTriton) -> Iterator[Endpoint]:
    """The endpoint in front of the fake."""
    with endpoint(triton.port) as started:
        yield started
