"""`make bench`: its checkpoints, the prompts of its loads, and what a server's loads leave in the result."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llama_engine.text.tokenizer import read_tokenizer
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from triton_local.server import LocalTriton

from models.smollm2 import fetch
from perf import checkpoint
from perf.bench import drafts, measure, prefixes
from perf.bench.__main__ import measure_case, parse
from perf.bench.cases import CASES
from perf.bench.measure import Bench
from perf.checkpoint import EMBEDDED
from perf.command import Budget
from perf.load.protocols import Request, Target
from perf.load.records import Record, Run
from perf.load.workload import PROMPT_TOKENS, Load, passages
from perf.results_file import Results
from perf.roofline import DeviceRates, roofline
from perf.servers.running import NotRunError, Running, Server
from perf.servers.triton import read_back

OURS = Target("ours", "triton_generate", "", "llama")
RATES = DeviceRates("cpu", 2, {1: 1e9}, {"fp32": 1e9})
LOADS = [
    passages("ours", "uniform", 2, 4, 4),
    passages("article", "uniform", 2, 8, 150)._replace(perf_analyzer=True),
]

# Loads whose answers a test makes up: the requests aren't sent.
DRIVEN = [LOADS[0]._replace(requests=lambda _: ([Request("a", 4)] * 6, 2))]


def measured(folder: Path, server: Server, loads: Sequence[Load] = LOADS) -> dict[str, Any]:
    results = Results(folder / "bench.json", "bench", {}, "make bench")
    Bench(results, Budget(10.0), RATES).measure(server, EMBEDDED, loads)
    results.finish()
    entries: dict[str, Any] = json.loads((folder / "bench.json").read_text())["measurements"]
    return entries


@contextmanager
def absent(checkpoint: Path, threads: int) -> Iterator[Running]:
    raise NotRunError("vLLM isn't installed")
    yield


def server_of(target: Target, triton: LocalTriton | None = None) -> Server:
    """Return a server that runs already."""

    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Running]:
        pid = os.getpid() if triton is None else triton.pid
        yield Running(target, "make serve", {}, pid, 8.0, triton)

    return Server("ours", "Ours", "int8", start)


def test_each_load_of_a_server_is_measured(triton: LocalTriton, tmp_path: Path) -> None:
    target = Target("ours", "triton_generate", f"http://{triton.http_address}", "llama")
    entries = measured(tmp_path, server_of(target, triton))
    assert list(entries) == ["ours/ours", "article/ours"]
    for measurement in entries.values():
        assert measurement.get("not_run") is None
        assert measurement["errors"] == 0
        assert measurement["tokens_per_second"] > 0
        assert measurement["limit"]["tokens_per_second"] > 0
        assert measurement["memory"]["process_mib"] > measurement["memory"]["weights_mib"]
    assert 1 <= entries["article/ours"]["mean_sequences"] <= 2
    assert 1 <= entries["article/ours"]["mean_batch"] <= 2


def test_mean_length_and_limit_are_of_the_measured_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up's requests are ten times as long."""
    lengths = [100, 100, 10, 10, 10, 10]
    records = tuple(Record(number, number, number + 2.0, (), 100, length) for number, length in enumerate(lengths))
    monkeypatch.setattr(measure, "drive", lambda *_: Run(2, records, 2))
    made = measured(tmp_path, server_of(OURS), DRIVEN)["ours/ours"]
    assert (made["load"]["requests"], made["load"]["mean_output_tokens"]) == (4, 10)
    config = LlamaConfig.from_pretrained(EMBEDDED)
    limit = roofline(config, "int8", RATES, 2, [10] * 4, PROMPT_TOKENS)
    assert made["limit"]["tokens_per_second"] == round(limit.tokens_per_second, 1)


def test_a_server_that_cannot_run_has_its_reason_at_every_load(tmp_path: Path) -> None:
    entries = measured(tmp_path, Server("vllm", "vLLM", "bf16", absent))
    assert [entry["not_run"] for entry in entries.values()] == ["vLLM isn't installed"] * 2
    assert {entry["title"] for entry in entries.values()} == {"vLLM"}


def test_a_server_without_an_answer_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tuple(Record(0.0, 0.0, 1.0, error="HTTP 500") for _ in range(6))
    monkeypatch.setattr(measure, "drive", lambda *_: Run(2, records, 2))
    made = measured(tmp_path, server_of(OURS), DRIVEN)["ours/ours"]
    assert made["not_run"] == "all 4 requests failed: HTTP 500"


def test_a_draft_that_changes_an_answer_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path / "bench.json", "bench", {}, "make bench")
    bench = Bench(results, Budget(10), RATES)
    for key, texts in (("off", "abcd"), ("auto", "abc"), ("wrong", "abx")):
        records = tuple(Record(0.0, 0.0, 1.0, output_tokens=1, text=text) for text in texts)
        monkeypatch.setattr(measure, "drive", lambda *_, records=records: Run(1, records, 1))
        server = replace(server_of(Target(key, "openai_chat", "", "llama")), key=key, same_answers="int8")
        bench.measure(server, EMBEDDED, DRIVEN)
    assert bench.different == ["ours/wrong"]


def test_every_measurement_has_a_key_of_its_own() -> None:
    cases = [case for make in CASES.values() for case in make(None)]
    keys = [f"{load.key}/{case.server.key}" for case in cases for load in case.loads]
    assert len(keys) == len(set(keys)) > 0


def test_a_part_of_a_case_is_merged_into_its_file(tmp_path: Path) -> None:
    for server in ("vllm_int8", "openvino"):
        options = parse(["--only", "smollm2", "--servers", server, "--folder", str(tmp_path), "--model", str(EMBEDDED)])
        # No server starts without time.
        measure_case("smollm2", options, Budget(0.1), RATES)
    entries = json.loads((tmp_path / "bench-smollm2.json").read_text())["measurements"]
    assert {entry["server"] for entry in entries.values()} == {"vllm_int8", "openvino_int8"}


def test_a_measurement_is_not_lost_to_a_run_without_time(tmp_path: Path) -> None:
    results = Results(tmp_path / "bench.json", "bench", {}, "make bench")
    results.add("ours/ours", {"tokens_per_second": 1.0})
    Bench(results, Budget(0.1), RATES).measure(server_of(OURS), EMBEDDED, DRIVEN)
    assert results.measurements["ours/ours"] == {"tokens_per_second": 1.0}


def test_a_server_of_other_weights_is_not_measured(triton: LocalTriton) -> None:
    log = triton.log_text()
    loaded, steps, mebibytes = read_back(log, "int8")
    assert loaded.startswith("loaded ")
    assert "INT8" in steps
    assert mebibytes > 1
    with pytest.raises(NotRunError, match=r"its linear layers are int8, not float32"):
        read_back(log, "fp32")


# The edits are of every function of Python's library, which takes seconds to parse.
@pytest.mark.parametrize("kind", [kind for kind in drafts.KINDS if "edit" not in kind])
def test_no_two_prompts_of_a_kind_of_drafts_are_equal(kind: drafts.Kind) -> None:
    loads = [drafts.load(kind, users).requests(EMBEDDED)[0] for users in drafts.MEASURED]
    prompts = [request.prompt for requests in loads for request in requests if request.turn == 1]
    assert len(set(prompts)) == len(prompts)


def test_chats_have_eight_turns_and_one_system_prompt(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=3072).save_pretrained(tmp_path)
    requests, warmup = prefixes.load("small", "chat", 8, 2).requests(tmp_path)
    assert [request.turn for request in requests[warmup:]] == [*range(1, 9)] * 2
    firsts = [request.prompt for request in requests if request.turn == 1]
    assert len({prompt[: 5 * prefixes.SYSTEM_TOKENS] for prompt in firsts}) == 1
    assert len(set(firsts)) == len(firsts) == 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, vocab_size=3072,
        eos_token_id=None,
    )  # fmt: skip
    return checkpoint.words_checkpoint(config, 64, tmp_path_factory.mktemp("random"))


def test_transformers_finds_every_weight_of_a_random_checkpoint(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    saved = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    assert sorted(saved) == sorted(name for name, _ in model.named_parameters())
    assert model.generation_config.eos_token_id is None
    assert 0.019 < float(model.model.layers[0].mlp.up_proj.weight.detach().std()) < 0.021


def test_text_of_words_becomes_the_same_tokens_again(folder: Path) -> None:
    ids = [4, 5, 3071, 5, 1000]
    text = "".join(map(checkpoint.word, ids))
    assert AutoTokenizer.from_pretrained(folder).decode(ids) == text
    config = LlamaConfig.from_pretrained(folder)
    assert read_tokenizer(folder, config).encode(text) == (config.bos_token_id, *ids)
    assert config.max_position_embeddings == 64


def test_a_default_checkpoint_that_cannot_be_had_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise fetch.FetchError("no index")

    monkeypatch.setattr(fetch, "fetch", fail)
    with pytest.raises(SystemExit, match="SmolLM2-135M-Instruct can't be had: no index; MODEL="):
        checkpoint.smollm2()
