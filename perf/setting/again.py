"""How a result says that it is measured again: a command of the Makefile, without this machine's folders."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_command(target: str, variables: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """Return the command. options: what has no variable of its own, in the one of the target's last word."""
    words = [f"{name}={value}" for name, value in variables.items()]
    rest = [f"{target.rpartition('-')[2].upper()}={shlex.join(options)}"] if options else []
    return shlex.join(["make", target, *words, *rest])


def model_name(model: str | Path) -> str:
    """Return a folder's own name, without those before it; a hub id as it is."""
    return Path(model).resolve().name if Path(model).expanduser().is_dir() else str(model)
