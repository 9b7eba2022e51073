"""A server that isn't what it is called is never measured: the config that runs, and the model's own lines."""

from __future__ import annotations

import dataclasses

import pytest
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]  # ships no annotations
from triton_llama.status import ModelConfig, read_config
from tritonclient.grpc.model_config_pb2 import ModelConfig as ConfigFile

from perf.article.serving import MismatchError, check
from perf.article.subjects import Subject, subjects
from perf.environment import ROOT
from perf.servers.triton import Loaded, ReadBack, UnknownLogError

SETTINGS = (
    'I1121 07:20:42.522317 24337 model.py:333] "llama: settings: model=/models/a, comma/llama, revision=None, '
    "quantization={}, int8_threshold=None, dtype=auto, device=auto, "
    'scheduling={}, slots=None, memory_fraction=0.9"'
)
INT8 = (
    'I1121 07:20:43.180865 24337 model.py:333] "llama: loaded 1,038.2 MiB of weights: linear layers 1 in float32, '
    '56 in int8, outlier threshold 0; everything else float32; on cpu"'
)
FP16 = (
    'I1121 07:20:43.180865 24337 model.py:333] "llama: loaded 58.0 MiB of weights: linear layers 57 in float16; '
    'everything else float16; on cuda:0"'
)


def subject(key: str) -> Subject:
    (found,) = [one for one in subjects() if one.key == key]
    return found


def config_of(one: Subject) -> ModelConfig:
    """Return the config file of a subject in the form in which Triton tells it."""
    folder = ROOT / "model_repository" / "llama"
    path = folder / "config.pbtxt" if one.variant == "default" else folder / "configs" / f"{one.variant}.pbtxt"
    message = text_format.Parse(path.read_text(), ConfigFile())
    return read_config(json_format.MessageToDict(message, preserving_proto_field_name=True))


STEPS = 'I1121 07:20:44.180865 24337 model.py:127] "llama: decode steps: {}"'


def facts(quantization: str, scheduling: str, line: str, steps: str = "stock kernels, launched") -> Loaded:
    said = [SETTINGS.format(quantization, scheduling), line, STEPS.format(steps)]
    return Loaded.of("\n".join(["starting", *said, "ready"]))


def test_the_model_s_own_lines_are_read() -> None:
    found = facts("int8", "inflight", INT8)
    assert (found.weights_mib, found.dtype, found.device) == (1038.2, "float32", "cpu")
    assert found.linears == {"float32": 1, "int8": 56}
    assert found.line.startswith("loaded 1,038.2 MiB of weights")
    assert found.line.endswith("; everything else float32; on cpu")
    assert found.settings["scheduling"] == "inflight"
    assert found.settings["memory_fraction"] == "0.9"


def test_no_path_of_this_machine_gets_into_a_result() -> None:
    found = facts("int8", "inflight", INT8)
    assert "/models" not in str(found)


@pytest.mark.parametrize("log", ["", f"{SETTINGS}\n", f"{SETTINGS}\n{INT8}\n{INT8}\n"])
def test_a_log_without_the_lines_or_of_two_instances_is_an_error(log: str) -> None:
    with pytest.raises(UnknownLogError, match="lines of the server's log match"):
        Loaded.of(log)


@pytest.mark.parametrize("one", subjects(), ids=lambda one: one.key)
def test_every_subject_is_what_its_config_says(one: Subject) -> None:
    config = config_of(one)
    assert (config.max_batch_size, config.dynamic_batching, config.parameters["scheduling"]) == (
        one.max_batch_size,
        one.dynamic_batching,
        one.scheduling,
    )
    quantization = one.environment.get("LLAMA_QUANTIZATION", config.parameters["quantization"])
    assert (quantization == "int8") == (one.weights == "int8")
    if one.variant != "default":
        assert config.parameters.get("dtype", "float16") == "float16"


def test_the_subject_itself_passes() -> None:
    one = subject("batched_int8")
    check(one, ReadBack(config_of(one), facts("int8", "batch", INT8)))
    one = subject("naive_fp16")
    check(one, ReadBack(config_of(one), facts("none", "batch", FP16)))


def test_a_config_that_triton_fell_back_to_is_noticed() -> None:
    one = subject("naive_fp16")
    with pytest.raises(MismatchError, match=r"naive_fp16 .*max_batch_size is 32, not 1; dynamic_batching is True"):
        check(one, ReadBack(config_of(subject("inflight_int8")), facts("none", "batch", FP16)))


def test_a_setting_of_the_environment_that_beats_the_config_is_noticed() -> None:
    one = subject("batched_fp16")
    with pytest.raises(MismatchError, match=r"scheduling is inflight, not batch$"):
        check(one, ReadBack(config_of(one), facts("none", "inflight", FP16)))


QUICK = "fused 8-bit product and attention, replayed as 35 CUDA graphs"


@pytest.mark.parametrize(
    ("steps", "quick"),
    [
        (QUICK, False),
        ("stock kernels, launched", True),
        ("fused attention, replayed as 35 CUDA graphs", True),
        ("fused 8-bit product and attention, launched", True),
    ],
)
def test_steps_that_were_not_asked_for_are_noticed(steps: str, quick: bool) -> None:
    one = dataclasses.replace(subject("inflight_int8"), quick=quick)
    with pytest.raises(
        MismatchError, match=rf"the decode steps are {steps}, not {'quick' if quick else 'stock'} ones$"
    ):
        check(one, ReadBack(config_of(one), facts("int8", "inflight", INT8, steps)))


def test_quick_steps_pass() -> None:
    one = dataclasses.replace(subject("inflight_int8"), quick=True)
    check(one, ReadBack(config_of(one), facts("int8", "inflight", INT8, QUICK)))


def test_a_longer_context_than_the_subject_s_is_noticed() -> None:
    one = dataclasses.replace(subject("inflight_int8"), environment={"LLAMA_MAX_MODEL_LEN": "1024"})
    with pytest.raises(MismatchError, match=r"max_model_len is None, not 1024$"):
        check(one, ReadBack(config_of(one), facts("int8", "inflight", INT8)))


def test_weights_of_another_format_are_noticed() -> None:
    for key, line in (("batched_fp16", INT8), ("batched_int8", FP16)):
        with pytest.raises(MismatchError, match="the dtypes of linear layers is"):
            check(subject(key), ReadBack(config_of(subject(key)), facts("none", "batch", line)))


def test_a_streaming_config_is_noticed() -> None:
    one = subject("inflight_int8")
    with pytest.raises(MismatchError, match="decoupled is True"):
        check(one, ReadBack(dataclasses.replace(config_of(one), decoupled=True), facts("int8", "inflight", INT8)))
