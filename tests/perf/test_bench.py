"""`make bench`: what a server's loads leave in the result."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from triton_local.server import LocalTriton

from perf.bench.__main__ import chosen
from perf.bench.loads import LARGE, SECTIONS, Bench, Load
from perf.bench.measure import entry
from perf.checkpoint import EMBEDDED
from perf.command import Budget
from perf.load.protocols import Request, Target
from perf.load.records import Record, Run
from perf.results_file import Results
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates
from perf.servers.baselines import servers
from perf.servers.running import NotRunError, Running, Server
from perf.workload import PROMPT_TOKENS

RATES = DeviceRates("cpu", 2, {1: 1e9}, {"fp32": 1e9})
LOADS = [Load("ours", "uniform", 2, 4, 4), Load("article", "uniform", 2, 8, 150, "perf_analyzer")]


def measured(folder: Path, server: Server, minutes: float = 10.0) -> dict[str, Any]:
    results = Results(folder / "bench.json", "bench", {}, "make bench")
    Bench(results, Budget(minutes), RATES).measure([server], EMBEDDED, LOADS)
    results.finish()
    entries: dict[str, Any] = json.loads((folder / "bench.json").read_text())["measurements"]
    return entries


@contextmanager
def absent(checkpoint: Path, threads: int) -> Iterator[Running]:
    raise NotRunError("vLLM isn't installed")
    yield


@pytest.fixture
def ours(triton: LocalTriton) -> Server:
    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Running]:
        target = Target("ours", "triton_generate", f"http://{triton.http_url}", "llama")
        yield Running(target, "make serve", {}, triton.pid, 8.0, triton)

    return Server("ours", "Ours", "int8", start)


def test_each_load_of_a_server_is_measured(ours: Server, tmp_path: Path) -> None:
    entries = measured(tmp_path, ours)
    assert list(entries) == ["ours/ours", "article/ours"]
    for measurement in entries.values():
        assert measurement["errors"] == 0
        assert measurement["tokens_per_second"] > 0
        assert measurement["limit"]["tokens_per_second"] > 0
        assert measurement["memory"]["process_mib"] > measurement["memory"]["weights_mib"]
    assert 1 <= entries["article/ours"]["mean_rows"] <= 2
    assert 1 <= entries["article/ours"]["mean_batch"] <= 2


def test_servers_take_turns_at_each_load(ours: Server, tmp_path: Path) -> None:
    loads = [Load(key, "uniform", 1, 1, 2) for key in ("first", "second")]
    results = Results(tmp_path / "bench.json", "bench", {}, "make bench")
    Bench(results, Budget(10.0), RATES).measure([replace(ours, key="a"), replace(ours, key="b")], EMBEDDED, loads)
    results.finish()
    entries: dict[str, Any] = json.loads((tmp_path / "bench.json").read_text())["measurements"]
    assert list(entries) == ["first/a", "first/b", "second/a", "second/b"]


def test_mean_length_and_limit_are_of_the_measured_requests() -> None:
    """The warm-up's requests are ten times as long."""
    lengths = [100, 100, 10, 10, 10, 10]
    requests = [Request("a", length) for length in lengths]
    records = tuple(Record(number, number, number + 2.0, (), 100, length) for number, length in enumerate(lengths))
    server = Server("ours", "Ours", "int8", absent)
    running = Running(Target("ours", "triton_generate", "", "llama"), "make serve", {}, os.getpid(), 8.0)
    made: Any = entry(server, running, EMBEDDED, "uniform", Run(2, records, 2), requests, RATES, {})
    assert (made["load"]["requests"], made["load"]["mean_output_tokens"]) == (4, 10)
    config = LlamaConfig.from_pretrained(EMBEDDED)
    limit = roofline(config, "int8", RATES, 2, [10] * 4, PROMPT_TOKENS, steady=True)
    assert made["limit"]["tokens_per_second"] == round(limit.tokens_per_second, 1)


def test_a_server_that_cannot_run_has_its_reason_at_every_load(tmp_path: Path) -> None:
    entries = measured(tmp_path, Server("vllm", "vLLM", "bf16", absent))
    assert [entry["not_run"] for entry in entries.values()] == ["vLLM isn't installed"] * 2
    assert {entry["title"] for entry in entries.values()} == {"vLLM"}


def test_no_server_is_started_when_the_time_is_over(tmp_path: Path) -> None:
    entries = measured(tmp_path, Server("vllm", "vLLM", "bf16", absent), minutes=0.1)
    assert {entry["not_run"] for entry in entries.values()} == {"6 s are left of --budget"}


@pytest.mark.parametrize("section", [*SECTIONS, "large"])
def test_every_measurement_has_a_key_of_its_own(section: str) -> None:
    loads = SECTIONS.get(section, LARGE)
    keys = [f"{load.key}/{server.key}" for server in chosen(section, servers()) for load in loads]
    assert len(keys) == len(set(keys)) > 0
