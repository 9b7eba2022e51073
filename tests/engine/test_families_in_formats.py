"""Model types in formats: the logits are those of transformers' model with the weights that were read."""

from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from engine.engines import EMBEDDED, load
from engine.gguf_files import MODELS, small_model, write_model
from engine.logits import logits_of
from gguf import GGMLQuantizationType as Kind
from llama_engine.checkpoint.architecture import FAMILIES
from llama_engine.checkpoint.formats.detection import linear_format
from llama_engine.checkpoint.headers import read_checkpoint_headers
from llama_engine.checkpoint.tensor_names import HEAD, layer_linears, layer_prefix
from llama_engine.checkpoint.weight_reader import WeightReader
from llama_engine.model.loader import LoadedModel
from llama_engine.model.precision import quantization_config
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from models.quantized_checkpoints import FORMATS, write

GGUF = {"q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0, "q4_1": Kind.Q4_1, "q4_k": Kind.Q4_K, "q6_k": Kind.Q6_K}
ALL = ("int8", *FORMATS, *GGUF)
OPTIONS = {"ministral": {"sliding_window": 24}, **dict(MODELS.values())}
"""By model type. A GGUF file of a Ministral or of a Mistral with windows doesn't exist."""
FILES = sorted({*FAMILIES} - {"ministral"})
LAYOUTS = ("phi3", "qwen2", "gemma2")
"""Fused linear layers; biases; a head that is the embedding, and gains of 1 + w. A reader of a format sees no more."""
OTHERS = sorted({*FILES} - {"llama", *LAYOUTS})
TOKENS = tuple(range(40, 80))


def _save(folder: Path, model_type: str, name: str) -> tuple[PreTrainedModel, Path]:
    """Save a small model in the format; return it in floats, and the path to load."""
    # A Q4_K row has whole blocks of 256 columns. GGUF doesn't have Gemma's scalar, which is the head dimension.
    options = {**OPTIONS[model_type], "head_dim": 64, "query_pre_attn_scalar": 64, "num_hidden_layers": 2}
    model = small_model(model_type, **options, vocab_size=3072).eval()
    assert isinstance(model, PreTrainedModel)
    tokenizer, saved = AutoTokenizer.from_pretrained(EMBEDDED), folder / name
    if name in GGUF:
        saved.mkdir()
        write_model(saved / "model.gguf", model, GGUF[name])
    else:
        model.save_pretrained(folder / "floats")
        if name == "int8":
            quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
            type(model).from_pretrained(folder / "floats", quantization_config=quantization).save_pretrained(saved)
        else:
            write(folder / "floats", name, saved)
    tokenizer.save_pretrained(saved)
    return model, saved


def _with_read_weights(model: PreTrainedModel, loaded: LoadedModel, folder: Path) -> PreTrainedModel:
    """Replace the model's linear layers by what the reader reads, in floats."""
    saved = read_checkpoint_headers(folder, "it").saved
    quantized = linear_format(saved, quantization_config(loaded.config))
    reader = WeightReader(saved, loaded.architecture, torch.float32, quantized, int8=True)
    model.get_submodule("model.embed_tokens").weight = torch.nn.Parameter(reader.embedding().clone())
    model.get_submodule(HEAD).weight = torch.nn.Parameter(reader.head().dequantized())
    for index in range(loaded.architecture.layers):
        layer = reader.layer(index)
        for field, parts in layer_linears(loaded.architecture).items():
            weights = getattr(layer, field).dequantized().split([part.shape[0] for part in parts])
            for part, weight in zip(parts, weights, strict=True):
                model.get_submodule(layer_prefix(index) + part.name).weight = torch.nn.Parameter(weight)
    return model


EVERY = ("gptq4-act-order", "int8", "q4_k")
"""Formats that are tested with every family; bitsandbytes' by the family's own class, GGUF's by the names in a file."""
READERS = ("w8a8", "w4a16", "awq4", "fp8")
"""A format of each reader of another format."""
LONG = [
    *product(sorted({*FAMILIES} - {"llama"}), ["int8"]),
    *product(sorted({*FILES} - {"llama"}), ["q4_k"]),
    *product(LAYOUTS, READERS),
    *((family, name) for family, name in zip(cycle(OTHERS), ALL, strict=False) if name not in EVERY),
]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *[("llama", name) for name in ALL],
        *product(sorted({*FAMILIES} - {"llama"}), ["gptq4-act-order"]),
        *[pytest.param(*pair, marks=pytest.mark.long) for pair in LONG],
    ],
)
def test_a_family_in_a_format_has_the_logits_of_its_weights(model_type: str, name: str, tmp_path: Path) -> None:
    model, saved = _save(tmp_path, model_type, name)
    loaded = load("checkpoint", model=str(saved), int8_terms="2", kv_cache_dtype="float32")
    expected = _with_read_weights(model, loaded, saved)(input_ids=torch.tensor([TOKENS])).logits[0]
    logits = logits_of(loaded, TOKENS, kv_cache_dtype="float32")
    assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max()
