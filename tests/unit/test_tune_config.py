"""`make tune`: its options; the edited config has the new settings and is otherwise unchanged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.checkpoint import EMBEDDED
from perf.load.arrivals import Closed, Poisson
from perf.tune.__main__ import main, parse, trial
from perf.tune.config import ConfigError, edited, knobs_of, parsed
from perf.tune.points import Knobs

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "llama"
FILES = {path.stem: path for path in (MODEL / "config.pbtxt", *MODEL.glob("configs/*.pbtxt"))}
BATCHED = sorted(FILES.keys() - {"naive_fp16"})


def _read(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize(
    "knobs",
    [Knobs(0, (16,), 16, 64), Knobs(50_000, (4, 8, 16, 32, 64, 128), 128, 2048), Knobs(1, (1,), 1, 1)],
    ids=str,
)
def test_a_config_gets_exactly_the_settings_and_only_their_lines_change(name: str, knobs: Knobs) -> None:
    text = FILES[name].read_text()
    assert edited(text, knobs_of(parsed(text))) == text
    wanted = _read(text)
    wanted.max_batch_size = knobs.slots
    wanted.dynamic_batching.preferred_batch_size[:] = knobs.preferred_batch_size
    wanted.dynamic_batching.max_queue_delay_microseconds = knobs.max_queue_delay_microseconds
    wanted.parameters["prefill_tokens"].string_value = str(knobs.prefill_tokens)
    result = edited(text, knobs)
    assert _read(result) == wanted
    before, after = text.splitlines(), result.splitlines()
    changed = {line.split(":")[0].strip() for line in set(before) - set(after)}
    assert changed <= {"max_batch_size", "preferred_batch_size", "max_queue_delay_microseconds"}
    assert len(after) == len(before) + 1
    # Again, and back.
    again = replace(knobs, prefill_tokens=512)
    assert knobs_of(parsed(edited(result, again))) == again
    assert edited(result, again).count("prefill_tokens") == 1


SMALL = 'max_batch_size: 8\ndynamic_batching {\n  max_queue_delay_microseconds: 4 }\nname: "max_batch_size: 2"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batch_sizes: 8", r"Triton could not read the config: 1:\d+"),
        ("max_batch_size: 8", "the config has no dynamic_batching"),
        (SMALL + 'parameters: { key: "slots", value: { string_value: "9" } }\n', "remove it"),
        (SMALL, "can't be changed to delay 6 us, preferred 5, slots 5, prefill 64 in place: write"),
    ],
)
def test_a_form_that_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        edited(text, Knobs(6, (5,), 5, 64))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--slo-p95-ms=2000 --budget=0.5 --resume", "make tune SLO_P95_MS=2000 BUDGET=0.5"),
        (
            "--slo-p95-ms 2000 --budget 15 --model org/llama --mix geometric --rate 2 --output /a/b/c.json",
            "make tune SLO_P95_MS=2000 BUDGET=15 MODEL=org/llama 'TUNE=--mix geometric --rate 2.0'",
        ),
    ],
)
def test_the_command_repeats_the_run(arguments: str, expected: str) -> None:
    assert parse(arguments.split(), {}).command == expected


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        (["--rate=1", "--concurrency=2"], "", "not allowed with argument"),
        ([], "LLAMA_SLOTS", "the environment variable LLAMA_SLOTS"),
    ],
)
def test_two_loads_or_a_variable_that_overrides_the_config_are_refused(
    arguments: list[str], variable: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--slo-p95-ms=9", *arguments], {variable: "many"})
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_load_is_closed_unless_a_rate_is_given() -> None:
    closed = trial(parse(["--slo-p95-ms", "9", "--concurrency", "5"], {}), str(EMBEDDED))
    assert (closed.arrivals, closed.warmup, len(closed.requests)) == (Closed(5), 5, 25)
    opened = trial(parse(["--slo-p95-ms", "9", "--rate", "2.5", "--requests", "7"], {}), str(EMBEDDED))
    assert (opened.arrivals, opened.warmup, len(opened.requests)) == (Poisson(2.5, seed=0), 16, 23)
    assert (opened.load["rate_per_second"], opened.load["requests"]) == (2.5, 7)


@pytest.mark.parametrize("wrong", [["--variant", "batched"], ["--model", "models/typo"]])
def test_an_unknown_variant_or_model_is_one_line_on_stderr(
    wrong: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EMBEDDED.parents[1])
    assert main(["--slo-p95-ms", "9", "--model", os.fspath(EMBEDDED), *wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tune: ")
    assert wrong[1] in line
