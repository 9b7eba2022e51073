"""Every package of the image has a licence of the reviewed list, as pip-licenses reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from contract.lock import CUDA, read_lock
from packaging.utils import canonicalize_name

# SPDX identifiers where a package has them, else classifiers and older forms.
ALLOWED = {
    *("MIT", "MIT License", "ISC", "ISC License", "ISC License (ISCL)", "BSL-1.0", "0BSD", "Unlicense", "Zlib"),
    *("BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "3-Clause BSD License"),
    *("Apache", "Apache 2.0", "Apache-2.0", "Apache 2.0 License", "Apache Software License"),
    *("Apache-2.0 WITH LLVM-exception", "ZPL-2.1", "CNRI-Python"),
    *("PSF-2.0", "Python Software Foundation License"),
    # Requires changed files of the package to be published; the image changes none.
    *("MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)"),
}

INSTALLED = {canonicalize_name(name) for distribution in metadata.distributions() if (name := distribution.name)}


def _listed(names: list[str]) -> dict[str, list[str]]:
    """Return the licences that these packages declare, by canonical name."""
    program = Path(sys.executable).with_name("pip-licenses")
    shown = subprocess.run(
        [program, "--from=mixed", "--with-system", "--format=json", "--packages", *names],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return {
        canonicalize_name(one["Name"]): re.split(r"; | AND | OR ", re.sub(r"[()]", "", one["License"]))
        if one["License"] not in ALLOWED
        else [one["License"]]
        for one in json.loads(shown)
    }


@pytest.fixture(scope="module")
def licences() -> dict[str, list[str]]:
    return _listed([name for name in read_lock() if name in INSTALLED])


def test_every_licence_is_on_the_reviewed_list(licences: dict[str, list[str]]) -> None:
    unknown = {name: sorted({*found} - ALLOWED) for name, found in licences.items() if {*found} - ALLOWED}
    assert unknown == {}


def test_every_package_of_the_lock_is_covered_except_cudas(licences: dict[str, list[str]]) -> None:
    """CUDA's have NVIDIA's own licence and are not installed with PyTorch's CPU build."""
    assert {name for name in read_lock() if name not in licences and not CUDA.fullmatch(name)} == set()
