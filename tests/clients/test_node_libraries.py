"""Libraries in JavaScript that speak OpenAI's protocol: OpenAI's own and Vercel's AI SDK."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from clients.environments import FOLDER, environment, installed


@pytest.mark.parametrize("library", ["openai", "vercel"])
def test_a_library_passes_its_checks(library: str, base_url: str, tmp_path: Path) -> None:
    # Node looks for packages in the folders above a script alone.
    (tmp_path / "node_modules").symlink_to(installed("node") / "node_modules")
    checks = shutil.copy(FOLDER / "node" / f"{library}_checks.mjs", tmp_path)
    ended = subprocess.run(
        ["node", "--test", "--test-reporter=tap", checks],
        env=environment(base_url, tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n# pass 0\n" not in ended.stdout
    assert "\n# skipped 0\n" in ended.stdout
