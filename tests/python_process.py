"""A Python of its own with this one's import paths, for what a test can't do to its own."""

import os
import subprocess
import sys


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `arguments` are its sys.argv[1:]."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
