"""The reason of a failed start, from lines of a real tritonserver's log."""

import pytest
from triton_local.triton_log import failure_reason

LOADING = 'I1121 00:42:11.710140 15186 model_lifecycle.cc:472] "loading: llama:1"'
CUDA = 'E1121 00:42:29.966857 15449 server.cc:241] "CudaDriverHelper has not been initialized."'
LOAD = (
    "E1121 00:42:30.407856 15449 model_lifecycle.cc:642] \"failed to load 'llama' version 1: Internal: ValueError: "
    'slots must be in 1 ... 64, got 9000\\n\\nAt:\\n  /models/llama/1/model.py(8): initialize\\n"'
)
SOCKET = "failed to start HTTP service: Unavailable - Socket '127.0.0.1:44715' already in use"
TAKEN = f'E1129 22:18:11.355878 3467 main.cc:257] "{SOCKET} "'
ENDED = "triton_supervisor: tritonserver has ended with code 1; the server ends with code 1"
REFUSED = LOAD.replace("ValueError: ", "TritonModelException: llama: ")
ENDING = "error: creating server: Internal - failed to load all models"
USAGE = ["/bin/tritonserver: unrecognized option '--x'", "Usage: tritonserver [options]", "  --help"]
EXCEPTION = [
    "failed to load 'llama' version 1: Internal: ValueError: slots must be in 1 ... 64, got 9000",
    "At:",
    "  /models/llama/1/model.py(8): initialize",
]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([CUDA, LOADING, LOAD, LOAD, ENDING], EXCEPTION),
        ([REFUSED, ENDING], ["the model refused to load: llama: slots must be in 1 ... 64, got 9000"]),
        ([CUDA, *USAGE], ["CudaDriverHelper has not been initialized.", USAGE[0]]),
        ([CUDA, LOADING, TAKEN, ENDED], ["CudaDriverHelper has not been initialized.", SOCKET, ENDED]),
        ([LOADING, CUDA], ["CudaDriverHelper has not been initialized."]),
        (["one", "", "two"], ["one", "two"]),
        ([], ["it wrote nothing"]),
    ],
)
def test_a_failed_start_has_a_reason(lines: list[str], reason: list[str]) -> None:
    assert failure_reason(lines).splitlines() == reason
