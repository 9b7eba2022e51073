"""Every object is valid for the oldest Kubernetes that README.md names and for the newest one that is known, strictly.

Kinds of other projects (PodMonitor, ScaledObject) are no part of Kubernetes' schemas. They are checked against
custom_resources/*.schema.json: what their definitions say of the fields used here, and of no others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from contract.manifests import FOLDERS, KUBERNETES, Manifest, built

CUSTOM = Path(__file__).parent / "custom_resources"
SCHEMAS = {file.name.removesuffix(".schema.json"): file for file in CUSTOM.glob("*.schema.json")}


def oldest() -> str:
    (version,) = re.findall(r"^For Kubernetes (1\.\d+) or newer", (KUBERNETES / "README.md").read_text(), re.MULTILINE)
    return str(version)


def different_objects() -> list[Manifest]:
    """Each object once, although most overlays share it."""
    by_content = {json.dumps(one, sort_keys=True): one for folder in FOLDERS for one in built(folder).objects}
    return list(by_content.values())


@pytest.mark.parametrize("version", ["oldest", "newest"])
def test_an_object_is_not_what_kubernetes_takes(version: str) -> None:
    number = oldest() if version == "oldest" else kubernetes_validate.latest_version()
    objects = [one for one in different_objects() if one["kind"].lower() not in SCHEMAS]
    assert len(objects) > len(FOLDERS)
    for one in objects:
        try:
            kubernetes_validate.validate(one, number, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            pytest.fail(f"{one['kind']} {one['metadata']['name']}, Kubernetes {number}: {where}: {error.message}")


def test_an_object_of_another_project_is_not_what_that_takes() -> None:
    custom = [one for one in different_objects() if one["kind"].lower() in SCHEMAS]
    assert {one["kind"].lower() for one in custom} == set(SCHEMAS)
    for one in custom:
        schema = json.loads(SCHEMAS[one["kind"].lower()].read_text())
        jsonschema.Draft202012Validator(schema).validate(one)


def test_a_misspelt_field_is_not_found() -> None:
    deployment = json.loads(json.dumps(built("base").one("Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(deployment, oldest(), strict=True)
