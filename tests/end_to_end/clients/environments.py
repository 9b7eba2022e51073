"""The clients' environments, `.work/clients/<name>`, from the pinned packages in `requirements/<name>.txt` and `node/`.

One for each client, because their packages exclude each other's; `make test-clients` installs them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
_INSTALLED = FOLDER.parents[2] / ".work" / "clients"


def installed(client: str) -> Path:
    """Return the folder of a client's environment. The test fails where there is none."""
    # The marker is created last.
    if not (_INSTALLED / client / ".ready").exists():
        pytest.fail(f"the client {client} isn't installed: make test-clients does it, into .work/clients")
    return _INSTALLED / client


def run(
    command: Sequence[str | Path], base_url: str, home: Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a client's program to its end and return what it wrote. The test fails if the program does.

    home: for what it caches; also its working directory, unless `cwd` is another.
    """
    ended = subprocess.run(
        command, env=_environment(base_url, home), cwd=cwd or home, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def _environment(base_url: str, home: Path) -> dict[str, str]:
    """Return the variables of a client's process: the libraries' own, and none that lead out of this machine."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        # For `end_to_end.clients.question`.
        "PYTHONPATH": str(FOLDER.parents[1]),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "unused",
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "unused",
        # LiteLLM's table of prices, Hugging Face's hub.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
