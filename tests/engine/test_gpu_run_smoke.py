"""The GPU run on a CPU: a smoke run of every part, its options, its models, and its checks of logits and memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.engines import completions, engine_of, tokens_in
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.libraries import Linear8bitLt
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import MemoryPlan
from llama_engine.model.torch_runner import TorchRunner

from perf.gpu import correctness
from perf.gpu.__main__ import LOST, main
from perf.gpu.capacity import LEFT, MIB, Stretch, against_plan
from perf.gpu.models import FP32, INT8, INT8_OUTLIERS, Precision, RandomLlama
from perf.gpu.options import PARTS, TINY, parse
from perf.quality.divergence import Forward

Run = Callable[..., dict[str, Any]]

CPU = ["--smoke", "--device", "cpu"]
SHAPE = KVCacheShape(2, 4, 2, 128, 16, torch.float16)
PLAN = MemoryPlan(60 * MIB, 20 * MIB, 10 * MIB, 10 * MIB, free=200 * MIB, fraction=0.9, device="cuda", shape=SHAPE)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Tiny tensors: on few shared cores, two threads wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run with options and return the result."""

    def run(*arguments: str) -> dict[str, Any]:
        output = tmp_path / "gpu.json"
        assert main([*CPU, "--output", str(output), "--partial", str(tmp_path), *arguments]) == 0
        content: dict[str, Any] = json.loads(output.read_text())
        return content

    return run


@pytest.mark.long
def test_a_smoke_run_has_every_part_and_says_what_needs_a_gpu(run: Run) -> None:
    content = run()
    measured = content["measurements"]
    assert {key.split("/")[0] for key in measured} == {*PARTS, "stock_engine"}
    not_run = {key: found["not_run"] for key, found in measured.items() if "not_run" in found}
    graphs = ("correct/tokens/fp32_graphs", "capacity/int8/graphs", "graph/fp32/2", "graph/int8/2")
    fused = (f"correct/{key}_fused" for key in ("tokens/fp32", "logits/fp16", "logits/int8"))
    assert not_run == {
        **dict.fromkeys(graphs, "RuntimeError: the model is on the CPU"),
        **dict.fromkeys(fused, "RuntimeError: the fused kernels are a GPU's"),
        "article": "needs CUDA",
    }
    assert all(found.get("passed", True) for found in measured.values())
    assert measured["environment"]["gpu"].startswith("failed: ")
    assert measured["capacity/int8"]["memory"] == "needs CUDA"
    for key in ("decode/int8/2", "stock/int8/2"):
        assert measured[key]["tokens_per_second"] > 0
        assert measured[key]["limit"]["fraction"] > 0


def test_a_resumed_run_keeps_measurements_and_retries_failures(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    first = run("--only", "environment", "article")
    second = run("--only", "environment", "products", "article", "--resume")
    assert "environment: there already" in capsys.readouterr().out
    assert second["measurements"]["environment"] == first["measurements"]["environment"]
    assert any(key.startswith("products/") for key in second["measurements"])
    one, other = (
        f"make bench-gpu 'GPU=--smoke --only environment {parts}'" for parts in ("article", "products article")
    )
    assert second["command"] == f"{one}; {other}"


def test_a_run_that_loses_the_gpu_ends_with_its_own_code_and_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse([*CPU, "--only", "environment", "article", "--partial", str(tmp_path)], None)
    options.device, options.smoke, options.output = torch.device("cuda", 0), False, tmp_path / "gpu.json"
    monkeypatch.setattr("perf.gpu.__main__.parse", lambda *_: options)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: torch.zeros(1)[2])
    assert main() == LOST
    assert "continue with --resume --kernels stock" in capsys.readouterr().err
    assert list(json.loads(options.output.read_text())["measurements"]) == ["environment"]


@pytest.mark.parametrize("arguments", [["--device", "cpu"], ["--smoke", "--device", "cuda"]])
def test_without_a_gpu_there_is_only_a_smoke_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments, None)
    assert ended.value.code == 2
    assert "without one there is only --smoke --device cpu" in capsys.readouterr().err


def test_parts_run_in_a_fixed_order_and_the_command_repeats_the_run() -> None:
    options = parse([*CPU, "--only", "graph", "environment", "--kernels", "stock", "--budget", "3"], None)
    assert options.only == ("environment", "graph")
    assert options.command == "make bench-gpu BUDGET=3 'GPU=--smoke --only graph environment --kernels stock'"
    assert "results" not in options.output.parts


def test_the_random_model_is_the_same_in_each_requested_precision_whatever_was_before() -> None:
    llama = RandomLlama(TINY, torch.device("cpu"))
    texts: dict[tuple[Precision, bool], str] = {}
    for precision, stock in ((INT8, True), (FP32, False), (INT8, False), (INT8_OUTLIERS, False), (INT8, True)):
        made = llama.at(precision, stock)
        assert ("int8" in made.info.linears, made.info.threshold) == (precision != FP32, precision.threshold)
        # Fused ones, which round no activations, are a GPU's.
        assert any(type(module) is Linear8bitLt for module in llama.module.modules()) is (precision != FP32)
        assert made.info.rounds_activations is (precision != FP32)
        request = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=6)
        text = completions(engine_of(made, 1), [request])[0].text
        assert len(tokens_in(text)) == 6
        assert texts.setdefault((precision, stock), text) == text


def test_correct_logits_are_within_the_bounds_and_nan_or_a_step_at_a_wrong_position_is_not(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = steps = 3
    given = correctness.texts(fp32, rows, steps)
    assert len({len(text) for text in given}) > 1, "equal lengths would need no padding"
    decoded, plain = correctness.through_slots(fp32, given, steps), correctness.alone(Forward(fp32), given, steps)
    oracles = correctness.exact_logits(torch.device("cpu"), rows, steps)
    assert [found.shape for found in decoded] == [found.shape for found in plain]
    assert decoded[0].shape == (steps + 1, fp32.config.vocab_size)
    assert correctness.distance(plain, decoded, "fp32")["passed"]
    assert correctness.distance(oracles, decoded, "fp32")["passed"]
    decode = TorchRunner.decode

    def one_position_late(
        model: TorchRunner, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int
    ) -> torch.Tensor:
        return decode(model, slots, tokens, positions - 1, span)

    monkeypatch.setattr(TorchRunner, "decode", one_position_late)
    late = correctness.through_slots(fp32, given, steps)
    nan = [torch.full_like(found, torch.nan) for found in plain]
    assert not any(correctness.distance(plain, wrong, "int8")["passed"] for wrong in (late, nan))


@pytest.mark.parametrize(
    ("peaks", "left", "flat"),
    [
        ((90 * MIB, 95 * MIB, 95 * MIB), LEFT, True),
        ((90 * MIB, 101 * MIB, 101 * MIB), 0, False),  # more than the plan
        ((90 * MIB, 95 * MIB, 95 * MIB), LEFT + 1, False),  # left allocated between steps
        ((90 * MIB, 95 * MIB, 96 * MIB), 0, False),  # a growing peak
        ((80 * MIB, 95 * MIB, 95 * MIB), 0, True),  # growth during the warm-up
    ],
)
def test_memory_must_stay_within_the_plan_and_flat_after_the_warm_up(
    peaks: tuple[int, int, int], left: int, flat: bool
) -> None:
    held = (50 * MIB, 60 * MIB, 60 * MIB + left)
    stretches = [Stretch(10, 1, 0, peak, held) for peak, held in zip(peaks, held, strict=True)]
    figures, verdict, in_short = against_plan(PLAN, stretches)
    assert verdict is flat
    assert figures["left_growth_bytes"] == left
    assert f"of 100 MiB planned, grown by {left:,} bytes" in in_short
