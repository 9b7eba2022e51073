"""Adapters that PEFT writes are read as PEFT computes with them; everything else is refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.families import save_family
from engine.lora_adapters import architecture_of, change_config, change_tensors, save_adapter
from llama_engine.checkpoint.lora import ADAPTER, LoraAdapter, read_adapter
from llama_engine.checkpoint.lora_config import CONFIG
from llama_engine.errors import CheckpointError
from peft import PeftModel

Tensors = dict[str, torch.Tensor]

A, B = (f"base_model.model.model.layers.1.self_attn.q_proj.lora_{side}.weight" for side in "AB")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("bases")
    return {name: save_family(parent / name, name) for name in ("llama", "qwen2", "phi3")}


@pytest.fixture(scope="module")
def saved(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 for the Llama, not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    save_adapter(bases["llama"], folder, {"r": 4, "target_modules": ["q_proj", "down_proj"]})
    return folder


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def _read(base: Path, folder: Path, max_rank: int = 16) -> LoraAdapter:
    return read_adapter(folder, architecture_of(base), max_rank)


def _assert_same(adapter: LoraAdapter, model: PeftModel) -> None:
    """Compare weights and scalings with those of PEFT's model."""
    expected = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    names = {
        f"base_model.model.model.layers.{index}.{name}": weights
        for index, layer in enumerate(adapter.layers)
        for name, weights in layer.items()
    }
    assert names.keys() == expected.keys()
    for name, weights in names.items():
        module = expected[name]
        assert torch.equal(weights.a, module.lora_A["default"].weight)
        assert torch.equal(weights.b, module.lora_B["default"].weight)
        assert weights.scaling == module.scaling["default"]
    assert adapter.rank == max(weights.a.shape[0] for weights in names.values())


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2", {}),
        ("phi3", {"r": 2, "lora_alpha": 12, "target_modules": ["o_proj", "qkv_proj", "gate_up_proj", "up_proj"]}),
        ("llama", {"target_modules": r".*\.layers\.[02]\.(self_attn\.q|mlp\.up)_proj", "use_rslora": True}),
        (
            "llama",
            {"r": 4, "rank_pattern": {"down_proj": 6, r"layers\.1\..*": 3}, "alpha_pattern": {"^mod.*2.*o_proj": 2.5}},
        ),
        (
            "llama",
            {"target_modules": ["down_proj", "o_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        ),
        ("llama", {"target_modules": ["o_proj", "model.layers.0.mlp.down_proj"], "layers_to_transform": 1}),
        ("llama", {"exclude_modules": r".*\.1\..*"}),
        ("llama", {"exclude_modules": ["mlp.down_proj"], "init_lora_weights": "orthogonal", "lora_dropout": 0.1}),
    ],
    ids=str,
)
def test_an_adapter_is_read_as_peft_computes_with_it(
    bases: dict[str, Path], tmp_path: Path, family: str, config: dict[str, object]
) -> None:
    model = save_adapter(bases[family], tmp_path, config)
    _assert_same(_read(bases[family], tmp_path), model)


def test_all_linear_in_a_config_is_all_linear_layers(bases: dict[str, Path], tmp_path: Path) -> None:
    model = save_adapter(bases["llama"], tmp_path)
    change_config(tmp_path, target_modules="ALL-LINEAR")
    _assert_same(_read(bases["llama"], tmp_path), model)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_weights_keep_their_values_in_one_of_two_dtypes(
    bases: dict[str, Path], adapter: Path, a: torch.dtype, b: torch.dtype, expected: torch.dtype
) -> None:
    wanted: Tensors = {}

    def convert(tensors: Tensors) -> None:
        tensors |= {name: tensor.to(a if "lora_A" in name else b) for name, tensor in tensors.items()}
        wanted.update(tensors)

    change_tensors(adapter, convert)
    weights = _read(bases["llama"], adapter).layers[1]["self_attn.q_proj"]
    assert weights.a.dtype == weights.b.dtype == expected
    assert torch.equal(weights.a, wanted[A].to(expected))
    assert torch.equal(weights.b, wanted[B].to(expected))


def test_the_digest_is_of_what_an_adapter_computes(bases: dict[str, Path], adapter: Path) -> None:
    before = _read(bases["llama"], adapter).digest
    change_config(adapter, base_model_name_or_path="elsewhere", peft_version="0.1", lora_dropout=0.5)
    assert _read(bases["llama"], adapter).digest == before
    change_config(adapter, lora_alpha=9)
    scaled = _read(bases["llama"], adapter).digest
    change_tensors(adapter, lambda tensors: tensors[B][-1, -1].add_(1e-3))
    assert len({before, scaled, _read(bases["llama"], adapter).digest}) == 3


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; it must be LORA"),
        ({"r": 0}, "r is 0; it must be a whole number, at least 1 and at most 128"),
        ({"r": 17}, "r of model.layers.0.self_attn.q_proj is 17; it must be at most 16, the setting max_lora_rank"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern is '(.*\\\\.)?(()$'; it must be a regular expression (error: "),
        ({"target_modules": "(.|..)*x"}, "target_modules is '(.|..)*x'; it must be a regular expression of at most "),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern of 'q_proj' is '4'; it must be a finite number, at least "),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf; it must be a finite number"),
        ({"use_rslora": "true"}, "use_rslora is 'true'; it must be true or false"),
        ({"use_dora": True}, "'use_dora' is True; only adapters without it are served"),
        ({"bias": "lora_only"}, "'bias' is 'lora_only'; only adapters without it are served"),
        ({"a_field_of_next_year": 3}, "'a_field_of_next_year' is 3; only "),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'; it must be true, false or one of gaussian, "),
        ({"target_modules": None}, "target_modules is None; it must be a list of names or a regular expression"),
        ({"target_modules": ["k"]}, "target_modules is ['k']; it must be names of linear layers of the base, such as "),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has lm_head; adapters of it are not served"),
        ({"layers_to_transform": [-1]}, "layers_to_transform is -1; it must be a whole number, at least 0 and at most"),
        ({"layers_to_transform": 1, "layers_pattern": "h"}, "layers_to_transform is 1; it must be null beside a text"),
    ],
    ids=str,
)
def test_a_config_of_anything_else_is_refused(
    bases: dict[str, Path], adapter: Path, changed: dict[str, object], reason: str
) -> None:
    change_config(adapter, **changed)
    with pytest.raises(CheckpointError) as refused:
        _read(bases["llama"], adapter)
    assert str(refused.value).startswith(f"can't load {adapter}: {CONFIG}: {reason}")


def test_an_endless_regular_expression_is_refused(bases: dict[str, Path], adapter: Path) -> None:
    change_config(adapter, target_modules=".*?" * 30 + r"\d\d")
    with pytest.raises(CheckpointError, match=r"target_modules is .*; it must be one that is matched within 2 s"):
        _read(bases["llama"], adapter)


def _renamed(name: str, other: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(B), f"it has no {B}, which "),
        (_renamed(A, "a"), "it has 'a', which is no tensor of a layer in target_modules"),
        (lambda tensors: tensors.update({A: torch.ones(4, 48)}), f"{A} is (4, 48); base and rank need (4, 64)"),
        (lambda tensors: tensors.update({B: tensors[B].char()}), f"{B} is 'I8'; it must be one of F32, BF16, F16"),
        (lambda tensors: tensors[B][3, 1].fill_(float("nan")), f"{B} has numbers that are not finite"),
    ],
)
def test_tensors_that_peft_does_not_make_are_refused(
    bases: dict[str, Path], adapter: Path, change: Callable[[Tensors], object], reason: str
) -> None:
    change_tensors(adapter, change)
    with pytest.raises(CheckpointError) as refused:
        _read(bases["llama"], adapter)
    assert str(refused.value).startswith(f"can't load {adapter}: {ADAPTER}: {reason}")


@pytest.mark.parametrize("name", [CONFIG, ADAPTER])
def test_a_missing_file_is_refused_by_name(bases: dict[str, Path], adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: there is no such file$"):
        _read(bases["llama"], adapter)


def test_a_pickle_alone_is_refused_with_advice(bases: dict[str, Path], adapter: Path) -> None:
    (adapter / ADAPTER).rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin is a pickle, which can run code: save the adapter"):
        _read(bases["llama"], adapter)
