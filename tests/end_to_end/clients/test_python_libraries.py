"""Libraries that speak OpenAI's protocol, each in its own environment, as its users install it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from end_to_end.clients.environments import FOLDER, installed, run


@pytest.mark.parametrize("client", ["langchain", "litellm", "llama_index", "openai_agents", "pydantic_ai"])
def test_a_library_passes_its_checks(client: str, base_url: str, tmp_path: Path) -> None:
    # The checks are tests for the pytest of that environment, which has none of this project's packages.
    checks = FOLDER / f"{client}_checks.py"
    options = ["-c", os.devnull, f"--rootdir={FOLDER}", "--noconftest", "-p", "no:cacheprovider", "--verbose"]
    ended = run([installed(client) / "bin" / "python", "-m", "pytest", *options, checks], base_url, tmp_path)
    assert " passed" in ended.stdout
    assert " skipped" not in ended.stdout
