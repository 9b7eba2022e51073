"""Fixtures of the tests of deploy/kubernetes."""

from __future__ import annotations

import pytest
from deploy.manifests import FOLDERS, Overlay, build


@pytest.fixture(params=FOLDERS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    """Each folder of deploy/kubernetes in turn, the base included."""
    return build(request.param)
