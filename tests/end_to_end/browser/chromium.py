"""A headless Chromium, from an npm package into `.work/chromium`: it needs neither root nor Debian's packages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).resolve().parents[3] / ".work" / "chromium"


class MissingError(Exception):
    """There is no Chromium."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start it. Raises MissingError with the command that installs it."""
    # The marker is created last.
    if not (FOLDER / ".ready").exists():
        raise MissingError("Chromium isn't installed: make .work/chromium/.ready does it, with Node.js")
    # The package has the libraries and a font that machines without a screen lack.
    own = {"LD_LIBRARY_PATH": str(FOLDER / "al2023" / "lib"), "FONTCONFIG_PATH": str(FOLDER / "fonts")}
    with sync_playwright() as playwright:
        # Its own sandbox needs rights that a container may lack; it opens this project's page alone.
        browser = playwright.chromium.launch(
            executable_path=FOLDER / "chromium", chromium_sandbox=False, env={**os.environ, **own}
        )
        yield browser
        browser.close()
