"""What a loaded checkpoint says about itself, in every precision, and that a saved 8-bit one is loaded as it is."""

from pathlib import Path

import pytest
import torch
from engine.engines import completions, engine_of, load
from engine.small_checkpoints import save_small
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import EMBEDDED, Checkpoint
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaConfig


def _linear_parameters(config: LlamaConfig) -> tuple[int, int]:
    """Parameters and output features of all linear layers but the head."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    assert head is not None
    queries, keys = config.num_attention_heads * head, (config.num_key_value_heads or 0) * head
    parameters = hidden * (2 * queries + 2 * keys + 3 * inner)
    features = queries + 2 * keys + hidden + 2 * inner + hidden
    return config.num_hidden_layers * parameters, config.num_hidden_layers * features


def _rest(config: LlamaConfig) -> int:
    """Parameters of everything else: embedding, head if it isn't the embedding, norms."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return embeddings + (2 * config.num_hidden_layers + 1) * config.hidden_size


def _buffers(checkpoint: Checkpoint) -> int:
    return sum({buffer.data_ptr(): buffer.nbytes for buffer in checkpoint.model.model.rotary_emb.buffers()}.values())


def test_the_facts_of_fp32_are_wrong(fp32: Checkpoint) -> None:
    parameters, _ = _linear_parameters(fp32.config)
    info = fp32.info
    assert info.linears == {"float32": 7 * fp32.config.num_hidden_layers + 1}
    assert info.weight_bytes == 4 * (parameters + _rest(fp32.config)) + _buffers(fp32)
    assert (info.dtype, info.device, info.threshold) == (torch.float32, torch.device("cpu"), None)
    assert fp32.name == str(EMBEDDED)


def test_the_facts_of_int8_are_wrong(int8: Checkpoint) -> None:
    parameters, features = _linear_parameters(int8.config)
    info, quantized = int8.info, 7 * int8.config.num_hidden_layers
    assert info.linears == {"int8": quantized, "float32": 1}
    assert info.weight_bytes == parameters + 4 * features + 4 * _rest(int8.config) + _buffers(int8)
    assert (info.dtype, info.threshold) == (torch.float32, 0.0)
    assert (
        f"linear layers 1 in float32, {quantized} in int8, outlier threshold 0, activations not rounded; "
        in info.describe()
    )


def test_a_threshold_is_ignored(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = save_small(tmp_path, tokenizer)
    assert load("int8", model=str(folder), int8_threshold="6").info.threshold == 6.0


def test_another_dtype_is_ignored(tokenizer: Tokenizer, tmp_path: Path) -> None:
    checkpoint = load("none", model=str(save_small(tmp_path, tokenizer)), dtype="bfloat16", max_model_len="99")
    assert checkpoint.info.linears == {"bfloat16": 15}
    assert checkpoint.info.dtype == torch.bfloat16
    assert engine_of(checkpoint, 1).plan.shape.dtype == torch.bfloat16
    assert engine_of(checkpoint, 1).max_model_len == 99


def test_nf4_does_not_load_or_does_not_generate(tokenizer: Tokenizer, tmp_path: Path) -> None:
    checkpoint = load("nf4", model=str(save_small(tmp_path, tokenizer)))
    assert checkpoint.info.linears == {"nf4": 14, "float32": 1}
    request = GenerationRequest(prompt="", prompt_tokens=tokenizer.encode("def f"), max_tokens=6, min_tokens=6)
    alone, *_ = completions(engine_of(checkpoint, 2), [request, request])
    assert alone.num_output_tokens == 6


@pytest.mark.parametrize("quantization", ["int8", "checkpoint"])
def test_a_saved_8_bit_checkpoint_is_quantized_again(int8: Checkpoint, tmp_path: Path, quantization: str) -> None:
    int8.model.save_pretrained(tmp_path)
    int8.tokenizer.pretrained.save_pretrained(tmp_path)
    saved = load(quantization, model=str(tmp_path))
    assert saved.info == int8.info
    ids = torch.tensor([int8.tokenizer.encode("The with statement is used to wrap the execution of a block")])
    with torch.inference_mode():
        assert torch.equal(saved.model(input_ids=ids).logits, int8.model(input_ids=ids).logits)


def test_training_mode_or_gradients_are_left_on(fp32: Checkpoint, int8: Checkpoint) -> None:
    for checkpoint in (fp32, int8):
        assert not any(module.training for module in checkpoint.model.modules())
        assert not any(parameter.requires_grad for parameter in checkpoint.model.parameters())
