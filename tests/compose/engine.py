"""The Docker engine of these tests: one that is already running, else a private one that a script starts.

The script is $DOCKER_ENGINE, by default ../shared/tools/docker-engine.sh beside the repository, with the commands
`start`, `env` and `stop`. An engine started here is stopped afterwards.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compose.commands import CommandFailedError, run

# Variables that steer compose, the build or the server; a test sets its own, and only those.
STEERING = ("COMPOSE_", "HF_", "LLAMA_", "PIP_", "TRITON_")
START_TIMEOUT_S = 540


class NoEngineError(Exception):
    """No Docker engine is running and none can be started; the message lists what was tried."""


@dataclass(frozen=True)
class DockerEngine:
    """A running engine; `environment` is the docker command's."""

    environment: Mapping[str, str]

    def docker(
        self, *arguments: str | Path, timeout: float = 60, directory: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker ARGUMENTS`; errors as for `commands.run`."""
        return run(
            ["docker", *arguments], timeout=timeout, environment=self.environment, directory=directory, check=check
        )

    def has_image(self, name: str) -> bool:
        """Return whether the engine has this image."""
        return self.docker("image", "inspect", name, check=False).returncode == 0

    def refusal(self) -> str | None:
        """Return why this engine is unusable, in one line; None if it responds and has compose."""
        try:
            self.docker("version")
            self.docker("compose", "version")
        except (OSError, CommandFailedError) as error:
            return " ".join(str(error).split())
        return None


@contextmanager
def docker_engine(repository: Path) -> Iterator[DockerEngine]:
    """Yield an engine.

    Raises NoEngineError if none is running and there is no script, CommandFailedError if the script fails.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith(STEERING)}
    present = DockerEngine(plain)
    refusal = present.refusal()
    if refusal is None:
        yield present
        return
    script = Path(os.environ.get("DOCKER_ENGINE") or repository.parent / "shared/tools/docker-engine.sh")
    if not script.is_file():
        raise NoEngineError(
            f"no Docker engine with compose responds ({refusal}), and there is no script {script} to start one: "
            "start Docker, or set DOCKER_HOST, or set DOCKER_ENGINE to such a script"
        )
    exports = shlex.split(run([script, "env"], timeout=30, environment=plain).stdout)
    private = DockerEngine({**plain, **dict(word.split("=", 1) for word in exports if "=" in word)})
    was_up = private.refusal() is None
    try:
        run([script, "start"], timeout=START_TIMEOUT_S, environment=plain)
        refusal = private.refusal()
        if refusal is not None:
            raise NoEngineError(f"{script} started an engine that is unusable: {refusal}")
        yield private
    finally:
        if not was_up:
            run([script, "stop"], timeout=60, environment=plain)
