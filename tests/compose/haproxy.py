"""HAProxy's image for the tests: the one that compose.proxy.yml names, or one made of Debian's package.

The second one where the engine has a base image of its own, which is to say where it can pull none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from compose.commands import CommandFailedError, run
from compose.engine import DockerEngine
from compose.stand_in import LOCAL_BASE

IMAGE = "triton-llama-tests/haproxy"
PACKAGES = ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")
"""HAProxy, and what it needs that the base image hasn't."""


def proxy_image(engine: DockerEngine, repository: Path) -> str | None:
    """The image for PROXY_IMAGE, built if it isn't there; None for the compose file's default."""
    if engine.docker("image", "inspect", LOCAL_BASE, check=False).returncode != 0:
        return None
    folder = Path(__file__).parent / "haproxy_stand_in"
    contexts = [f"--build-context=packages={_packages(repository)}", f"--build-arg=BASE_IMAGE={LOCAL_BASE}"]
    engine.docker("build", "--progress=plain", f"--tag={IMAGE}", *contexts, folder, timeout=300)
    return IMAGE


def _packages(repository: Path) -> Path:
    """A folder with the packages of this machine's Debian; downloaded once."""
    folder = repository / ".work" / "compose" / "haproxy"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    download = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *PACKAGES]
    try:
        try:
            run(download, directory=partial, timeout=120)
        except CommandFailedError:
            # A new machine has no list of packages, or an old one, whose packages are gone.
            run(["apt-get", "-qq", "update"], timeout=240)
            run(download, directory=partial, timeout=120)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
