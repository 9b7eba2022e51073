"""A request as each protocol words it: greedy, and exactly so many tokens wherever the server can be told so.

Every request of a target has the same set of fields, because Triton batches only those together.
"""

from __future__ import annotations

import json

from perf.load.plan import Asked
from perf.load.target import Target


def path(target: Target) -> str:
    """Return where the request goes."""
    match target.protocol:
        case "triton_generate":
            return f"/v2/models/{target.model}/generate"
        case "triton_stream":
            return f"/v2/models/{target.model}/generate_stream"
        case "openai_completions":
            return "/v1/completions"
        case "fastapi":
            return "/generate"


def body(target: Target, request: Asked) -> bytes:
    """Return the request's JSON; the target's own fields go over the protocol's."""
    match target.protocol:
        case "triton_generate" | "triton_stream":
            fields: dict[str, object] = {
                "text_input": request.prompt,
                "max_tokens": request.output_tokens,
                "min_tokens": request.output_tokens,
                "temperature": 0.0,
                # Over what the checkpoint says.
                "repetition_penalty": 1.0,
                "stream": target.protocol == "triton_stream",
            }
        case "openai_completions":
            fields = {
                "model": target.model,
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        case "fastapi":
            fields = {"prompt": request.prompt, "max_tokens": request.output_tokens}
    return json.dumps({**fields, **target.fields}).encode()
