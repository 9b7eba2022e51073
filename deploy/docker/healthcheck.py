"""Ask the server in this container for one token; exit 0 when it comes, else 1 with one line that says why.

Triton's own /v2/health endpoints go on answering 200 after the model's process has died, so nothing less than a token
counts as healthy. Runs in the container with the standard library alone. Knows nothing about restarting anything.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time

MODEL = "llama"
# min_tokens keeps a checkpoint that would end at once from counting as dead. The rest is there because Triton batches
# only requests with the same set of inputs, and the client library sends all of them.
REQUEST = {
    "text_input": "Python is",
    "max_tokens": 1,
    "min_tokens": 1,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": 0,
    "stop_words": [""],
    "bad_words": [""],
    "exclude_input_in_output": True,
}


class UnhealthyError(Exception):
    """The model gave no token; the message is one line."""


def ask_for_a_token(host: str, port: int, timeout: float) -> None:
    """Generate one token through the HTTP endpoint `/generate`.

    `timeout` is in seconds, for each of connecting and reading. Raises UnhealthyError unless one token came back.
    """
    # Not urllib: it would go through the container's HTTP_PROXY, which is meant for downloads.
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", f"/v2/models/{MODEL}/generate", json.dumps(REQUEST), headers)
        response = connection.getresponse()
        body = response.read().decode("utf-8", errors="replace")
    except TimeoutError:
        raise UnhealthyError(f"no answer from {host}:{port} within {timeout:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise UnhealthyError(f"{host}:{port} cannot be asked: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise UnhealthyError(f"HTTP {response.status}: {' '.join(body.split())[:300]}")
    try:
        tokens = json.loads(body)["num_output_tokens"]
    except (ValueError, KeyError, TypeError):
        raise UnhealthyError(f"the answer holds no num_output_tokens: {' '.join(body.split())[:300]}") from None
    if tokens != 1:
        raise UnhealthyError(f"1 token was asked for, {tokens} came")


def main() -> int:
    """Parse the command line, ask, print one line; the exit code is what Docker looks at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="of the HTTP endpoint (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=20.0, help="in seconds (default: %(default)s)")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        ask_for_a_token(arguments.host, arguments.port, arguments.timeout)
    except UnhealthyError as error:
        print(f"unhealthy: {error}")
        return 1
    print(f"healthy: one token in {time.monotonic() - began:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
