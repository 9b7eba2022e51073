"""Parts of the GPU run: verdicts on the aims, compared products, and what is packed for a machine without an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perf import environment
from perf.gpu import pack, products
from perf.gpu.options import TINY
from perf.gpu.products import Matrix, Weight
from perf.gpu.verdict import DEVICE, Measurements, failures, table, verdicts
from perf.roofline.rates import DeviceRates

CPU = torch.device("cpu")
RATES = DeviceRates("cpu", 1, {1: 1e9}, {"fp32": 1e9})
INT8 = {"requests_per_second": 25.0, "tokens_per_second": 5000.0}
MEASURED: dict[str, dict[str, Any]] = {
    "decode/int8/32": INT8,
    "decode/fp16/32": {"requests_per_second": 15.0},
    "decode/int8/1": {"tokens_per_second": 200.0},
    "stock/int8/32": {"requests_per_second": 3.0},
    "stock/int8_outliers/32": {"requests_per_second": 2.0},
    "quality/int8_fused": {"kl_nats": {"mean": 0.0003}},
    "quality/int8_threshold_0": {"kl_nats": {"mean": 0.0016}},
    "quality/int8_threshold_6": {"kl_nats": {"mean": 0.0007}},
}
SERVED = {
    "article/equal/inflight_int8": {"requests_per_second": 30.0},
    "article/equal/inflight_int8_quick": {"requests_per_second": 22.0},
}
SERVED_BOTH = {**SERVED, "article/equal/inflight_fp16_quick": {"requests_per_second": 12.0}}
REPLAYED = {"graph/int8/32": {"requests_per_second": 31.0}, "graph/int8/1": {"tokens_per_second": 150.0}}
REPLAYED_BOTH = {**REPLAYED, "graph/fp16/32": {"requests_per_second": 14.0}}
LAUNCHED: list[str | None] = ["decode/int8/32", "decode/fp16/32", "decode/int8/1"]


@pytest.mark.parametrize(
    ("changed", "device", "met"),
    [
        ({}, "NVIDIA H100 80GB HBM3", [True, False, True, True, True, True]),
        ({}, "NVIDIA H200", [None] * 6),
        ({key: {} for key in MEASURED}, DEVICE, [None] * 6),
        ({"decode/int8/32": {"not_run": "CUDA error"}}, DEVICE, [None, False, None, True, None, True]),
        ({"quality/int8_fused": {"kl_nats": {"mean": 0.0008}}}, DEVICE, [True, False, True, True, True, False]),
        ({"quality/int8_threshold_6": {}}, DEVICE, [True, False, True, True, True, None]),
    ],
    ids=["on its device", "on another", "nothing measured", "did not run", "a divergence too great", "no divergence"],
)
def test_an_aim_is_met_exactly_when_its_figure_on_its_device_is_within_the_bound(
    changed: Measurements, device: str, met: list[bool | None]
) -> None:
    assert [one["met"] for one in verdicts({**MEASURED, **changed}, device)] == met


@pytest.mark.parametrize(
    ("more", "sources"),
    [
        ({}, LAUNCHED),
        (REPLAYED_BOTH, ["graph/int8/32", "graph/fp16/32", "decode/int8/1"]),
        (REPLAYED, LAUNCHED),
        (
            {**REPLAYED_BOTH, **SERVED_BOTH},
            ["article/equal/inflight_int8_quick", "article/equal/inflight_fp16_quick", "decode/int8/1"],
        ),
        (SERVED, LAUNCHED),
        ({"decode/int8/32": {**INT8, "steps": "decode steps: stock kernels, launched"}}, [None, *LAUNCHED[1:]]),
        ({"decode/int8/32": {**INT8, "steps": "decode steps: fused 8-bit product, launched"}}, LAUNCHED),
    ],
    ids=["launched", "replayed", "replayed in INT8 only", "served", "served in INT8 only", "fell back", "fused"],
)
def test_both_precisions_have_the_best_figure_that_was_measured_in_the_same_way(
    more: Measurements, sources: list[str | None]
) -> None:
    int8, fp16, ratio, one_row, over_stock, _ = verdicts({**MEASURED, **more})
    assert [int8["from"], fp16["from"], one_row["from"]] == sources
    assert ratio["from"] == (f"{sources[0]} over {sources[1]}" if sources[0] else None)
    # The faster stock threshold is the baseline.
    assert over_stock["from"] == (f"{sources[0]} over stock/int8/32" if sources[0] else None)


def test_the_table_names_failed_checks_what_was_not_run_and_another_device() -> None:
    lines: list[str] = []
    failed: Measurements = {
        "capacity/int8": {"passed": False, "in_short": "growth 12 MiB"},
        "article": {"not_run": "needs CUDA"},
    }
    found = table({**MEASURED, **failed}, "NVIDIA H200", lines.append)
    assert found[0]["measured"] == 25.0
    assert lines[0] == "these aims are an H100's; this is NVIDIA H200"
    assert lines[1].startswith("not compared INT8 in-flight")
    assert "NOT PASSED   capacity/int8: growth 12 MiB" in lines
    assert "not run      article: needs CUDA" in lines
    assert failures({**MEASURED, **failed}) == ["capacity/int8"]
    lines.clear()
    table(MEASURED, "NVIDIA H100 80GB HBM3", lines.append)
    assert lines[:2] == [
        "met          INT8 in-flight, requests/s at 32 x 200 tokens: at least 24; 25 (decode/int8/32)",
        "NOT MET      FP16 in-flight, requests/s at 32 x 200 tokens: at least 16; 15 (decode/fp16/32)",
    ]


def test_every_distinct_matrix_of_the_decoder_is_measured_once() -> None:
    found = [(matrix.outputs, matrix.inputs) for matrix in Matrix.of(TINY)]
    assert found == [(64, 64), (32, 64), (128, 64), (64, 128)]


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_all_products_compute_the_same_matrix_product(rows: int) -> None:
    weight = Weight(Matrix("any", 48, 64), CPU, 0)
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
    found: dict[str, Any] = products.measure(Matrix("any", 48, 64), 4, CPU, RATES, 0.001, products.ways)
    assert found["ways"]["fused"] == {"failed": "RuntimeError: needs CUDA"}
    assert all(way["eager_us"] > 0 for name, way in found["ways"].items() if name != "fused")
    assert found["ways"]["fp32"]["graph_us"] is None
    assert found["ways"]["fp32"]["uncaptured"] == "needs CUDA"
    assert found["fastest"] not in (None, "fused", "int_mm")
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
    carried.write_text('{"commit": "45dd544", "uncommitted_changes": false, "changes_sha256": null}')
    assert environment.describe()["commit"] == "45dd544"
