"""Large Llamas on a GPU without a device: slots that fit into its memory, and a prefill and a decode step of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.checkpoints import save_small
from engine.fake_gpu import DEVICE, TOKEN, fake_gpu
from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.formats.linear_format import LinearFormat
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LayerWeights, LinearWeight
from llama_engine.engine.engine import Engine
from llama_engine.engine.responses import Completion
from llama_engine.kernels.gpu.elementwise import SEPARATE
from llama_engine.kernels.gpu.varlen_attention import varlen_attention
from llama_engine.model import load_plan as products
from llama_engine.model.loader import load_checkpoint
from llama_engine.request.parser import GenerationRequest
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaConfig

GIB = 1 << 30
FREE = 79 * GIB
"""Of a GPU of 80 GiB, beside the driver's own."""

LLAMA_2_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_hidden_layers": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_3_1_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
TINYLLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_hidden_layers": 22, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


class Weights:
    """Weights of these shapes without values, in place of those of a file."""

    def __init__(
        self,
        saved: SavedTensors,
        architecture: Architecture,
        dtype: torch.dtype,
        quantized: LinearFormat | None,
        int8: bool,
        device: torch.device,
    ) -> None:
        self._architecture, self._dtype, self._int8, self._device = architecture, dtype, int8, device

    def embedding(self) -> torch.Tensor:
        shape = (self._architecture.vocabulary, self._architecture.hidden)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def norm(self) -> torch.Tensor:
        return torch.empty(self._architecture.hidden, dtype=self._dtype, device=self._device)

    def head(self) -> LinearWeight:
        return self._linear(self._architecture.vocabulary, self._architecture.hidden)

    def layer(self, index: int) -> LayerWeights:
        hidden, inner = self._architecture.hidden, self._architecture.intermediate
        heads = self._architecture.heads + 2 * self._architecture.kv_heads
        projected = self._linear(heads * self._architecture.head_dim, hidden)
        attended, gate_up = self._linear(hidden, hidden), self._linear(2 * inner, hidden)
        return LayerWeights(self.norm(), projected, attended, self.norm(), gate_up, self._linear(hidden, inner))

    def _linear(self, outputs: int, inputs: int) -> LinearWeight:
        dtype = torch.int8 if self._int8 else self._dtype
        scales = torch.empty(outputs, device=self._device) if self._int8 else None
        return LinearWeight(torch.empty(outputs, inputs, dtype=dtype, device=self._device), scales)


@pytest.mark.parametrize(
    ("config", "quantization", "slots"),
    [
        # 2 GiB a slot, for 4,096 tokens: 64 GiB beside weights of 6.5 GiB, of 71 GiB (memory_fraction).
        pytest.param(LLAMA_2_7B, "int8", 32, marks=pytest.mark.long),
        # Beside 12.6 GiB.
        pytest.param(LLAMA_2_7B, "none", 29, marks=pytest.mark.long),
        pytest.param(LLAMA_3_1_8B, "int8", 32, marks=pytest.mark.long),
        (TINYLLAMA, "int8", 32),
    ],
    ids=["Llama 2 7B, INT8", "Llama 2 7B, FP16", "Llama 3.1 8B, INT8", "TinyLlama 1.1B, INT8"],
)
def test_a_large_model_decodes_in_the_cache_that_fits(
    config: dict[str, int], quantization: str, slots: int, tokenizer: Tokenizer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = save_small(tmp_path / "llama", tokenizer)
    values = {**config, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    LlamaConfig(**values).save_pretrained(folder)  # type: ignore[arg-type]  # of different types
    settings = Settings(model=str(folder), device="cuda", quantization=quantization, cuda_graphs="off")
    monkeypatch.setattr(products, "WeightReader", Weights)
    with fake_gpu(monkeypatch):
        # Their verification needs values.
        monkeypatch.setattr(products, "choose_attention", lambda *_: varlen_attention)
        monkeypatch.setattr(products, "choose_elementwise", lambda *_: SEPARATE)
        checkpoint = load_checkpoint(settings, DEVICE)
        free = FREE - checkpoint.info.weight_bytes
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, FREE))
        engine = Engine(checkpoint, settings, 32)
        assert engine.plan.shape.tokens // min(checkpoint.max_model_len, 4096) == slots
        request = GenerationRequest(prompt="", prompt_tokens=(TOKEN,) * 9, max_tokens=2, min_tokens=2)
        (result,) = engine.generate([request])
    assert isinstance(result, Completion), result
