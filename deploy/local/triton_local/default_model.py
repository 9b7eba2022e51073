"""The default checkpoint, which the checkout's `models/smollm2/fetch.py` writes beside the model repository."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from triton_local.errors import MissingPartError


def fetch_default_model(repository: Path, environment: Mapping[str, str]) -> None:
    """Fetch what the model serves without LLAMA_MODEL, unless it is there. Raises MissingPartError.

    Does nothing for a repository without the program beside it.
    """
    program = repository.parent / "models" / "smollm2" / "fetch.py"
    if environment.get("LLAMA_MODEL") or not program.is_file():
        return
    # In a process of its own, because it imports PyTorch and transformers.
    command = [sys.executable, str(program)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise MissingPartError(done.stderr.strip().rpartition("\n")[2])
