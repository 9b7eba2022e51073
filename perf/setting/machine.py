"""What a result was measured on and with."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

_PACKAGES = ("torch", "transformers", "bitsandbytes", "nvidia-pytriton", "tritonclient", "locust", "fastapi")

CARRIED = Path(".work") / "gpu" / "sources.json"
"""Under ROOT: what `sources` returned where a copy without the repository was made; the copy's results say it."""

# What a run and `make report` write themselves, and what no figure depends on.
_WRITTEN = ("perf/results", "README.md", "docs")


def describe() -> dict[str, object]:
    """Return commit, device, cores and versions, for a result's JSON."""
    return {
        **sources(),
        "device": device(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def sources() -> dict[str, object]:
    """Return what identifies the code that runs: the commit and, if files differ from it, a digest of the difference.

    Documents and results don't count. A copy without a repository that git can read says what it was a copy of, if that
    came along.
    """
    # Git itself would look for a repository in the folders above, too.
    if not (ROOT / ".git").exists():
        return _carried()
    try:
        return _read()
    except (FileNotFoundError, subprocess.CalledProcessError):
        # No git, or a repository that isn't its user's, or not all of one: no reason to measure nothing.
        return _carried()


def _read() -> dict[str, object]:
    elsewhere = ["--", ".", *(f":(exclude){path}" for path in _WRITTEN)]
    untracked = _git("ls-files", "--others", "--exclude-standard", "-z", *elsewhere).split(b"\0")[:-1]
    digest = hashlib.sha256(_git("diff", "HEAD", "--binary", *elsewhere))
    for path in sorted(untracked):
        digest.update(path + b"\0" + _content(ROOT / os.fsdecode(path)))
    changed = bool(_git("status", "--porcelain", *elsewhere))
    return {
        "commit": _git("rev-parse", "HEAD").decode().strip(),
        "uncommitted_changes": changed,
        "changes_sha256": digest.hexdigest()[:12] if changed else None,
    }


def _carried() -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads((ROOT / CARRIED).read_text())
    except FileNotFoundError:
        found = {"commit": "unknown", "uncommitted_changes": True, "changes_sha256": None}
    return found


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        # Gone since it was listed, or another repository inside of this one: only its name counts.
        return b""


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout


def device() -> str:
    """Return what computes: the GPU's name, or "CPU: " and the processor's."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return "CPU: " + line.split(":", 1)[1].strip()
    return "CPU: " + platform.machine()
