"""What a run of the benchmarks is told, and what it answers to nonsense: one line, before anything is measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from perf.article.sweep import CONCURRENCIES
from perf.bench import sweep
from perf.bench.options import CONCURRENCY, SECTIONS, parse


def test_a_plain_run_leaves_something_out() -> None:
    options = parse([])
    assert options.sections == SECTIONS
    assert (options.concurrency, options.without, options.model) == (CONCURRENCY, (), None)
    assert options.said == ()


def test_what_was_said_makes_another_run() -> None:
    line = ["--concurrency", "8", "--threads", "63", "--only", "peers", "--without", "vllm"]
    said = parse([*line, "--budget", "5"]).said
    assert shlex.join(said) == shlex.join(line)
    assert parse([*said]).said == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "0 is out of bounds: more than 0"),
        (["--budget", "nan"], "nan is out of bounds: more than 0"),
        (["--concurrency", "0"], "0 is out of bounds: at least 1"),
        (["--threads", "-1"], "-1 is out of bounds: at least 1"),
        (["--slo-ttft-ms", "-5"], "-5 is out of bounds: more than 0"),
        (["--only", "peer"], "invalid choice: 'peer'"),
        (["--without", "vlm"], "--without has 'vlm': known are triton_llama_int8, "),
        (["--model", "no/such/folder"], "argument --model: no/such/folder is not a folder with a config.json"),
    ],
)
def test_nonsense_is_measured(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_s_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert parse(["--model", str(tmp_path)]).model == tmp_path


def test_a_sweep_without_servers_measures_nothing() -> None:
    options = sweep.parse([])
    assert options.servers[:2] == ("inflight_int8", "batched_int8")
    assert options.servers[2] in ("naive_fp16", "naive_fp32")
    assert (options.command, options.model) == ("make sweep", None)


def test_what_was_said_makes_another_sweep() -> None:
    options = sweep.parse(["inflight_int8", "naive_fp16", "--threads", "63", "--budget", "5"])
    assert options.servers == ("inflight_int8", "naive_fp16")
    assert options.command == "make sweep 'SWEEP=inflight_int8 naive_fp16 --threads 63'"


def test_more_at_a_time_get_no_more_seconds_or_without_bound() -> None:
    seconds = [sweep.seconds(number) for number in CONCURRENCIES]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] <= 600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inflight_int9"], "there is no server 'inflight_int9': known are naive_fp16, "),
        (["--budget", "-1"], "-1 is out of bounds: more than 0"),
        (["--model", "no/such/folder"], "argument --model: no/such/folder is not a folder with a config.json"),
    ],
)
def test_a_sweep_of_nonsense_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
