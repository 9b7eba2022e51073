"""Find kustomize: in kubectl, on its own, or downloaded from Debian's packages into .work."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from contract.code_blocks import ROOT

FETCH = Path(__file__).parent / "fetch-kubectl.sh"
FETCHED = ROOT / ".work" / "kubectl"
FETCH_TIMEOUT_S = 240


def kustomize() -> tuple[str, ...]:
    """Return the command that, followed by a folder, builds it.

    Without one, and if none can be downloaded, the calling test is skipped; in CI it fails.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        return kubectl, "kustomize"
    alone = shutil.which("kustomize")
    if alone is not None:
        return alone, "build"
    fetched = FETCHED / "usr" / "bin" / "kubectl"
    failure = None if fetched.exists() else _fetch()
    if failure is not None:
        reason = f"no kubectl and no kustomize on PATH, and {FETCH.name} got none: {failure}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(fetched), "kustomize"


@cache
def _fetch() -> str | None:
    """Download kubectl once; return None, or the error."""
    done = subprocess.run(
        [FETCH, FETCHED], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
    )
    return None if done.returncode == 0 else " ".join(done.stderr.split())
