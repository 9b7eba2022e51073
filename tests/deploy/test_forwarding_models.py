"""The models that stand in front of llama agree with it: llama_unary, and those of compatibility/."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from deploy.code_blocks import ROOT
from engine.configs import MODEL, parsed, read_config
from tritonclient.grpc.model_config_pb2 import ModelInput, ModelOutput

UNARY = MODEL.with_name("llama_unary")
COMPATIBILITY = ROOT / "compatibility"
SOURCES = (
    UNARY / "1" / "model.py",
    COMPATIBILITY / "vllm_model" / "1" / "model.py",
    MODEL / "1" / "llama_engine" / "triton" / "responder.py",
)


def _types(tensors: Iterable[ModelInput | ModelOutput]) -> dict[str, tuple[int, list[int]]]:
    return {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in tensors}


def _definitions(path: Path) -> dict[str, str]:
    """Return the sources of a file's constants and functions by name."""
    sources = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            sources[ast.unparse(node.targets[0])] = ast.unparse(node.value)
        elif isinstance(node, ast.FunctionDef):
            sources[node.name] = ast.unparse(node)
    return sources


def test_llama_unary_has_the_contract_of_the_streaming_config() -> None:
    unary, streaming = parsed(UNARY / "config.pbtxt"), read_config("streaming")
    assert list(unary.input) == list(streaming.input)
    assert list(unary.output) == list(streaming.output)
    assert unary.max_batch_size == streaming.max_batch_size
    assert unary.dynamic_batching.default_queue_policy == streaming.dynamic_batching.default_queue_policy
    assert not unary.model_transaction_policy.decoupled
    # Triton falls back to config.pbtxt for a config's name that a model doesn't have, and here it must.
    assert not (UNARY / "configs").exists()


def test_both_models_tell_the_code_of_an_error_by_the_same_source() -> None:
    """Each model's folder stands alone, so both have a copy."""
    first, second, engine = map(_definitions, SOURCES)
    for name in ("_UNAVAILABLE", "_TRITON_CODES", "_error"):
        assert first[name] == second[name]
    assert first["_TRITON_CODES"] == engine["_TRITON_CODES"]


def test_the_ensembles_tensors_are_llamas_under_their_own_names() -> None:
    ensemble, llama = parsed(COMPATIBILITY / "ensemble" / "config.pbtxt"), read_config("streaming")
    assert _types(ensemble.input).items() <= _types(llama.input).items()
    assert _types(ensemble.output).items() <= _types(llama.output).items()
    assert all(tensor.optional for tensor in ensemble.input)
    assert ensemble.max_batch_size == llama.max_batch_size
    (step,) = ensemble.ensemble_scheduling.step
    assert dict(step.input_map) == {name: name for name in _types(ensemble.input)}
    assert dict(step.output_map) == {name: name for name in _types(ensemble.output)}
    # Triton takes no model without a folder of its version.
    assert (COMPATIBILITY / "ensemble" / "1").is_dir()
