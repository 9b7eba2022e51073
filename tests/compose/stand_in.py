"""The image that takes the place of NVIDIA's Triton image in these tests, and the wheels that the build may use.

Both are made from what this virtual environment and its pip already have, so the builds themselves need no network.
The wheels have a lock of their own: the project's is of PyTorch's build for CUDA.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from compose.commands import run
from compose.engine import DockerEngine
from triton_local.wheel import find_wheel

IMAGE = "triton-llama-tests/triton-stand-in"
PYTHON = "3.11"
"""Of the stand-in's base image, Debian 12."""
LOCAL_BASE = "local/debian:bookworm"
PUBLIC_BASE = "debian:bookworm-slim"


def build_stand_in(engine: DockerEngine) -> str:
    """Build the image from the installed nvidia-pytriton wheel, on a local Debian if the engine has one; its name."""
    wheel = find_wheel([Path(sysconfig.get_path("platlib"))])
    wheel.stub(PYTHON)
    has_local_base = engine.docker("image", "inspect", LOCAL_BASE, check=False).returncode == 0
    base = f"BASE_IMAGE={LOCAL_BASE if has_local_base else PUBLIC_BASE}"
    contexts = [f"--build-context=tritonserver={wheel.root}", f"--build-context=libraries={wheel.libraries}"]
    folder = Path(__file__).parent / "triton_stand_in"
    engine.docker("build", "--progress=plain", f"--tag={IMAGE}", f"--build-arg={base}", *contexts, folder, timeout=300)
    return IMAGE


def collect_wheels(repository: Path, requirements: list[str]) -> Path:
    """A folder of wheels of `requirements` for the stand-in's Python, and their lock; once for each set of versions.

    pip runs with this machine's configuration: where that prefers PyTorch's CPU build, so does the image.
    """
    constraints = repository / "constraints.txt"
    versions = "\n".join([*requirements, PYTHON, constraints.read_text()])
    digest = hashlib.sha256(f"locked\n{versions}".encode()).hexdigest()[:16]
    folder = repository / ".work" / "compose" / f"wheels-{digest}"
    if folder.is_dir():
        return folder
    # Under a name of its own until it is complete, so that an interrupted download is never taken for a whole one.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        target = ["--only-binary=:all:", "--python-version", PYTHON, "--dest", str(partial)]
        run([*pip, *target, "--constraint", str(constraints), *requirements], timeout=540)
        # As whoever builds from wheels of their own does.
        make = ["make", "--no-print-directory", "lock", f"WHEELS={partial}", f"LOCK_PYTHON={PYTHON}", "PIP_NO_INDEX=1"]
        run(make, timeout=180, directory=repository)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
