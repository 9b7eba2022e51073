"""llama_unary takes and returns what llama does, and both ends of its protocol agree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from contract.code_blocks import ROOT
from contract.configs import MODEL, read_config
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from triton_supervisor.answers import FILES
from triton_supervisor.shared_memory import CANCELLATIONS
from tritonclient.grpc.model_config_pb2 import ModelConfig

UNARY = ROOT / "model_repository" / "llama_unary"
ENDS = (UNARY / "1" / "model.py", MODEL / "1" / "llama_engine" / "triton" / "forwarded.py")


def test_inputs_outputs_rows_and_queue_are_those_of_the_streaming_config() -> None:
    unary, streaming = ModelConfig(), read_config("streaming")
    text_format.Parse((UNARY / "config.pbtxt").read_text(), unary)
    assert list(unary.input) == list(streaming.input)
    assert list(unary.output) == list(streaming.output)
    assert unary.max_batch_size == streaming.max_batch_size
    assert unary.dynamic_batching.default_queue_policy == streaming.dynamic_batching.default_queue_policy
    assert not unary.model_transaction_policy.decoupled
    # Triton falls back to config.pbtxt for a config's name that a model doesn't have, and here it must.
    assert not (UNARY / "configs").exists()


def test_both_ends_have_the_same_constants() -> None:
    names = ("FORWARDED", "CANCELLATIONS", "UNSUPERVISED")
    mine, theirs = (_constants(path) for path in ENDS)
    assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}


@pytest.mark.parametrize("end", [ENDS[0], ROOT / "compatibility" / "vllm_model" / "1" / "model.py"])
def test_a_cancellation_has_the_supervisors_prefix_and_128_random_bits(end: Path) -> None:
    assert ast.literal_eval(_constants(end)["CANCELLATIONS"]) == CANCELLATIONS
    assert "self._name = secrets.token_hex(16)\n" in end.read_text()


def test_the_supervisor_and_both_models_agree_on_the_request_counts() -> None:
    models = (UNARY / "1" / "model.py", MODEL / "1" / "llama_engine" / "observability" / "request_counts.py")
    assert {_constants(path)["FILES"] for path in models} == {repr(FILES)}


def test_it_runs_on_the_standard_library_alone() -> None:
    tree = ast.parse(ENDS[0].read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    imported = {alias.name.split(".")[0] for node in imports for alias in node.names}
    assert not imported & {"torch", "numpy", "transformers", "llama_engine"}


def _constants(path: Path) -> dict[str, str]:
    assignments = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in assignments}
