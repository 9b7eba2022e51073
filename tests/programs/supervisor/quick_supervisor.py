"""The container's supervisor on this project's model repository, with other constants than its own.

    python quick_supervisor.py MODULE.CONSTANT=NUMBER ... -- [TRITONSERVER_OPTIONS ...]

Its shared memory has a prefix of its own: under the usual one, the machine's, supervisors remove each other's files.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from triton_supervisor import cli, command

REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"

if __name__ == "__main__":
    end = sys.argv.index("--")
    for setting in sys.argv[1:end]:
        name, _, value = setting.partition("=")
        module, _, constant = name.partition(".")
        setattr(import_module(f"triton_supervisor.{module}"), constant, float(value))
    command.plan_container.__defaults__ = (REPOSITORY,)
    cli.container_prefix = lambda: f"test-supervisor-{os.getpid()}-"  # type: ignore[attr-defined]  # not exported
    sys.exit(cli.main(sys.argv[end + 1 :]))
