"""The health probe agrees with the model, its metrics, its scheduler and the client library."""

from __future__ import annotations

from pathlib import Path

from contract.configs import read_config
from llama_engine import scheduler
from llama_engine.observability.metrics import METRICS, MODEL_INFO
from llama_engine.triton.metrics import INSTANCE_LABEL
from triton_llama import SamplingParams, health, model_info
from triton_llama.tensors import prepare


def test_the_probes_request_has_the_inputs_of_the_config_and_of_the_client_library() -> None:
    """Triton batches only requests with the same set of inputs: another set would split a batch."""
    assert set(health.REQUEST) <= {item.name for item in read_config("config").input}
    tensors = prepare("a", SamplingParams(seed=1)).tensors
    assert set(health.REQUEST) == {tensor.name for tensor in tensors}


def test_the_probe_reads_metrics_that_exist() -> None:
    kinds = {metric.name: metric.kind for metric in METRICS}
    assert kinds[health.LAST_STEP] == kinds[health.SLOTS_IN_USE] == "gauge"
    page = f'{health.LAST_STEP}{{model="llama",{INSTANCE_LABEL}="llama_0_0",version="1"}} 1.5'
    assert len(health._SERIES.findall(page)) == 1
    assert f'"{INSTANCE_LABEL}"' in Path(health.__file__).read_text()


def test_status_reads_the_labels_that_the_model_info_has() -> None:
    assert MODEL_INFO.name == model_info.MODEL_INFO
    assert model_info.InstanceInfo._fields[1:] == MODEL_INFO.info
    assert f'"{INSTANCE_LABEL}"' in Path(model_info.__file__).read_text()


def test_the_probe_recognizes_how_a_model_that_is_being_unloaded_refuses() -> None:
    assert health._NOT_LOADED.search(str(scheduler._STOPPING))
