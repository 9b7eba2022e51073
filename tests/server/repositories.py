"""Copies of the model repository with something changed: a line of the config, or the program under a shim.

A shim is a file of `shims/`: it takes the model's place, changes something inside, and hands the real one on.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from server.servers import ROOT

SHIMS = Path(__file__).parent / "shims"

_QUEUE_POLICY = re.compile(r"\bdefault_queue_policy \{[^{}]*\}")


def copy_repository(folder: Path, shim: str = "", queue_policy: str = "") -> Path:
    """Copy the model repository into an empty folder, and return where it is.

    shim: name of the file in `shims/` that stands before the model. queue_policy: fields of Triton's ModelQueuePolicy,
    instead of the in-flight configs' own.
    """
    repository = folder / "model_repository"
    shutil.copytree(ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
    # The embedded checkpoint is looked for beside the repository.
    (folder / "models").symlink_to(ROOT / "models")
    model = repository / "llama"
    if shim:
        (model / "1" / "model.py").rename(model / "1" / "real_model.py")
        shutil.copy(SHIMS / f"{shim}.py", model / "1" / "model.py")
    if queue_policy:
        for config in (model / "config.pbtxt", model / "configs" / "streaming.pbtxt"):
            text, found = _QUEUE_POLICY.subn(f"default_queue_policy {{ {queue_policy} }}", config.read_text())
            assert found == 1
            config.write_text(text)
    return repository
