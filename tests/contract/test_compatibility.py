"""The models of compatibility/ agree with llama, in front of which they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from contract.code_blocks import ROOT
from contract.configs import MODEL, read_config
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

ENSEMBLE = ROOT / "compatibility" / "ensemble"
VLLM = ROOT / "compatibility" / "vllm_model"
FORWARDED = MODEL / "1" / "llama_engine" / "triton" / "forwarded.py"


def _config(folder: Path) -> ModelConfig:
    config = ModelConfig()
    text_format.Parse((folder / "config.pbtxt").read_text(), config)
    assert config.name == folder.name
    return config


def _types(tensors: Iterable[ModelInput | ModelOutput]) -> dict[str, tuple[int, list[int]]]:
    return {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in tensors}


def test_the_ensembles_tensors_are_llamas_under_their_own_names() -> None:
    ensemble, llama = _config(ENSEMBLE), read_config("streaming")
    assert _types(ensemble.input).items() <= _types(llama.input).items()
    assert _types(ensemble.output).items() <= _types(llama.output).items()
    assert all(tensor.optional for tensor in ensemble.input)
    assert ensemble.max_batch_size == llama.max_batch_size
    (step,) = ensemble.ensemble_scheduling.step
    assert dict(step.input_map) == {name: name for name in _types(ensemble.input)}
    assert dict(step.output_map) == {name: name for name in _types(ensemble.output)}
    # Triton takes no model without a folder of its version.
    assert (ENSEMBLE / "1").is_dir()


def test_the_ensemble_of_unsigned_integers_differs_from_llama_in_these_alone() -> None:
    ensemble, first = _config(ENSEMBLE.with_name("ensemble_uint32")), _config(ENSEMBLE.with_name("as_int32"))
    llama, own = _types(read_config("streaming").input), _types(ensemble.input)
    unsigned = {name: llama[name][1] for name in _types(first.input)}
    assert _types(first.input) == {name: (DataType.TYPE_UINT32, dims) for name, dims in unsigned.items()}
    assert _types(first.output) == {name: llama[name] for name in unsigned}
    assert {name: own[name] for name in unsigned} == _types(first.input)
    assert {name: llama[name] for name in own if name not in unsigned}.items() <= own.items()
    # A step without one of its inputs never runs.
    assert {tensor.name for tensor in ensemble.input if not tensor.optional} == set(unsigned)


def test_vllm_model_passes_requests_on_as_llama_takes_them() -> None:
    mine, theirs = (_constants(path) for path in (VLLM / "1" / "model.py", FORWARDED))
    names = ("FORWARDED", "CANCELLATIONS", "UNSUPERVISED")
    assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}
    config, llama = _config(VLLM), read_config("streaming")
    assert set(ast.literal_eval(mine["OUTPUTS"])) <= set(_types(llama.output))
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0


def test_vllm_model_tells_the_code_of_an_error_as_llama_unary_does() -> None:
    """Each model's folder stands alone, so both have a copy."""
    mine, theirs = (VLLM / "1" / "model.py", MODEL.with_name("llama_unary") / "1" / "model.py")
    names = ("CODES", "_UNAVAILABLE")
    assert [_constants(mine)[name] for name in names] == [_constants(theirs)[name] for name in names]
    assert [_function(mine, name) for name in ("_with_code", "_error", "_id")] == [
        _function(theirs, name) for name in ("_with_code", "_error", "_id")
    ]


def _function(path: Path, name: str) -> str:
    (found,) = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return ast.unparse(found)


def _constants(path: Path) -> dict[str, str]:
    assignments = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in assignments}
