"""The health probe agrees with the model, its metrics, its scheduler and the client library."""

from __future__ import annotations

from pathlib import Path

from llama_engine.observability.metrics import METRICS, MODEL_INFO
from llama_engine.triton.metrics import INSTANCE_LABEL
from triton_llama import SamplingParams, status
from triton_llama.tensors import prepare
from triton_supervisor import health, triton


def test_the_probes_request_has_the_client_librarys_inputs() -> None:
    """Triton batches only requests with the same set of inputs: another set would split a batch."""
    tensors = prepare("a", SamplingParams(seed=1)).tensors
    assert set(health.REQUEST) == {tensor.name for tensor in tensors}


def test_the_probe_reads_metrics_that_exist() -> None:
    kinds = {metric.name: metric.kind for metric in METRICS}
    assert {kinds[name] for name in (triton.LAST_STEP, triton.SLOTS_IN_USE, triton.WAITING)} == {"gauge"}


def test_status_reads_the_labels_that_the_model_info_has() -> None:
    assert status.InstanceInfo._fields[1:] == MODEL_INFO.info
    source = Path(status.__file__).read_text()
    assert f'"{INSTANCE_LABEL}"' in source
    assert MODEL_INFO.name in source
