"""Parts of the GPU run: compared products, and what is packed for a machine without an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perf import environment
from perf.gpu import pack, products
from perf.gpu.products import Weight
from perf.roofline.rates import DeviceRates

CPU = torch.device("cpu")
RATES = DeviceRates("cpu", 1, {1: 1e9}, {"fp32": 1e9})


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_all_products_compute_the_same_matrix_product(rows: int) -> None:
    weight = Weight(48, 64, CPU, 0)
    activations = torch.randn(rows, 64)
    exact = activations.double() @ (weight.codes.double() * weight.scales.double()[:, None]).T
    ways = dict(products.ways(weight))
    del ways["int_mm"], ways["fused"]
    for name, product in ways.items():
        error = float((product(activations).double() - exact).norm() / exact.norm())
        assert error < 0.02, name
        # Only those that round the activations have more than the rounding of floats.
        assert (error > 1e-4) == (name in ("bitsandbytes", "bitsandbytes_6", "w8a8")), name


def test_a_failing_product_is_a_result_beside_the_others() -> None:
    found: dict[str, Any] = products.measure(48, 64, 4, CPU, RATES, 0.001)
    assert found["ways"]["fused"] == {"failed": "RuntimeError: needs CUDA"}
    assert all(way["eager_us"] > 0 for name, way in found["ways"].items() if name != "fused")
    assert found["ways"]["fp32"]["graph_us"] is None
    assert found["ways"]["fp32"]["uncaptured"] == "needs CUDA"
    assert found["bandwidth_us"] == {"int8": pytest.approx(3.07, abs=0.01), "fp16": pytest.approx(6.14, abs=0.01)}


def test_a_package_built_for_one_python_is_refused() -> None:
    with pytest.raises(ValueError, match=r"numpy .* was built for this Python; it can't be taken to another one"):
        list(pack.files_of("numpy"))


def test_only_the_servers_files_for_one_python_are_packed() -> None:
    stubs = "pytriton/tritonserver/python_backend_stubs"
    needed = {
        "pytriton/tritonserver/bin/tritonserver",
        f"{stubs}/3.12/triton_python_backend_stub",
        "nvidia_pytriton.libs/libtritonserver-717102f0.so",
        "nvidia_pytriton-0.7.0.dist-info/METADATA",
    }
    others = {
        f"{stubs}/3.11/triton_python_backend_stub",
        "nvidia_pytriton.libs/libpython3-419a3a08.13.so.1.0",
        "pytriton/triton.py",
    }
    assert {name for name in needed | others if pack.is_of_the_server(name, "3.12")} == needed


@pytest.mark.parametrize("git", ["no repository", "no git", "one that can't read it"])
def test_without_a_readable_repository_the_commit_is_the_carried_one(
    git: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    if git != "no repository":
        # As in a worktree whose repository was not copied.
        (tmp_path / ".git").write_text("gitdir: /nowhere/.git/worktrees/copy\n")
    if git == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.sources()["commit"] == "unknown"
    carried = tmp_path / environment.CARRIED
    carried.parent.mkdir(parents=True)
    carried.write_text('{"commit": "45dd544", "uncommitted_changes": false}')
    assert environment.describe()["commit"] == "45dd544"
