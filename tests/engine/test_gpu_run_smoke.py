"""A smoke run on the CPU: every part has its entries, and an interrupted run is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.gpu.__main__ import main
from perf.gpu.options import DEFAULT, FULL, PARTS, SMOKE, parse

ALL = ["--smoke", "--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore the number of threads, which a run sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _run(folder: Path, *arguments: str) -> dict[str, Any]:
    assert main([*ALL, "--output", str(folder / "gpu.json"), "--partial", str(folder), *arguments]) == 0
    content: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return content


@pytest.mark.long
def test_a_smoke_run_has_every_part_and_says_what_needs_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _run(tmp_path)
    measured = content["measurements"]
    assert {key.split("/")[0] for key in measured} == {*DEFAULT, "stock_engine"}
    not_run = {key: found["not_run"] for key, found in measured.items() if "not_run" in found}
    graphs = {key for key in not_run if "graph" in key}
    fused = {key for key in not_run if "fused" in key}
    assert graphs == {"correct/tokens/fp32_graphs", "capacity/int8/graphs", "graph/fp32/2", "graph/int8/2"}
    assert {not_run[key] for key in graphs} == {"RuntimeError: the model is on the CPU"}
    assert fused == {f"correct/{key}_fused" for key in ("tokens/fp32", "logits/fp16", "logits/int8")}
    assert {not_run[key] for key in fused} == {"RuntimeError: the fused kernels are a GPU's"}
    assert {key: not_run[key] for key in not_run.keys() - graphs - fused} == {"article": "needs CUDA"}
    assert all(found.get("passed", True) for found in measured.values())
    assert measured["environment"]["gpu"] == measured["environment"]["triton_language"] == "needs CUDA"
    assert measured["capacity/int8"]["memory"] == "needs CUDA"
    for key in ("decode/int8/2", "stock/int8/2"):
        assert measured[key]["tokens_per_second"] > 0
        assert measured[key]["limit"]["fraction"] > 0
    assert "no verdict" in capsys.readouterr().out
    assert "verdict" not in content


def test_a_resumed_run_keeps_measurements_and_retries_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _run(tmp_path, "--only", "environment", "article")
    second = _run(tmp_path, "--only", "environment", "products", "article", "--resume")
    assert "environment: there already" in capsys.readouterr().out
    assert second["measurements"]["environment"] == first["measurements"]["environment"]
    assert any(key.startswith("products/") for key in second["measurements"])
    one, other = (
        f"make bench-gpu 'GPU=--smoke --only environment {parts}'" for parts in ("article", "products article")
    )
    assert second["command"] == f"{one}; {other}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "on a CPU there is only --smoke"),
        (["--smoke", "--budget", "0"], "0 is out of bounds: more than 0"),
        (["--smoke", "--steady-seconds", "-1"], "-1 is out of bounds: more than 0"),
        (["--smoke", "--only", "grph"], "invalid choice: 'grph'"),
    ],
)
def test_out_of_bounds_options_end_the_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_parts_run_in_a_fixed_order_and_the_command_repeats_the_run() -> None:
    options = parse(["--smoke", "--device", "cpu", "--only", "graph", "environment", "--steady-seconds", "90"])
    assert options.only == ("environment", "graph")
    assert options.command == "make bench-gpu 'GPU=--smoke --only environment graph --steady-seconds 90'"
    again = parse(["--smoke", "--device", "cpu", "--kernels", "stock", "--budget", "3"])
    assert again.command == "make bench-gpu BUDGET=3 'GPU=--smoke --kernels stock'"
    assert options.amount.steady_s == 90
    plain = parse(["--smoke", "--device", "cpu"])
    assert "results" not in plain.output.parts
    assert plain.only == DEFAULT == PARTS[:-1]
    assert plain.amount == SMOKE


def test_waves_fit_into_the_models_positions() -> None:
    for amount in (FULL, SMOKE):
        longest = max(amount.prompt + amount.output, amount.max_model_len)
        assert longest <= amount.shape.positions
        assert 32 in amount.decode_rows or amount is SMOKE
