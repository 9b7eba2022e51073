"""Loads with LoRA adapters, steps with them, and the table of what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llama_engine.checkpoint.architecture import read_architecture
from llama_engine.checkpoint.lora import read_adapter
from transformers import LlamaConfig

from perf import adapters
from perf.bench import lora_steps
from perf.bench.cases import CASES
from perf.bench.lora import MIXES
from perf.checkpoint import EMBEDDED
from perf.load.protocols import Protocol, Request, Target, body
from perf.lora_report import cost, lora
from perf.results_file import RESULTS, Result, Results, read
from perf.table import markdown


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(adapters, "ROOT", tmp_path)
    monkeypatch.setattr(adapters, "FOLDER", tmp_path / "bench")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_engine_reads_eight_different_adapters_of_rank_16(project: Path) -> None:
    adapters.with_adapters("tiny", lambda: EMBEDDED)
    architecture = read_architecture(LlamaConfig.from_pretrained(EMBEDDED), "the model")
    folders = [project / module.partition("=")[2] for module in adapters.modules("tiny")]
    read = [read_adapter(folder, architecture, 16) for folder in folders]
    assert {adapter.rank for adapter in read} == {16}
    assert len({adapter.digest for adapter in read}) == 8
    assert {len(layer) for layer in read[0].layers} == {7}


@pytest.mark.parametrize(
    ("protocol", "field", "base"), [("triton_stream", "lora_name", None), ("openai_completions", "model", "llama")]
)
def test_a_request_names_its_adapter_as_the_protocol_does(protocol: Protocol, field: str, base: str | None) -> None:
    target = Target("ours", protocol, "", "llama")
    assert json.loads(body(target, Request("a", 1, adapter="lora3")))[field] == "lora3"
    assert json.loads(body(target, Request("a", 1))).get(field) == base


def test_ours_with_and_without_adapters_take_turns() -> None:
    cases = [case for case in CASES["lora"](None) if case.loads[0].key.startswith("lora/small/none/")]
    ours = [case.server.key.endswith("adapters") for case in cases if case.server.key.startswith("triton_llama")]
    assert ours == [False, True, True, False, False, True, True, False, False, True]


def test_a_cost_is_the_mean_of_the_pairs_differences() -> None:
    assert cost([1.0, 2.0], [1.1, 2.6]) == {"mean": 0.2, "standard_error": 0.1}
    assert cost([2.0], [2.1]) == {"mean": 0.05}


def row(server: str, mix: str, number: int, rate: float) -> dict[str, Any]:
    load = {"mix": mix, "concurrency": 8, "round": number}
    head = {"server": server, "title": server, "weights": "INT8", "model": "M"}
    return {**head, "load": load, "tokens_per_second": rate}


def table(*rows: dict[str, Any]) -> str:
    measurements = {str(number): entry for number, entry in enumerate(rows)}
    return markdown(
        Result("x.json", {**read(RESULTS / "bench-article.json").content, "measurements": measurements}), lora
    )


def test_costs_of_a_server_are_over_its_own_rate_in_the_same_round() -> None:
    ours, with_adapters = "triton_llama_int8", "triton_llama_int8_adapters"
    text = table(
        *(row(ours, "none", number, rate) for number, rate in enumerate((100.0, 200.0))),
        *(row(with_adapters, "none", number, rate) for number, rate in enumerate((100.0, 200.0))),
        *(row(with_adapters, "eight", number, rate) for number, rate in enumerate((80.0, 125.0))),
        row("vllm", "none", 5, 50.0),
        row("vllm_adapters", "one", 5, 25.0),
    )
    assert "| M | 8 | 150 | +0.0 ± 0.0 % | +42.5 ± 17.5 % | 50.0 | +100.0 % |" in text


def test_steps_are_measured_and_have_a_table(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_steps, "MODELS", {"tiny": (lambda: EMBEDDED, 1)})
    results = Results(project / "bench.json", "bench", {}, "make bench")
    lora_steps.measure(results, [2], turns=2)
    (measurement,) = results.measurements.values()
    assert set(measurement["costs"]) == set(MIXES)
    assert f"| {measurement['load']['concurrency']} | " in table(dict(measurement))
