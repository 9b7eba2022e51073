"""A running server is checked against its configuration: Triton's config, and the model's own log lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]  # ships no annotations
from triton_llama.status import ModelConfig, read_config
from tritonclient.grpc.model_config_pb2 import ModelConfig as ConfigFile

from perf.environment import ROOT
from perf.servers.triton import (
    Configuration,
    MismatchError,
    ReadBack,
    UnknownLogError,
    check,
    configurations,
)

SETTINGS = (
    'I1121 07:20:42.522317 24337 model.py:333] "llama: settings: model=/models/a, comma/llama, revision=None, '
    "quantization={}, int8_threshold=None, dtype=auto, device=auto, "
    'scheduling={}, slots=None, memory_fraction=0.9"'
)
INT8 = (
    'I1121 07:20:43.180865 24337 model.py:333] "llama: loaded 1,038.2 MiB of weights: linear layers 57 in int8, '
    'outlier threshold 0, exact INT8, 2 terms; everything else float32; on cpu"'
)
ON_GPU = INT8.replace("on cpu", "on cuda:0")
FP16 = (
    'I1121 07:20:43.180865 24337 model.py:333] "llama: loaded 58.0 MiB of weights: linear layers 57 in float16; '
    'everything else float16; on cuda:0"'
)
BF16 = FP16.replace("float16", "bfloat16")
STEPS = 'I1121 07:20:44.180865 24337 model.py:127] "llama: decode steps: {}"'
QUICK = "fused 8-bit product and attention, replayed as 35 CUDA graphs"
BY_KEY = {one.key: one for one in configurations()}
PRODUCT = BY_KEY["inflight_int8"]


def config_of(one: Configuration) -> ModelConfig:
    """Return the config file of a configuration as Triton reports it."""
    folder = ROOT / "model_repository" / "llama"
    path = folder / "config.pbtxt" if one.variant == "default" else folder / "configs" / f"{one.variant}.pbtxt"
    message = text_format.Parse(path.read_text(), ConfigFile())
    return read_config(json_format.MessageToDict(message, preserving_proto_field_name=True))


EXACT = "exact INT8 products of two terms by compiled AVX512-VNNI kernels, launched"


def log(scheduling: str, line: str = INT8, steps: str = EXACT) -> str:
    lines = [SETTINGS.format("int8" if line == INT8 else "none", scheduling), line, STEPS.format(steps)]
    return "\n".join(["starting", *lines, "ready"])


def test_the_model_s_log_lines_are_parsed() -> None:
    found = ReadBack.of(config_of(PRODUCT), log("inflight"))
    assert (found.weights_mib, found.dtype, sorted(found.dtypes)) == (1038.2, "float32", ["int8"])
    assert found.loaded.startswith("loaded 1,038.2 MiB of weights")
    assert found.loaded.endswith("; everything else float32; on cpu")
    assert (found.settings["scheduling"], found.settings["memory_fraction"]) == ("inflight", "0.9")
    assert "/models" not in str(found), "paths of this machine are left out"


@pytest.mark.parametrize("said", ["", f"{SETTINGS}\n", f"{SETTINGS}\n{INT8}\n{INT8}\n"])
def test_a_log_without_the_lines_or_of_two_instances_is_an_error(said: str) -> None:
    with pytest.raises(UnknownLogError, match="lines of the server's log match"):
        ReadBack.of(config_of(PRODUCT), said)


@pytest.mark.parametrize("one", configurations(), ids=lambda one: one.key)
def test_every_configuration_agrees_with_its_config_file(one: Configuration) -> None:
    config = config_of(one)
    assert (config.max_batch_size, config.dynamic_batching) == (one.max_batch_size, one.dynamic_batching)
    assert config.parameters["scheduling"] == one.scheduling
    quantization = one.environment.get("LLAMA_QUANTIZATION", config.parameters["quantization"])
    assert (quantization == "int8") == (one.weights == "int8")
    if one.variant != "default":
        assert config.parameters.get("dtype", "float16") == "float16"


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (BY_KEY["batched_int8"], log("batch")),
        (BY_KEY["inflight_bf16"], log("inflight", BF16, "on the CPU, launched")),
        # A head in floats and stock kernels, as on a GPU.
        (PRODUCT, log("inflight", ON_GPU.replace("57 in int8", "1 in float32, 56 in int8"), "stock kernels, launched")),
        (replace(PRODUCT, quick=True), log("inflight", steps=QUICK)),
    ],
)
def test_the_configuration_itself_passes(one: Configuration, said: str) -> None:
    check(one, ReadBack.of(config_of(one), said))


FELL_BACK = r"naive_fp16 .*max_batch_size is 32, not 1; dynamic_batching is True"
LIMITED = replace(PRODUCT, environment={"LLAMA_MAX_MODEL_LEN": "1024"})
WIDENED = "INT8 weights widened to float32: bits depend on the batch, launched"
GRAPHS_ALONE = "fused attention, replayed as 35 CUDA graphs"


@pytest.mark.parametrize(
    ("one", "config", "said", "message"),
    [
        (BY_KEY["naive_fp16"], config_of(PRODUCT), log("batch", FP16), FELL_BACK),
        # A setting of the environment overrides the config.
        (BY_KEY["batched_fp16"], None, log("inflight", FP16), r"scheduling is inflight, not batch$"),
        (LIMITED, None, log("inflight"), r"max_model_len is None, not 1024$"),
        (BY_KEY["batched_int8"], None, log("batch", FP16), "the dtypes of linear layers is"),
        (BY_KEY["inflight_bf16"], None, log("inflight", FP16), "the dtypes of linear layers is"),
        (PRODUCT, replace(config_of(PRODUCT), decoupled=True), log("inflight"), "decoupled is True"),
        (PRODUCT, None, log("inflight", ON_GPU, QUICK), f"the decode steps are {QUICK}, not stock ones$"),
        *(
            (PRODUCT, None, log("inflight", steps=steps), f"the decode steps are {steps}, not exact INT8 ones$")
            for steps in ("stock kernels, launched", f"exact INT8, two terms, oneDNN with 7-bit terms; {WIDENED}")
        ),
        *(
            (replace(PRODUCT, quick=True), None, log("inflight", steps=steps), f"steps are {steps}, not quick ones$")
            for steps in (GRAPHS_ALONE, "fused 8-bit product and attention, launched")
        ),
    ],
)
def test_another_server_than_the_configuration_is_refused(
    one: Configuration, config: ModelConfig | None, said: str, message: str
) -> None:
    with pytest.raises(MismatchError, match=message):
        check(one, ReadBack.of(config or config_of(one), said))
