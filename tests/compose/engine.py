"""The Docker engine of these tests: the one that answers already, else a private one brought up by a script.

The script is $DOCKER_ENGINE, by default ../shared/tools/docker-engine.sh beside the repository; it understands `start`,
`env` and `stop`. An engine that was brought up here is stopped afterwards. Knows nothing about images or compose.
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
    """There is no Docker engine and no way to bring one up; the message says what was tried."""


@dataclass(frozen=True)
class DockerEngine:
    """An engine that answers; `environment` is what its command line is run with."""

    environment: Mapping[str, str]

    def docker(
        self, *arguments: str | Path, timeout: float = 60, directory: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker ARGUMENTS`; errors as for `commands.run`."""
        return run(
            ["docker", *arguments], timeout=timeout, environment=self.environment, directory=directory, check=check
        )

    def refusal(self) -> str | None:
        """Why this engine can't be used, in one line; None when it answers and has compose."""
        try:
            self.docker("version")
            self.docker("compose", "version")
        except (OSError, CommandFailedError) as error:
            return " ".join(str(error).split())
        return None


@contextmanager
def docker_engine(repository: Path) -> Iterator[DockerEngine]:
    """An engine for as long as the context lasts.

    Raises NoEngineError when none answers and the script isn't there, CommandFailedError when it fails.
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
            f"no Docker engine with compose answers ({refusal}), and there is no script at {script} to bring one up: "
            "start Docker, or set DOCKER_HOST, or set DOCKER_ENGINE to such a script"
        )
    exports = shlex.split(run([script, "env"], timeout=30, environment=plain).stdout)
    private = DockerEngine({**plain, **dict(word.split("=", 1) for word in exports if "=" in word)})
    was_up = private.refusal() is None
    try:
        run([script, "start"], timeout=START_TIMEOUT_S, environment=plain)
        refusal = private.refusal()
        if refusal is not None:
            raise NoEngineError(f"{script} brought up an engine that can't be used: {refusal}")
        yield private
    finally:
        if not was_up:
            run([script, "stop"], timeout=60, environment=plain)
