"""Libraries that speak OpenAI's or Anthropic's protocol, each in its own environment, as its users install it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from end_to_end.clients.environments import FOLDER, installed, run

# test_dynamo.py runs Dynamo's.
PYTHON_CLIENTS = sorted({path.name.removesuffix("_checks.py") for path in FOLDER.glob("*_checks.py")} - {"dynamo"})
JAVASCRIPT_LIBRARIES = sorted(path.name.removesuffix("_checks.mjs") for path in FOLDER.glob("node/*_checks.mjs"))


@pytest.mark.parametrize("client", PYTHON_CLIENTS)
def test_a_library_in_python_passes_its_checks(client: str, base_url: str, tmp_path: Path) -> None:
    # The checks are tests for the pytest of that environment, which has none of this project's packages.
    checks = FOLDER / f"{client}_checks.py"
    options = ["-c", os.devnull, f"--rootdir={FOLDER}", "--noconftest", "-p", "no:cacheprovider", "--verbose"]
    ended = run([installed(client) / "bin" / "python", "-m", "pytest", *options, checks], base_url, tmp_path)
    assert " passed" in ended.stdout
    assert " skipped" not in ended.stdout


@pytest.mark.parametrize("library", JAVASCRIPT_LIBRARIES)
def test_a_library_in_javascript_passes_its_checks(library: str, base_url: str, tmp_path: Path) -> None:
    # Node looks for packages in the folders above a script alone.
    (tmp_path / "node_modules").symlink_to(installed("node") / "node_modules")
    checks = shutil.copy(FOLDER / "node" / f"{library}_checks.mjs", tmp_path)
    ended = run(["node", "--test", "--test-reporter=tap", checks], base_url, tmp_path)
    assert "\n# pass 0\n" not in ended.stdout
    assert "\n# skipped 0\n" in ended.stdout
