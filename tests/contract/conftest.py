"""Fixtures of the contract tests."""

from __future__ import annotations

import pytest
from contract.manifests import FOLDERS, Built, built


@pytest.fixture(params=FOLDERS)
def overlay(request: pytest.FixtureRequest) -> Built:
    """Each folder of deploy/kubernetes in turn, the base included."""
    return built(request.param)
