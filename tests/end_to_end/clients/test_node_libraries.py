"""Libraries in JavaScript that speak OpenAI's protocol: OpenAI's own and Vercel's AI SDK."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from end_to_end.clients.environments import FOLDER, installed, run


@pytest.mark.parametrize("library", ["openai", "vercel"])
def test_a_library_passes_its_checks(library: str, base_url: str, tmp_path: Path) -> None:
    # Node looks for packages in the folders above a script alone.
    (tmp_path / "node_modules").symlink_to(installed("node") / "node_modules")
    checks = shutil.copy(FOLDER / "node" / f"{library}_checks.mjs", tmp_path)
    ended = run(["node", "--test", "--test-reporter=tap", checks], base_url, tmp_path)
    assert "\n# pass 0\n" not in ended.stdout
    assert "\n# skipped 0\n" in ended.stdout
