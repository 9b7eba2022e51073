"""The command lines of `make bench` and `make sweep`: every mistake is one line, before anything is measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from perf.bench import sweep
from perf.bench.options import CONCURRENCY, SECTIONS, parse


def test_a_plain_run_measures_every_section() -> None:
    options = parse([])
    assert options.sections == SECTIONS
    assert (options.concurrency, options.without, options.model) == (CONCURRENCY, (), None)
    assert options.given == ()


def test_the_given_options_repeat_the_run() -> None:
    line = ["--concurrency", "8", "--threads", "63", "--only", "peers", "--without", "vllm"]
    given = parse([*line, "--budget", "5"]).given
    assert shlex.join(given) == shlex.join(line)
    assert parse([*given]).given == given


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
def test_a_mistake_is_refused_in_a_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_s_folder_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert parse(["--model", str(tmp_path)]).model == tmp_path


def test_a_plain_sweep_measures_three_servers() -> None:
    options = sweep.parse([])
    assert options.servers[:2] == ("inflight_int8", "batched_int8")
    assert options.servers[2] in ("naive_fp16", "naive_fp32")
    assert (options.command, options.model) == ("make sweep", None)


def test_the_given_options_repeat_the_sweep() -> None:
    options = sweep.parse(["inflight_int8", "naive_fp16", "--threads", "63", "--budget", "5"])
    assert options.servers == ("inflight_int8", "naive_fp16")
    assert options.command == "make sweep 'SWEEP=inflight_int8 naive_fp16 --threads 63'"


def test_a_higher_concurrency_gets_more_seconds_up_to_a_bound() -> None:
    seconds = [sweep.seconds(number) for number in sweep.CONCURRENCIES]
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
def test_a_mistake_of_a_sweep_is_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
