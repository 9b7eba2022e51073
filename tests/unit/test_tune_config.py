"""`make tune`: its options; the edited config has the new settings and is otherwise unchanged."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.checkpoint import EMBEDDED
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import LoadError
from perf.tune.__main__ import main, parse
from perf.tune.config import ConfigError, Subject, edited, knobs_of, parsed
from perf.tune.measuring import Demand
from perf.tune.points import Knobs
from perf.workload import lengths

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "llama"
FILES = {path.stem: path for path in (MODEL / "config.pbtxt", *MODEL.glob("configs/*.pbtxt"))}
BATCHED = sorted(FILES.keys() - {"naive_fp16"})

SMALL = 'max_batch_size: 8\ndynamic_batching { }\nparameters: { key: "scheduling", value: { string_value: "batch" } }\n'


def _read(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize(
    "knobs",
    [Knobs(0, (16,), 16, 64), Knobs(50_000, (4, 8, 16, 32, 64, 128), 128, 2048), Knobs(1, (1,), 1, 1)],
    ids=str,
)
def test_a_config_with_a_batcher_gets_exactly_the_settings_and_only_their_lines_change(name: str, knobs: Knobs) -> None:
    text = FILES[name].read_text()
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
    assert after[len(before) :] == [
        f'parameters: {{ key: "prefill_tokens", value: {{ string_value: "{knobs.prefill_tokens}" }} }}'
    ]
    # Again, and back.
    again = replace(knobs, prefill_tokens=512)
    assert knobs_of(parsed(edited(result, again))) == again
    assert edited(result, again).count("prefill_tokens") == 1


def test_a_config_without_a_batcher_gets_slots_and_prefill_and_no_batcher() -> None:
    text = FILES["naive_fp16"].read_text()
    wanted = _read(text)
    wanted.max_batch_size = 4
    wanted.parameters["prefill_tokens"].string_value = "64"
    assert _read(edited(text, Knobs(None, None, 4, 64))) == wanted
    assert not wanted.HasField("dynamic_batching")
    with pytest.raises(ConfigError, match="neither added to a config nor removed"):
        edited(text, Knobs(0, (4,), 4, 64))


@pytest.mark.parametrize("name", FILES)
def test_a_configs_own_settings_leave_its_text_unchanged(name: str) -> None:
    text = FILES[name].read_text()
    assert edited(text, knobs_of(parsed(text))) == text


def test_an_empty_batcher_gets_its_fields() -> None:
    # Triton's default preferred size is the full batch.
    assert knobs_of(parsed(SMALL)) == Knobs(0, (8,), 8, 512)
    knobs = Knobs(100, (2, 4), 4, 512)
    assert knobs_of(parsed(edited(SMALL, knobs))) == knobs


def test_comments_and_strings_stay_unchanged() -> None:
    text = (
        '# max_batch_size: 1\nname: "max_batch_size: 2"\nmax_batch_size: 8 # max_batch_size: 3\n'
        "dynamic_batching {\n  # preferred_batch_size: [ 9 ]\n  max_queue_delay_microseconds: 4 }\n"
    )
    assert edited(text, Knobs(6, (5,), 5, 512)) == (
        '# max_batch_size: 1\nname: "max_batch_size: 2"\nmax_batch_size: 5 # max_batch_size: 3\n'
        "dynamic_batching {\n  preferred_batch_size: [ 5 ]\n"
        "\n  # preferred_batch_size: [ 9 ]\n  max_queue_delay_microseconds: 6 }\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batch_sizes: 8", r"Triton could not read the config: 1:\d+"),
        (SMALL + 'parameters: { key: "slots", value: { string_value: "9" } }\n', "remove it"),
        (
            "dynamic_batching { preferred_batch_size: 4 preferred_batch_size: 8 }\nmax_batch_size: 8\n",
            "in place: write",
        ),
        ("dynamic_batching { }\n", "can't be changed to delay 6 us, preferred 5, slots 5, prefill 64 in place"),
        (SMALL + 'parameters: { value: { string_value: "9" }, key: "prefill_tokens" }\n', "in place: write"),
    ],
)
def test_a_form_that_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        edited(text, replace(knobs_of(parsed(text)), **asdict(Knobs(6, (5,), 5, 64))))


def test_the_copied_repository_has_the_changed_config_and_the_original_does_not(tmp_path: Path) -> None:
    before = FILES["batched_int8"].read_text()
    knobs = Knobs(3, (2,), 2, 64)
    with Subject.of("batched_int8", str(tmp_path), threads=1).repository(knobs) as repository:
        copied = (repository / "llama" / "configs" / "batched_int8.pbtxt").read_text()
        assert (repository / "llama" / "1" / "model.py").is_file()
        assert (repository / "llama" / "config.pbtxt").read_text() == FILES["config"].read_text()
    assert knobs_of(parsed(copied)) == knobs
    assert not repository.exists()
    assert FILES["batched_int8"].read_text() == before


@pytest.mark.parametrize(("name", "weights"), [("default", "INT8"), ("naive_fp16", "FP16")])
def test_the_weights_precision_is_the_configs(name: str, weights: str) -> None:
    assert Subject.of(name, "anything", threads=1).weights == weights


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--slo-p95-ms 2000", "make tune SLO_P95_MS=2000 BUDGET=30"),
        ("--slo-p95-ms=2000 --budget=0.5 --resume", "make tune SLO_P95_MS=2000 BUDGET=0.5"),
        (
            "--slo-p95-ms 2000 --budget 15 --model org/llama --mix geometric --rate 2 --output /a/b/c.json",
            "make tune SLO_P95_MS=2000 BUDGET=15 MODEL=org/llama 'TUNE=--mix geometric --rate 2.0 --output c.json'",
        ),
    ],
)
def test_the_command_repeats_the_run(arguments: str, expected: str) -> None:
    assert parse(arguments.split(), {}).command == expected


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        ("--slo-p95-ms 0", "", "--slo-p95-ms: must be a number from 1 to 3600000, got '0'"),
        ("--slo-p95-ms nan", "", "--slo-p95-ms: must be a number from 1 to 3600000, got 'nan'"),
        ("--slo-p95-ms fast", "", "--slo-p95-ms: must be a number from 1 to 3600000, got 'fast'"),
        ("--slo-p95-ms 9 --concurrency 0", "", "--concurrency: must be a whole number from 1 to 1024, got '0'"),
        ("--slo-p95-ms 9 --rate 1 --concurrency 2", "", "not allowed with argument"),
        ("--slo-p95-ms 9 --mix mixed", "", "invalid choice: 'mixed'"),
        ("--mix uniform", "", "the following arguments are required: --slo-p95-ms"),
        ("--slo-p95-ms 9", "LLAMA_SLOTS", "the environment variable LLAMA_SLOTS"),
        ("--slo-p95-ms 9", "OMP_NUM_THREADS", "the environment variable OMP_NUM_THREADS"),
    ],
)
def test_a_value_out_of_bounds_or_a_variable_that_overrides_the_config_is_refused(
    arguments: str, variable: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments.split(), {variable: "many"} if variable else {})
    assert end.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_load_is_closed_unless_a_rate_is_given() -> None:
    closed = parse(["--slo-p95-ms", "9", "--concurrency", "5"], {"OMP_NUM_THREADS": "3"})
    assert closed.demand == Demand("uniform", Closed(5), requests=20, warmup=5, output_tokens=200, timeout=1800.0)
    assert (closed.threads, closed.demand.most_at_once) == (3, 5)
    opened = parse(["--slo-p95-ms", "9", "--rate", "2.5", "--requests", "7"], {})
    assert opened.demand.arrivals == Poisson(2.5, seed=0)
    assert (opened.demand.requests, opened.demand.most_at_once) == (7, None)


@pytest.mark.parametrize("wrong", [["--variant", "batched"], ["--model", "models/typo"]])
def test_an_unknown_variant_or_model_is_one_line_on_stderr(
    wrong: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EMBEDDED.parents[1])
    assert main(["--slo-p95-ms", "9", "--model", str(EMBEDDED), *wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tune: ")
    assert wrong[1] in line


def test_a_dead_load_generator_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(_: object) -> int:
        raise LoadError("the load generator ended with code -9: nothing on stderr")

    monkeypatch.setattr("perf.tune.__main__._tune", tune)
    assert main(["--slo-p95-ms", "9"]) == 2
    assert capsys.readouterr().err == "tune: the load generator ended with code -9: nothing on stderr\n"


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_warm_up_leaves_the_measured_lengths_unchanged(warmup: int) -> None:
    sent = Demand("uniform", Closed(4), requests=8, warmup=warmup, output_tokens=10, timeout=60.0).sent(EMBEDDED)
    assert [request.output_tokens for request in sent[warmup:]] == lengths("uniform", 8, 10)
