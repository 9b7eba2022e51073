"""Libraries that speak OpenAI's protocol, each in its own environment, as its users install it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from clients.environments import FOLDER, environment, program
from perf.soak.libraries import LIBRARIES, Library, LibraryError


@pytest.mark.parametrize("client", ["langchain", "litellm", "llama_index"])
def test_a_library_passes_its_checks(client: str, base_url: str, tmp_path: Path) -> None:
    # The checks are tests for the pytest of that environment, which has none of this project's packages.
    checks = FOLDER / f"{client}_checks.py"
    options = ["-c", os.devnull, f"--rootdir={FOLDER}", "--noconftest", "-p", "no:cacheprovider", "--verbose"]
    ended = subprocess.run(
        [program(client, "python"), "-m", "pytest", *options, checks],
        env=environment(base_url, tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert " skipped" not in ended.stdout


@pytest.mark.parametrize("client", LIBRARIES)
async def test_a_librarys_process_in_a_soak_counts_the_tokens_of_a_chat(client: str, base_url: str) -> None:
    program(client, "python")
    library = Library(client, base_url, "pydoc-llama")
    try:
        whole, streamed = [await library.ask("What is a list?", 12, 0.0, streamed) for streamed in (False, True)]
        assert whole == streamed
        assert (whole.num_output_tokens, whole.finish_reason) == (12, "length")
        with pytest.raises(LibraryError, match="2000"):
            await library.ask("What is a list?", 2000, 0.0, False)
    finally:
        await library.close()
