"""Every package of the image comes under a licence that somebody has looked at, as pip-licenses reads it."""

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

# As they are written: SPDX identifiers where a package has them, classifiers and older forms where it hasn't.
ALLOWED = {
    *("MIT", "MIT License", "ISC", "ISC License", "ISC License (ISCL)", "BSL-1.0", "0BSD", "Unlicense", "Zlib"),
    *("BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "3-Clause BSD License"),
    *("Apache", "Apache 2.0", "Apache-2.0", "Apache 2.0 License", "Apache Software License"),
    *("Apache-2.0 WITH LLVM-exception", "ZPL-2.1", "CNRI-Python"),
    *("PSF-2.0", "Python Software Foundation License"),
    # Asks for changed files of the package itself to be published; the image has them as they are.
    *("MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)"),
}

INSTALLED = {canonicalize_name(name) for distribution in metadata.distributions() if (name := distribution.name)}


def _listed(names: list[str]) -> dict[str, list[str]]:
    """Return the licences that these packages say they are under, by canonical name."""
    program = Path(sys.executable).with_name("pip-licenses")
    said = subprocess.run(
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
        for one in json.loads(said)
    }


@pytest.fixture(scope="module")
def licences() -> dict[str, list[str]]:
    return _listed([name for name in read_lock() if name in INSTALLED])


def test_every_licence_is_one_that_was_looked_at(licences: dict[str, list[str]]) -> None:
    unknown = {name: sorted({*said} - ALLOWED) for name, said in licences.items() if {*said} - ALLOWED}
    assert unknown == {}


def test_no_package_is_left_out(licences: dict[str, list[str]]) -> None:
    """CUDA's come under NVIDIA's own licence with PyTorch's build for it, and aren't installed beside another build."""
    assert {name for name in read_lock() if name not in licences and not CUDA.fullmatch(name)} == set()
