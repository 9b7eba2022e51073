"""The edited config has the new settings and is otherwise unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.tune.config import ConfigError, Subject, edited, knobs_of, parsed
from perf.tune.points import Knobs

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "llama"
FILES = {path.stem: path for path in (MODEL / "config.pbtxt", *MODEL.glob("configs/*.pbtxt"))}
BATCHED = sorted(FILES.keys() - {"naive_fp16"})

SMALL = 'max_batch_size: 8\ndynamic_batching { }\nparameters: { key: "scheduling", value: { string_value: "batch" } }\n'


def _read(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(0, (16,), 16, 64),
        Knobs(50_000, (4, 8, 16, 32, 64, 128), 128, 2048),
        Knobs(1, (1,), 1, 1),
    ],
)
def test_a_config_with_a_batcher_gets_exactly_the_settings(name: str, knobs: Knobs) -> None:
    text = FILES[name].read_text()
    wanted = _read(text)
    wanted.max_batch_size = knobs.slots
    wanted.dynamic_batching.preferred_batch_size[:] = knobs.preferred_batch_size
    wanted.dynamic_batching.max_queue_delay_microseconds = knobs.max_queue_delay_microseconds
    wanted.parameters["prefill_tokens"].string_value = str(knobs.prefill_tokens)
    assert _read(edited(text, knobs)) == wanted


def test_a_config_without_a_batcher_gets_slots_and_prefill_and_no_batcher() -> None:
    text = FILES["naive_fp16"].read_text()
    wanted = _read(text)
    wanted.max_batch_size = 4
    wanted.parameters["prefill_tokens"].string_value = "64"
    result = edited(text, Knobs(None, None, 4, 64))
    assert _read(result) == wanted
    assert not _read(result).HasField("dynamic_batching")
    with pytest.raises(ConfigError, match="neither added to a config nor removed"):
        edited(text, Knobs(0, (4,), 4, 64))


def test_the_repository_has_the_five_configs_of_these_tests() -> None:
    assert set(FILES) == {"config", "streaming", "batched_int8", "batched_fp16", "naive_fp16"}


@pytest.mark.parametrize("name", FILES)
def test_a_configs_own_settings_leave_its_text_unchanged(name: str) -> None:
    text = FILES[name].read_text()
    assert edited(text, knobs_of(parsed(text))) == text


@pytest.mark.parametrize("name", BATCHED)
def test_only_the_lines_of_the_settings_change(name: str) -> None:
    before = FILES[name].read_text().splitlines()
    after = edited(FILES[name].read_text(), Knobs(5, (2, 12), 12, 100)).splitlines()
    changed = {line.split(":")[0].strip() for line in set(before) - set(after)}
    assert changed == {"max_batch_size", "preferred_batch_size", "max_queue_delay_microseconds"}
    assert after[-1] == 'parameters: { key: "prefill_tokens", value: { string_value: "100" } }'
    assert len(after) == len(before) + 1


def test_a_config_can_be_edited_again_and_back() -> None:
    text = FILES["config"].read_text()
    once = edited(text, Knobs(5, (2, 12), 12, 100))
    knobs = Knobs(7, (3,), 3, 512)
    assert knobs_of(parsed(edited(once, knobs))) == knobs
    assert edited(once, knobs).count("prefill_tokens") == 1


def test_an_empty_batcher_gets_its_fields() -> None:
    # Triton's default preferred size is the full batch.
    assert knobs_of(parsed(SMALL)) == Knobs(0, (8,), 8, 512)
    result = edited(SMALL, Knobs(100, (2, 4), 4, 512))
    assert knobs_of(parsed(result)) == Knobs(100, (2, 4), 4, 512)


def test_comments_and_strings_stay_unchanged() -> None:
    text = (
        '# max_batch_size: 1\nname: "max_batch_size: 2"\nmax_batch_size: 8 # max_batch_size: 3\n'
        "dynamic_batching {\n  # preferred_batch_size: [ 9 ]\n  max_queue_delay_microseconds: 4 }\n"
    )
    result = edited(text, Knobs(6, (5,), 5, 512))
    assert result == (
        '# max_batch_size: 1\nname: "max_batch_size: 2"\nmax_batch_size: 5 # max_batch_size: 3\n'
        "dynamic_batching {\n  preferred_batch_size: [ 5 ]\n"
        "\n  # preferred_batch_size: [ 9 ]\n  max_queue_delay_microseconds: 6 }\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "dynamic_batching { preferred_batch_size: 4 preferred_batch_size: 8 }\nmax_batch_size: 8\n",
        "dynamic_batching { }\n",
        SMALL + 'parameters: { value: { string_value: "9" }, key: "prefill_tokens" }\n',
    ],
)
def test_a_form_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="can't be changed to delay 6 us, preferred 5, slots 5, prefill 64 in place"):
        edited(text, Knobs(6, (5,), 5, 64))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batch_sizes: 8", r"Triton could not read the config: 1:\d+"),
        (SMALL + 'parameters: { key: "slots", value: { string_value: "9" } }\n', "remove it"),
    ],
)
def test_a_syntax_error_and_a_parameter_slots_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        knobs_of(parsed(text))


def test_the_copied_repository_has_the_changed_config_and_the_original_does_not(tmp_path: Path) -> None:
    before = FILES["batched_int8"].read_text()
    subject = Subject.of("batched_int8", str(tmp_path), threads=1)
    knobs = Knobs(3, (2,), 2, 64)
    with subject.repository(knobs) as repository:
        copied = (repository / "llama" / "configs" / "batched_int8.pbtxt").read_text()
        assert (repository / "llama" / "1" / "model.py").is_file()
        assert (repository / "llama" / "config.pbtxt").read_text() == FILES["config"].read_text()
    assert knobs_of(parsed(copied)) == knobs
    assert not repository.exists()
    assert FILES["batched_int8"].read_text() == before


@pytest.mark.parametrize(("name", "weights"), [("default", "INT8"), ("naive_fp16", "FP16")])
def test_the_weights_precision_is_the_configs(name: str, weights: str) -> None:
    assert Subject.of(name, "anything", threads=1).weights == weights
