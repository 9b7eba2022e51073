"""Prometheus' image for the tests: the compose file's own, or one made of Debian's package.

The second one where the engine has a base image of its own, which is to say where it can pull none.
"""

from __future__ import annotations

from pathlib import Path

from compose.engine import DockerEngine
from compose.stand_in import LOCAL_BASE
from contract.prometheus_package import prometheus_or_skip

IMAGE = "triton-llama-tests/prometheus"


def prometheus_image(engine: DockerEngine) -> str:
    """The image for TRITON_PROMETHEUS_IMAGE, built if it isn't there; empty for the compose file's default."""
    if engine.docker("image", "inspect", LOCAL_BASE, check=False).returncode != 0:
        return ""
    programs = prometheus_or_skip().server.parent
    folder = Path(__file__).parent / "prometheus_stand_in"
    contexts = [f"--build-context=programs={programs}", f"--build-arg=BASE_IMAGE={LOCAL_BASE}"]
    engine.docker("build", "--progress=plain", f"--tag={IMAGE}", *contexts, folder, timeout=300)
    return IMAGE
