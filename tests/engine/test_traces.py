"""Spans of sequences that ended early or have no valid parent, and a collector that is down."""

import logging
import math
import socket
import sys
import time

import engine.backend_utils  # noqa: F401 - before what imports Triton's module
import pytest
from collector import ReceivedSpan, collector
from engine.metrics import finished_sequence
from engine.scheduling import SECONDS
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import Cancelled, GenerationError, InvalidSettings, RequestError
from llama_engine.observability.traces import Traces
from model import TritonPythonModel

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STOPPED = Completion("a secret completion", "stop", 3, 2)
WAITED, ADMITTED, DECODED = (math.nan, math.nan), (10.5, math.nan), (10.5, 11.25)
"""When a sequence was admitted and had its first token."""


@pytest.fixture(autouse=True)
def _every_span_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr("llama_engine.observability.traces.CLOSE_SECONDS", SECONDS)


def _recorded(traceparent: str, *sequences: Sequence) -> list[ReceivedSpan]:
    with collector() as came:
        traces = Traces(came.url)
        traces.record(traceparent, sequences)
        traces.close()
    return came.spans


def test_each_sequence_has_its_stages() -> None:
    spans = _recorded(TRACEPARENT, *[finished_sequence(STOPPED, "", 2, *DECODED) for _ in range(2)])
    stages = [(span.name, span.attributes["llama.sequence_index"]) for span in spans]
    assert stages == [(name, index) for index in range(2) for name in ("queue", "prefill", "decode")]


@pytest.mark.parametrize(
    ("times", "error", "failed", "stages"),
    [
        (WAITED, Cancelled("left"), False, ["queue"]),
        (ADMITTED, GenerationError("a secret"), True, ["queue", "prefill"]),
    ],
)
def test_the_last_stage_of_a_sequence_has_its_reason(
    times: tuple[float, float], error: RequestError, failed: bool, stages: list[str]
) -> None:
    spans = _recorded(TRACEPARENT, finished_sequence(error, "", 0, *times))
    assert [span.name for span in spans] == stages
    reasons = [span.attributes.get("gen_ai.response.finish_reasons") for span in spans]
    assert reasons == [None] * (len(stages) - 1) + [["error" if failed else "cancelled"]]
    assert [span.failed for span in spans] == [False] * (len(stages) - 1) + [failed]


NOT_SAMPLED = f"{TRACEPARENT[:-2]}00"


@pytest.mark.parametrize("parent", ["", TRACEPARENT[:-3], NOT_SAMPLED])
def test_without_a_valid_and_sampled_parent_there_are_no_spans(parent: str) -> None:
    assert _recorded(parent, finished_sequence(STOPPED, "", 2, *DECODED)) == []


def test_without_its_packages_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_engine.observability.traces", None)
    config = {"parameters": {"traces": {"string_value": "http://127.0.0.1:4318"}}}
    with pytest.raises(InvalidSettings, match=r"^traces needs OpenTelemetry, the extra tracing: pip install "):
        TritonPythonModel()._load(config, {})


def test_a_collector_that_is_down_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    traces = Traces(f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            traces.record(TRACEPARENT, [finished_sequence(STOPPED, "", 2, *DECODED)])
            time.sleep(0.3)
        traces.close()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("traces: ")
