"""Every family that the engine serves computes what transformers' own class does, and in INT8 keeps its bits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.engines import attention_by_sequence, load, needs_compiled_kernels
from engine.families import CHECKPOINTS, MAX_MODEL_LEN, save_family
from engine.int8_layers import threads
from engine.logits import logits_of, oracle
from engine.test_cuda_graphs import Recording
from engine.test_exact_bits import Bits
from llama_engine.checkpoint import config
from llama_engine.checkpoint.architecture import FAMILIES, read_architecture
from llama_engine.checkpoint.config import read_config
from llama_engine.checkpoint.rope import rope_tables
from llama_engine.errors import CheckpointError
from llama_engine.model.llama import gelu_tanh
from llama_engine.model.loader import LoadedModel, loading
from llama_engine.model.model_runner import ModelRunner
from llama_engine.model.precision import choose_dtype
from llama_engine.model.torch_runner import TorchRunner
from llama_engine.model.transformers_reader import llama_around
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

TOKENS = torch.randint(5, 1000, (100,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a family, in a folder of its name."""
    return save_family(tmp_path_factory.mktemp("families") / request.param, request.param)


def _load(folder: Path, quantization: str, **parameters: str) -> LoadedModel:
    return load(quantization, model=str(folder), max_model_len=str(MAX_MODEL_LEN), **parameters)


@pytest.fixture(scope="module")
def exact(folder: Path) -> LoadedModel:
    return _load(folder, "none")


def _logits(checkpoint: LoadedModel, runner: ModelRunner | None = None) -> torch.Tensor:
    """Return the logits of all tokens, from two chunks of a prompt and decode steps."""
    return logits_of(checkpoint, TOKENS.tolist(), 37, 90, runner=runner)


def _with_masks(checkpoint: LoadedModel) -> ModelRunner:
    return checkpoint.runner(checkpoint.cache_shape(2), captured=True)


def _by_sequence(checkpoint: LoadedModel) -> ModelRunner:
    return replace(checkpoint, attention=attention_by_sequence).runner(checkpoint.cache_shape(2))


def _around_modules(checkpoint: LoadedModel) -> ModelRunner:
    tables = rope_tables(checkpoint.config, checkpoint.architecture, checkpoint.max_model_len)
    return TorchRunner(llama_around(oracle(checkpoint), checkpoint.architecture, tables), checkpoint.cache_shape(2))


@pytest.mark.parametrize("kind", [None, _with_masks, _by_sequence, _around_modules])
def test_logits_are_those_of_transformers(
    exact: LoadedModel, kind: Callable[[LoadedModel], ModelRunner] | None
) -> None:
    if kind is _by_sequence and exact.architecture.attention_softcap is not None:
        pytest.skip("FlashAttention has no soft cap")
    with torch.inference_mode():
        expected = oracle(exact)(input_ids=TOKENS[None]).logits[0]
    result = _logits(exact, kind(exact) if kind else None)
    assert (result - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("folder", ["llama with biases", "phi3", "gemma2"], indirect=True)
def test_logits_with_an_outlier_threshold_are_those_of_transformers(folder: Path) -> None:
    quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map={"": "cpu"})
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None]).logits[0]
    # In one pass, because bitsandbytes looks for outliers in all its tokens.
    result = logits_of(_load(folder, "int8", int8_threshold="6"), TOKENS.tolist())
    assert (result - expected).abs().max() <= 1e-4


def test_gelu_has_the_same_bits_at_any_place() -> None:
    rows = torch.randn(7, 9217, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([gelu_tanh(row) for row in rows])
    for count in (1, 3, 5):
        with threads(count):
            assert torch.equal(gelu_tanh(rows), alone)
    assert torch.allclose(alone, torch.nn.functional.gelu(rows, approximate="tanh"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_a_gemma_is_not_served_in_float16(model_type: str) -> None:
    assert choose_dtype("it", model_type, "auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(CheckpointError, match="dtype is 'float16', but the hidden states of it, a gemma"):
        choose_dtype("it", model_type, "float16", torch.device("cpu"))


def test_a_decode_step_can_be_captured(exact: LoadedModel) -> None:
    runner = _with_masks(exact)
    with torch.inference_mode(), Recording():
        # The second row is padding.
        positions = torch.full((2,), exact.max_model_len)
        positions[0] = 40
        runner.logits(runner.decode(torch.arange(2), TOKENS[:2], positions, 64))


@pytest.fixture(scope="module")
def int8(folder: Path) -> LoadedModel:
    needs_compiled_kernels()
    return _load(folder, "int8")


def test_int8_tokens_have_the_same_bits_in_any_mix(int8: LoadedModel, folder: Path) -> None:
    assert int8.info.batch_invariant
    # Every other family with a KV cache in INT8.
    cache = ("auto", "int8")[[*CHECKPOINTS].index(folder.name) % 2]
    bits = Bits(replace(int8, max_model_len=128), mixes=2, kv_cache_dtype=cache)
    assert bits.different == []
    assert bits.rows > 0


def test_int8_is_near_fp32(exact: LoadedModel, int8: LoadedModel) -> None:
    scores, expected = (_logits(checkpoint).log_softmax(-1) for checkpoint in (int8, exact))
    assert 0 < kl_div(scores, expected, reduction="none", log_target=True).sum(-1).mean() < 0.005


def test_a_checkpoint_of_every_family_is_tested() -> None:
    assert {values["model_type"] for values in CHECKPOINTS.values()} == set(FAMILIES)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[dict[str, object]], Path]:
    def save(values: dict[str, object]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return save


LAYER_TYPES = ["full_attention", "chunked_attention"]
REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    **{kind: ({"model_type": kind}, f"it is a {kind!r} checkpoint; this engine serves llama, mistral, ")
       for kind in ("mixtral", "gemma3")},
    "an unknown model type": ({"model_type": "llamo"}, "can't load it: "),
    "a Llama's activation": (
        {"model_type": "llama", "hidden_act": "relu"},
        "it: hidden_act is 'relu'; this engine computes silu, gelu_pytorch_tanh",
    ),
    "a Gemma's activation": (
        {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu"},
        "it: hidden_activation is 'gelu'; ",
    ),
    "a type of layer": (
        {"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": LAYER_TYPES},
        "it: layer_types has 'chunked_attention'; this engine serves full_attention and sliding_attention",
    ),
    "layers with a window without its size": (
        {"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        "it: sliding_window is None; a layer with sliding_attention needs 1 position or more",
    ),
    "bidirectional attention": (
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        "it: use_bidirectional_attention is true; this engine serves causal attention",
    ),
    "attention that isn't causal": (
        {"model_type": "qwen3", "is_causal": False},
        "it: is_causal is false; this engine serves causal attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_model_that_is_not_served_is_refused_by_name(
    saved: Callable[[dict[str, object]], Path], values: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError) as refused, loading("it"):
        read_architecture(read_config(saved(values), "it"), "it")
    assert str(refused.value).startswith(message)


def test_an_option_that_the_engine_does_not_know_is_refused_by_name(
    saved: Callable[[dict[str, object]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "IRRELEVANT", config.IRRELEVANT - {"residual_dropout"})
    folder = saved({"model_type": "seed_oss", "residual_dropout": 0.5})
    with pytest.raises(CheckpointError) as refused:
        read_config(folder, "it")
    assert str(refused.value) == "it: residual_dropout is 0.5, an option of seed_oss this engine doesn't know"
