"""Where kustomize is: in kubectl, by itself, or else fetched from Debian's packages into .work. Knows no manifests."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FETCH = Path(__file__).parent / "fetch-kubectl.sh"
FETCHED = ROOT / ".work" / "kubectl"
FETCH_TIMEOUT_S = 240


def kustomize() -> tuple[str, ...]:
    """The words that, followed by a folder, build it.

    Where there is none and none can be fetched, the test that asks is skipped; not in CI, where it fails.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        return kubectl, "kustomize"
    alone = shutil.which("kustomize")
    if alone is not None:
        return alone, "build"
    fetched = FETCHED / "usr" / "bin" / "kubectl"
    why_none = None if fetched.exists() else _fetch()
    if why_none is not None:
        why = f"no kubectl and no kustomize on PATH, and {FETCH.name} got none: {why_none}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return str(fetched), "kustomize"


@cache
def _fetch() -> str | None:
    """Fetch it; None, or why there is none. Once, however many tests ask."""
    done = subprocess.run(
        [FETCH, FETCHED], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
    )
    return None if done.returncode == 0 else " ".join(done.stderr.split())
