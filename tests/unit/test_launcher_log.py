"""tritonserver's log, with lines of a real one: the terminal's selection, the reason of a failed start, a full disk."""

import gc
from pathlib import Path

import pytest
from triton_local.log import ServerLog, TerminalView, failure_reason

NVML = "Error: Failed to initialize NVML"
DCGM = 'W1121 00:42:30.408999 15449 metrics.cc:798] "DCGM unable to start: DCGM initialization error"'
CUDA = 'E1121 00:42:29.966857 15449 server.cc:241] "CudaDriverHelper has not been initialized."'
LOADING = 'I1121 00:42:11.710140 15186 model_lifecycle.cc:472] "loading: llama:1"'
MODEL_INFO = 'I1121 00:42:12.117096 15186 model.py:5] "112 of 113 linears are int8"'
MODEL_WARNING = 'W1121 00:42:12.117538 15186 model.py:6] "a warning"'
INSTANCE = (
    'E1121 00:42:30.407740 15449 backend_model.cc:692] "ERROR: Failed to create instance: ValueError: slots must be in '
    '1 ... 64, got 9000\\n\\nAt:\\n  /models/llama/1/model.py(8): initialize\\n"'
)
LOAD = (
    "E1121 00:42:30.407856 15449 model_lifecycle.cc:642] \"failed to load 'llama' version 1: Internal: ValueError: "
    'slots must be in 1 ... 64, got 9000\\n\\nAt:\\n  /models/llama/1/model.py(8): initialize\\n"'
)
REFUSED = LOAD.replace("ValueError: ", "TritonModelException: llama: ")
SOCKET = (
    'E1121 00:46:07.754674 16975 main.cc:257] "failed to start HTTP service: '
    "Unavailable - Socket '127.0.0.1:18000' already in use \""
)
ENDING = "error: creating server: Internal - failed to load all models"
TRACEBACK = "Traceback (most recent call last):"
TABLE = ["I1121 00:42:12.128978 15186 server.cc:674] ", "+-------+", "| Model |", "+-------+", "", ""]


@pytest.mark.parametrize(
    ("has_gpu", "shown", "hidden"),
    [
        (False, [MODEL_INFO, MODEL_WARNING, TRACEBACK], [CUDA, LOADING, *TABLE, NVML, DCGM]),
        # A table of the model follows a line of the model.
        (False, [MODEL_WARNING, "| weights | 6 MB |", LOAD], []),
        (True, [CUDA, NVML, DCGM], [LOADING]),
    ],
)
def test_warnings_prints_and_lines_of_the_model_are_shown(has_gpu: bool, shown: list[str], hidden: list[str]) -> None:
    view = TerminalView(has_gpu=has_gpu)
    assert [line for line in (*shown, *hidden) if view.shows(line)] == shown


def test_the_reason_of_a_failed_load_is_the_exception_once() -> None:
    assert failure_reason([CUDA, LOADING, MODEL_WARNING, INSTANCE, LOAD, *TABLE, NVML, DCGM, ENDING]).splitlines() == [
        "failed to load 'llama' version 1: Internal: ValueError: slots must be in 1 ... 64, got 9000",
        "At:",
        "  /models/llama/1/model.py(8): initialize",
    ]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([LOADING, REFUSED, *TABLE, ENDING], "the model refused to load: llama: slots must be in 1 ... 64, got 9000"),
        ([CUDA, NVML, SOCKET], "failed to start HTTP service: Unavailable - Socket '127.0.0.1:18000' already in use"),
        (["/bin/tritonserver: unrecognized option '--x'", "Usage: tritonserver [options]", "  --help"], "--x"),
        ([LOADING, ENDING], "creating server: Internal - failed to load all models"),
        (["one", "", "two"], "one\ntwo"),
        ([], "it wrote nothing"),
    ],
)
def test_a_failed_start_always_has_a_reason(lines: list[str], reason: str) -> None:
    assert reason in failure_reason(lines)
    assert "Usage" not in failure_reason(lines)


def test_a_full_disk_loses_no_line_in_memory_and_is_reported_once() -> None:
    received: list[str] = []
    with ServerLog(Path("/dev/full"), received.append) as log:
        for line in ("one", "two", "three"):
            log.add(line)
        assert log.lines() == [
            "one",
            "triton_local: the log file can't be written any more: No space left on device",
            "two",
            "three",
        ]
    assert received == ["one", "two", "three"]
    # A file that is still open would be a warning now.
    gc.collect()
