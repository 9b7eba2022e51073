"""The probe asks for what the model, its metrics, its scheduler and the client library really have."""

from __future__ import annotations

import re
from pathlib import Path

from llama_engine import scheduler
from llama_engine.observability.metrics import METRICS
from llama_engine.triton.metrics import INSTANCE_LABEL
from triton_llama import SamplingParams
from triton_llama.health import one_token, pulse
from triton_llama.tensors import prepare

CONFIG = (Path(__file__).resolve().parents[2] / "model_repository" / "llama" / "config.pbtxt").read_text()


def test_the_probes_request_has_the_inputs_of_the_config_and_of_the_client_library() -> None:
    """Triton batches only requests with the same set of inputs: another one would split somebody's batch."""
    assert set(one_token.REQUEST) <= set(re.findall(r'name: "(\w+)", data_type', CONFIG))
    tensors = prepare("a", SamplingParams(seed=1)).tensors
    assert set(one_token.REQUEST) == {tensor.name for tensor in tensors}


def test_the_probe_reads_metrics_that_exist() -> None:
    kinds = {metric.name: metric.kind for metric in METRICS}
    assert kinds[pulse.LAST_STEP] == kinds[pulse.SLOTS_IN_USE] == "gauge"
    page = f'{pulse.LAST_STEP}{{model="llama",{INSTANCE_LABEL}="llama_0_0",version="1"}} 1.5'
    assert len(pulse._SERIES.findall(page)) == 1
    assert f'"{INSTANCE_LABEL}"' in Path(pulse.__file__).read_text(), "or it calls every instance by the model's name"


def test_the_probe_knows_how_a_model_that_is_unloaded_refuses() -> None:
    assert one_token._NOT_LOADED.search(str(scheduler._STOPPING))
