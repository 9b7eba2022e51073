"""`make bench-gpu`: the checks of a device, on the CPU; its requests have the length it reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llama_engine.engine.engine import Engine
from llama_engine.kernels.gpu.elementwise import SEPARATE, Elementwise, choose_elementwise, quantize
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
from python_process import run_python
from transformers import LlamaConfig

from perf import gpu, gpu_checks
from perf.checkpoint import EMBEDDED
from perf.gpu_checks import exactness, mixes, products

CPU = torch.device("cpu")
SHAPE = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=80)


def test_greedy_fp32_tokens_are_generates() -> None:
    assert exactness(CPU, amount=2, tokens=12) == {"requests": 2, "tokens": 24, "different": 0}


def _rough(rows: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scale = quantize(rows, terms)
    return quantized, scale * 1.001


@pytest.mark.parametrize(("function", "right"), [(quantize, True), (_rough, False)])
def test_products_are_compared_with_those_of_the_cpu(
    function: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]], right: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_checks, "choose_elementwise", lambda *_: Elementwise(function))
    result = products(CPU, SHAPE, 2)
    assert result["values"] == (1 + 32 + 300) * (3 * 64 + 2 * 96 + 64 + 80)
    assert (result["different"] == 0) == right
    assert result["fused"] == ([] if right else ["quantize"])


def test_int8_requests_are_the_same_in_random_mixes() -> None:
    settings = Settings(model=str(EMBEDDED), max_model_len=128)
    result = mixes(load_checkpoint(settings, CPU), settings, 1, tokens=2)
    assert (result["different"], result["different_tokens"]) == (0, 0)
    assert result["requests"]


Check = Callable[[torch.device, LlamaConfig, int, gpu.Note], bool]


def _main(monkeypatch: pytest.MonkeyPatch, output: Path, check: Check, device: str) -> None:
    monkeypatch.setattr(gpu, "check", check)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", device, "--only", "checks", "--output", str(output)])
    assert gpu.main() == 0


def test_the_device_has_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = []

    def check(device: torch.device, shape: LlamaConfig, rounds: int, note: gpu.Note) -> bool:
        devices.append(device)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    _main(monkeypatch, tmp_path / "gpu.json", check, "cuda")
    assert devices == [torch.device("cuda", 0)]


@pytest.mark.long
# PyTorch's compiler calls it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_every_part_can_compile_its_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fused: list[bool] = []

    def check(device: torch.device, shape: LlamaConfig, rounds: int, note: gpu.Note) -> bool:
        for dtype, terms in ((torch.float16, 2), (torch.float16, 1), (torch.bfloat16, 2)):
            functions = choose_elementwise(CPU, dtype, 64, 2, 32, terms)
            fused.extend(function is not separate for function, separate in zip(functions, SEPARATE, strict=True))
            note(f"{dtype}/{terms}", {})
        return False

    _main(monkeypatch, tmp_path / "gpu.json", check, "cpu")
    assert fused == [True] * 9


def test_the_articles_table_has_what_was_measured() -> None:
    served: dict[str, object] = {"requests": 32, "peak_mib": 7000, "p50_s": 1.5, "requests_per_second": 20.25}
    table = gpu.article({"serving/in flight/int8/equal": served, "serving/in flight/int8/uniform": {}, "stock/1": {}})
    assert table[2:] == ["| in flight INT8 | 7000 | 1.5 | 20.25 |"]


def test_a_load_is_served_in_each_mode() -> None:
    settings = Settings(model=str(EMBEDDED), max_model_len=128)
    checkpoint = load_checkpoint(settings, CPU)
    for mode, slots in gpu.MODES.items():
        result = gpu.serving(Engine(checkpoint, settings, slots), checkpoint, mode, "equal", 2)
        assert (result["requests"], result["peak_mib"]) == (32, None)
        assert isinstance(result["p50_s"], float)


def test_gguf_is_not_imported() -> None:
    program = "import sys; sys.modules['gguf'] = None; import llama_engine.libraries, perf.gpu"
    run_python(program).check_returncode()
