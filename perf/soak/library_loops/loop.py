"""The loop of a library's process: a request a line, an answer a line. Imports nothing but the standard library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(ask: Callable[[Mapping[str, Any]], Mapping[str, object]]) -> None:
    """Answer lines until stdin ends. ask: returns text, tokens and finish_reason of a request.

    The answers go to the first stdout; what a library prints itself goes to stderr.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = ask(json.loads(line))
        except Exception as error:  # noqa: BLE001 - every library has an exception tree of its own, and all are reported
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
